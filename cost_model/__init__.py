"""Sizing: how many CPUs a model needs, from datasheets or measured profiles. No torch."""
