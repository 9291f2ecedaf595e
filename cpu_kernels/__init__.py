"""CPU kernels of the R-part: append-then-attend over blocks of cached K and V.

Importing this package compiles and loads nothing heavy: the kernels come with their first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cpu_kernels.layout import (
    DTYPES,
    SOURCES,
    BlockLayout,
    StoredTokens,
    allocate_pool,
    allocate_tokens,
)

if TYPE_CHECKING:
    from cpu_kernels.kernels import append, attend, copy_blocks, gather

__all__ = [
    "DTYPES",
    "SOURCES",
    "BlockLayout",
    "StoredTokens",
    "allocate_pool",
    "allocate_tokens",
    "append",
    "attend",
    "copy_blocks",
    "gather",
]


def __getattr__(name: str) -> Any:
    if name in ("append", "attend", "copy_blocks", "gather"):
        from cpu_kernels import kernels

        found = globals()[name] = getattr(kernels, name)  # found without this function now
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
