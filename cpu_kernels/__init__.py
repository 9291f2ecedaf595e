"""CPU kernels of the R-part: append-then-attend over blocks of cached K and V.

Importing this package compiles and loads nothing heavy: the kernels come with their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cpu_kernels.layout import DTYPES, SOURCES, BlockLayout, allocate_pool

if TYPE_CHECKING:
    from cpu_kernels.kernels import append, attend, copy_blocks

__all__ = ["DTYPES", "SOURCES", "BlockLayout", "allocate_pool", "append", "attend", "copy_blocks"]


def __getattr__(name: str) -> Any:
    if name in ("append", "attend", "copy_blocks"):
        from cpu_kernels import kernels

        return getattr(kernels, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
