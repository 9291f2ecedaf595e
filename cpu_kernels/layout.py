"""How one layer's KV blocks lie in memory.

A **KV block** holds K and V of ``block_size`` tokens for all KV heads of one
layer. K and V of one head stand side by side, both as rows of **cells**; a cell
packs ``pack`` elements that follow each other along the summed axis::

    block  [num_kv_heads]
      head   K       cells [dim_words, padded_tokens]
                     cell (w, t): dims w*pack … of token t
             V       cells [dim tiles, token_words, tile_dims]
                     cell (w, d): tokens w*pack … at dim d
             scales  float32 [2, padded_tokens]
                     int8 and int4 only: of K, of V, one a token

    float32   pack 1, 32-bit cells
    float16   pack 1, 16-bit cells
    bfloat16  pack 2, 32-bit cells
    int8      pack 4: bytes, value + 128 in K, signed in V
    int4      pack 8: nibbles, value + 8; byte i holds element i in its lower
              and element i + 4 in its upper half

so that a score needs no horizontal sum: a vector of K cells is many tokens at
the same dims, to be multiplied with one broadcast query operand, and a vector
of V cells is many dims at the same tokens. Packing along the summed axis is
what the dot products (``vdpbf16ps``, ``vpdpbusd``) and AMX tiles read as it is,
and plain FMAs unpack with a shift and a mask; float16 has no such instruction,
and unpaired it converts straight from memory. Rows are padded to whole vectors.
V is cut into tiles of as many dims as a register tile takes at once, so that
both products walk through memory from one end to the other, which is what
prefetchers foresee. The layout doesn't depend on the host's features, so blocks
can be shipped between hosts as they are.

Out of blocks, a token is what it is in no matter which block, a **stored row**
for K and one for V of each head::

    float32   float32 [head_dim]
    float16   uint16 [head_dim], the bits
    bfloat16  uint16 [head_dim], the bits
    int8      uint8 [head_dim]: value + 128
    int4      uint8 [4 * ceil(head_dim / 8)]: cells as in K, and zeros beyond
              head_dim

and for int8 and int4 float32 [2], the scales of K and of V.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

LANES: Final = 16  # rows of cells are padded to a multiple of this: the lanes of the widest vector
ALIGNMENT: Final = 64
HUGE_PAGE_BYTES: Final = 2 << 20

_PACK: Final = {"float32": 1, "float16": 1, "bfloat16": 2, "int8": 4, "int4": 8}
DTYPES: Final = tuple(_PACK)  # element types a KV cache can have
SOURCES: Final = ("float32", "float16", "bfloat16")
"""Element types that q, k, v and o can have; the 16-bit ones travel as their bits in uint16."""
CARRIERS: Final = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.uint16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.uint8),
    "int4": np.dtype(np.uint8),
}
"""The NumPy dtype in which elements of each type travel."""
MAX_BLOCK_SIZE: Final = 256
MAX_HEADS: Final = 1024
MAX_HEAD_DIM: Final = 512


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class BlockLayout:
    """One layer's KV block: all its heads' K and V for ``block_size`` tokens.

    Raises:
        ValueError: a field is out of range.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str  # one of ``DTYPES``
    block_size: int = 64

    def __post_init__(self) -> None:
        if self.dtype not in _PACK:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        for name, value, most in (
            ("num_kv_heads", self.num_kv_heads, MAX_HEADS),
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
            ("block_size", self.block_size, MAX_BLOCK_SIZE),
        ):
            if not 1 <= value <= most:
                raise ValueError(f"{name}={value} is not within 1..{most}")

    @cached_property
    def pack(self) -> int:
        """Elements in a cell."""
        return _PACK[self.dtype]

    @cached_property
    def cell_bytes(self) -> int:
        return 2 if self.dtype == "float16" else 4

    @cached_property
    def is_quantized(self) -> bool:
        return self.dtype in ("int8", "int4")

    @property
    def row_length(self) -> int:
        """Elements, of ``CARRIERS[dtype]``, of a stored row."""
        return 4 * -(-self.head_dim // 8) if self.dtype == "int4" else self.head_dim

    @cached_property
    def padded_tokens(self) -> int:
        """Cells in a row of K."""
        return _round_up(self.block_size, LANES)

    @cached_property
    def padded_dims(self) -> int:
        """Cells of all dims of V."""
        return _round_up(self.head_dim, LANES)

    @property
    def tile_dims(self) -> int:
        """Dims of V in a tile: the most vectors, up to 7, that divide
        ``padded_dims``; 4 if they do."""
        vectors = self.padded_dims // LANES
        return LANES * (4 if vectors % 4 == 0 else max(d for d in range(1, 8) if vectors % d == 0))

    @property
    def tile_bytes(self) -> int:
        """Bytes from one tile of V to the next."""
        return self.token_words * self.tile_dims * self.cell_bytes

    @cached_property
    def dim_words(self) -> int:
        """Rows of K."""
        return -(-self.head_dim // self.pack)

    @cached_property
    def token_words(self) -> int:
        """Rows of a tile of V."""
        return -(-self.block_size // self.pack)

    @cached_property
    def v_offset(self) -> int:
        """Bytes from a head's beginning to its V."""
        return _round_up(self.dim_words * self.padded_tokens * self.cell_bytes, ALIGNMENT)

    @cached_property
    def scale_offset(self) -> int:
        """Bytes from a head's beginning to its scales of K, followed by those of V."""
        return self.v_offset + _round_up(
            self.token_words * self.padded_dims * self.cell_bytes, ALIGNMENT
        )

    @cached_property
    def head_bytes(self) -> int:
        """Bytes from one head of a block to the next."""
        return self.scale_offset + (2 * self.padded_tokens * 4 if self.is_quantized else 0)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, padding included; a multiple of 64."""
        return self.num_kv_heads * self.head_bytes


class StoredTokens(NamedTuple):
    """Tokens' K and V as a cache stores them, out of its blocks. What
    ``gather`` fills, ``append`` puts back."""

    k: NDArray[Any]  # [T, heads, row_length]
    v: NDArray[Any]  # [T, heads, row_length]
    scales: NDArray[np.float32] | None  # [T, heads, 2], of K and of V; int8 and int4 only


def allocate_tokens(
    layout: BlockLayout, num_tokens: int, num_heads: int | None = None
) -> StoredTokens:
    """Uninitialised room for so many tokens of so many heads, by default all.
    Arrays begin on cache lines."""
    heads = layout.num_kv_heads if num_heads is None else num_heads

    def room(dtype: np.dtype[Any], length: int) -> NDArray[Any]:
        memory = aligned_bytes(num_tokens * heads * length * dtype.itemsize)
        return memory.view(dtype).reshape(num_tokens, heads, length)

    k, v = (room(CARRIERS[layout.dtype], layout.row_length) for _ in range(2))
    return StoredTokens(k, v, room(CARRIERS["float32"], 2) if layout.is_quantized else None)


def aligned_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """Uninitialised memory that begins on a cache line."""
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


def allocate_pool(
    layout: BlockLayout, num_layers: int, num_blocks: int, file: int | None = None
) -> NDArray[np.uint8]:
    """A pool of zeroed KV blocks, committed lazily: a page costs memory only once it is written.

    The memory is an anonymous mapping that asks for huge pages. Pages fall on the NUMA node of
    the thread that first writes them, so let the process that owns the pool run on one node.

    Args:
        file: Descriptor of an empty file, whose pages are mapped instead: the disk space is
            taken now, and memory is used as the host has some.

    Returns:
        uint8 [num_layers, num_blocks, block_bytes], 64-byte aligned.

    Raises:
        ValueError: a count is below 1.
        MemoryError, OSError: the address space, or room on the disk, can't be reserved.
    """
    if num_layers < 1 or num_blocks < 1:
        raise ValueError(f"num_layers={num_layers} and num_blocks={num_blocks} must be >= 1")
    shape = (num_layers, num_blocks, layout.block_bytes)
    num_bytes = num_layers * num_blocks * layout.block_bytes
    mapped_bytes = num_bytes + HUGE_PAGE_BYTES
    if file is None:
        mapping = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        os.posix_fallocate(file, 0, mapped_bytes)  # or a write into a page could kill
        mapping = mmap.mmap(file, mapped_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # of a kernel that has none
            mapping.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(mapping, dtype=np.uint8)
    start = -raw.ctypes.data % HUGE_PAGE_BYTES  # the first layer begins on a huge page
    return raw[start : start + num_bytes].reshape(shape)
