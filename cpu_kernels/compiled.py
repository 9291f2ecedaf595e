# mypy: ignore-errors
# Numba's types are not Python's.
"""How functions become machine code: few entry points, which are kept on disk, and the parts they are made of."""

from __future__ import annotations

from numba import njit

entry = njit(nogil=True, cache=True)
"""A function that is called from Python or by its address; compiled once a host."""
part = njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""A function that only compiled functions call. It lives in their machine code and has none of its own on disk."""
