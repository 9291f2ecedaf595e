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
    num_blocks: int
    """Those of them that are full."""

    @classmethod
    def of(
        cls,
        parts: Seq[tuple[HolderId, Seq[bytes]]],
        stock: Stock,
        most_tokens: int,
        block_size: int,
        *,
        has_tail: bool,
    ) -> Reuse:
        """
        Args:
            parts: of the first parts, the holder and its blocks.
            most_tokens: that it could be spared.
            has_tail: the last block isn't full.
        """
        num_blocks = sum(len(keys) for _, keys in parts)
        num_kept = min(num_blocks * block_size, most_tokens)
        credit: Counter[HolderId] = Counter()
        for holder, keys in parts:
            credit[holder] += len(keys) - stock[holder].num_idle_of(keys)
        if num_kept % block_size:
            credit[parts[-1][0]] -= 1  # its last block is copied
        holders = tuple([holder for holder, _ in parts])
        keys_of = tuple([tuple(keys) for _, keys in parts])
        return cls(holders, keys_of, num_kept, dict(credit), num_blocks - has_tail)

    @property
    def has_tail(self) -> bool:
        """Whether the last block isn't full."""
        return self.num_blocks < sum(map(len, self.keys))


def reuses(
    stock: Stock,
    keys: Seq[bytes],
    sizes: Seq[int],
    most_tokens: int,
    block_size: int,
    *,
    with_tail: bool = False,
) -> list[Reuse]:
    """What a sequence could start with.

    Args:
        keys: of its first blocks, all of them full.
        sizes: tokens to reserve for each of its parts.
        most_tokens: that it could be spared.
        block_size: tokens in a block.
        with_tail: only all of the blocks will do, and the last isn't full.
    """
    if len(sizes) > 1:
        parts = _parts(stock, keys, sizes, block_size)
        chains = [parts] if parts else []
    else:
        leading = [(holder, stock[holder].num_leading(keys)) for holder in stock.holders]
        chains = [[(holder, keys[:count])] for holder, count in leading if count]
    if with_tail:
        chains = [parts for parts in chains if sum(len(own) for _, own in parts) == len(keys)]
    return [Reuse.of(parts, stock, most_tokens, block_size, has_tail=with_tail) for parts in chains]


def _parts(
    stock: Stock, keys: Seq[bytes], sizes: Seq[int], block_size: int
) -> list[tuple[HolderId, Seq[bytes]]]:
    """Of a split sequence: each part is on the holder that has most of it, as
    long as that has all."""
    parts: list[tuple[HolderId, Seq[bytes]]] = []
    for size in sizes:
        num_blocks = -(-size // block_size)
        own, keys = keys[:num_blocks], keys[num_blocks:]
        leading = {holder: stock[holder].num_leading(own) for holder in stock.holders}
        best = max(stock.holders, key=leading.__getitem__)
        if leading[best]:
            parts.append((best, own[: leading[best]]))
        if leading[best] < num_blocks or not keys:
            break
    return parts
