"""Instances for prefill and for decode, placed for goodput (DistServe, OSDI 2024)."""
