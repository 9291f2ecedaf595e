"""Attention over blocks of cached K and V: one kernel, by parts."""
