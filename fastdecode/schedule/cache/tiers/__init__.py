"""Blocks that a lower tier has, and what is moved between tiers."""
