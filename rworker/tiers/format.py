"""Format of files of cached KV blocks: fixed slots, so that the quota holds and nothing is moved.

::

    0      header  magic, format, layers, bytes of a layer, slots, identity, crc32
    4096   table   slots × (state, key, tokens, generation, crc32 of each layer,
                   crc32 of all that), padded to 64 bytes each
    data   slots × (layers × bytes of a layer, padded to 4096): layer after layer

All is little-endian. A slot's entry is cleared before the slot is written, and written once it is
whole. Checksums find what is torn or damaged. The **identity** names what K and V depend on beside
tokens, and which heads these are: a file with another one is of no use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from struct import error as StructError
from typing import Final
from zlib import crc32

from fastdecode.core.model.block_keys import KEY_BYTES
from fastdecode.wire.blocks import MAX_SLOTS

PAGE_BYTES: Final = 4096
"""Direct reads and writes begin and end at multiples of this, in the file and in memory."""
MAX_LAYERS: Final = 1 << 12
MAX_SLOT_BYTES: Final = 1 << 31
MAX_TOKENS: Final = 1 << 24

_MAGIC: Final = b"FDKVSLOT"
_FORMAT: Final = 1
_HEADER: Final = Struct("<8sIIQQ64s")
_ENTRY: Final = Struct(f"<I{KEY_BYTES}sIQ")
_CRC: Final = Struct("<I")
_FULL: Final = 0x4C4C5546
"""The state of a slot that holds a block."""


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class SlotShape:
    """What each slot of a file holds.

    Args:
        identity: 64 characters.
        num_layers: layers of the cache.
        layer_bytes: bytes of a block in one layer.
    """

    identity: str
    num_layers: int
    layer_bytes: int

    def __post_init__(self) -> None:
        assert len(self.identity.encode("ascii")) == 64
        assert 1 <= self.num_layers <= MAX_LAYERS and self.layer_bytes >= 1
        assert self.slot_bytes <= MAX_SLOT_BYTES

    @cached_property
    def slot_bytes(self) -> int:
        return _round_up(self.num_layers * self.layer_bytes, PAGE_BYTES)

    @cached_property
    def entry_bytes(self) -> int:
        return _round_up(_ENTRY.size + _CRC.size * (self.num_layers + 1), 64)

    def data_start(self, num_slots: int) -> int:
        return _round_up(PAGE_BYTES + num_slots * self.entry_bytes, PAGE_BYTES)

    def file_bytes(self, num_slots: int) -> int:
        return self.data_start(num_slots) + num_slots * self.slot_bytes

    def num_slots_within(self, num_bytes: int) -> int:
        """Return how many slots fit into a file of ``num_bytes``."""
        most = (num_bytes - PAGE_BYTES) // (self.slot_bytes + self.entry_bytes)
        count = max(0, min(MAX_SLOTS, most))
        return count - (count > 0 and self.file_bytes(count) > num_bytes)

    def header(self, num_slots: int) -> bytes:
        identity = self.identity.encode("ascii")
        shape = (self.num_layers, self.layer_bytes, num_slots)
        head = _HEADER.pack(_MAGIC, _FORMAT, *shape, identity)
        return (head + _CRC.pack(crc32(head))).ljust(PAGE_BYTES, b"\0")

    def range_of(self, layers: range) -> tuple[int, int]:
        """Return the first and the last byte of a slot's pages that hold these layers."""
        first = layers.start * self.layer_bytes // PAGE_BYTES * PAGE_BYTES
        return first, _round_up(layers.stop * self.layer_bytes, PAGE_BYTES)


@dataclass(frozen=True)
class Entry:
    """What a slot holds."""

    key: bytes
    num_tokens: int
    """Tokens up to the block's end, of any sequence that has it."""
    generation: int
    """Higher for a block that was stored later."""
    checksums: tuple[int, ...]
    """Checksum of each layer."""

    def pack(self, entry_bytes: int) -> bytes:
        head = _ENTRY.pack(_FULL, self.key, self.num_tokens, self.generation)
        head += Struct(f"<{len(self.checksums)}I").pack(*self.checksums)
        return (head + _CRC.pack(crc32(head))).ljust(entry_bytes, b"\0")


@dataclass(frozen=True)
class Header:
    shape: SlotShape
    num_slots: int


def is_own(page: bytes) -> bool:
    """Return True if a file with this first page was made for KV blocks. It may be damaged: an
    R-worker that was killed leaves one of zeros, or an empty one."""
    return page.startswith(_MAGIC) or not page.strip(b"\0")


def read_header(page: bytes) -> Header | None:
    """Read a file's first page. None if it is damaged, or another program's."""
    try:
        magic, form, num_layers, layer_bytes, num_slots, identity = _HEADER.unpack_from(page)
        (checksum,) = _CRC.unpack_from(page, _HEADER.size)
    except StructError:
        return None
    if magic != _MAGIC or form != _FORMAT or checksum != crc32(page[: _HEADER.size]):
        return None
    is_bounded = 1 <= num_layers <= MAX_LAYERS and 1 <= num_slots <= MAX_SLOTS
    if not is_bounded or not 1 <= num_layers * layer_bytes <= MAX_SLOT_BYTES - PAGE_BYTES:
        return None
    if not (identity.isascii() and identity.isalnum()):
        return None
    return Header(SlotShape(identity.decode(), num_layers, layer_bytes), num_slots)


def read_entries(table: bytes, shape: SlotShape, num_slots: int) -> tuple[dict[int, Entry], int]:
    """Read a table: its entries by slot, and how many are damaged. Of several with one key the
    latest counts."""
    numbers = Struct(f"<{shape.num_layers}I")
    size, found, num_damaged = _ENTRY.size + numbers.size, dict[bytes, int](), 0
    entries: dict[int, Entry] = {}
    for slot in range(num_slots):
        entry = table[slot * shape.entry_bytes : (slot + 1) * shape.entry_bytes]
        state, key, num_tokens, generation = _ENTRY.unpack_from(entry)
        if state != _FULL:
            num_damaged += state != 0
            continue
        (checksum,) = _CRC.unpack_from(entry, size)
        if checksum != crc32(entry[:size]) or not 1 <= num_tokens <= MAX_TOKENS:
            num_damaged += 1
            continue
        told = Entry(key, num_tokens, generation, numbers.unpack_from(entry, _ENTRY.size))
        before = found.get(key)
        if before is not None and entries[before].generation > generation:
            continue
        if before is not None:
            del entries[before]
        found[key], entries[slot] = slot, told
    return entries, num_damaged
