"""What kept blocks a sequence could start with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from fastdecode.core.holders import HolderId
from fastdecode.schedule.cache.stock import Stock


@dataclass(frozen=True)
class Reuse:
    """Kept blocks that a sequence could start with."""

    holders: tuple[HolderId, ...]
    """Of the sequence's first parts: where these have to be."""
    keys: tuple[tuple[bytes, ...], ...]
    """Of each of those parts, its first blocks; all of it but in the last."""
    num_tokens: int
    """That needn't run: all but the last token of the sequence at most."""
    credit: Mapping[HolderId, int]
    """Blocks of each holder that it needn't have room for."""

    @classmethod
    def of(
        cls,
        parts: Seq[tuple[HolderId, Seq[bytes]]],
        stock: Stock,
        num_tokens: int,
        block_size: int,
    ) -> Reuse:
        """
        Args:
            parts: of the first parts, the holder and its blocks.
            num_tokens: of the sequence.
        """
        num_kept = min(sum(len(keys) for _, keys in parts) * block_size, num_tokens - 1)
        credit: Counter[HolderId] = Counter()
        for holder, keys in parts:
            credit[holder] += len(keys) - stock.num_idle_of(holder, keys)
        if num_kept % block_size:
            credit[parts[-1][0]] -= 1  # its last block is copied
        holders = tuple([holder for holder, _ in parts])
        return cls(holders, tuple([tuple(keys) for _, keys in parts]), num_kept, dict(credit))


def reuses(
    stock: Stock, keys: Seq[bytes], sizes: Seq[int], num_tokens: int, block_size: int
) -> list[Reuse]:
    """What a sequence could start with, most tokens first.

    Args:
        keys: of all blocks that its tokens fill.
        sizes: tokens to reserve for each of its parts.
        num_tokens: that it has.
        block_size: tokens in a block.
    """
    if len(sizes) > 1:
        parts = _parts(stock, keys, sizes, block_size)
        found = [Reuse.of(parts, stock, num_tokens, block_size)] if parts else []
    else:
        leading = [(holder, stock.num_leading(holder, keys)) for holder in stock.holders]
        found = [
            Reuse.of([(holder, keys[:count])], stock, num_tokens, block_size)
            for holder, count in leading
            if count
        ]
    return sorted(found, key=lambda reuse: -reuse.num_tokens)


def _parts(
    stock: Stock, keys: Seq[bytes], sizes: Seq[int], block_size: int
) -> list[tuple[HolderId, Seq[bytes]]]:
    """Of a split sequence: each part is on the holder that has most of it, as
    long as that has all."""
    parts: list[tuple[HolderId, Seq[bytes]]] = []
    for size in sizes:
        num_blocks = size // block_size
        own, keys = keys[:num_blocks], keys[num_blocks:]
        leading = {holder: stock.num_leading(holder, own) for holder in stock.holders}
        best = max(stock.holders, key=leading.__getitem__)
        if leading[best]:
            parts.append((best, own[: leading[best]]))
        if leading[best] < num_blocks or not keys:
            break
    return parts
