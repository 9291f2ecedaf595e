"""Marks in a text that comes in pieces."""

from __future__ import annotations


def num_begun(text: str, mark: str) -> int:
    """Characters at the end of a text that may begin a mark."""
    most = min(len(text), len(mark) - 1)
    return next((n for n in range(most, 0, -1) if mark.startswith(text[-n:])), 0)
