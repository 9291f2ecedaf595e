"""Cached blocks that a sequence could start with."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from fastdecode.core.holders import HolderId, KVSource, num_offered
from fastdecode.core.sequence import NOTHING
from fastdecode.schedule.cache.blocks import Index
from fastdecode.schedule.cache.stock import Stock


@dataclass(frozen=True)
class Reuse:
    """Cached blocks that a sequence could start with. Only a whole sequence has a gap, or a first
    token."""

    holders: tuple[HolderId, ...]
    """Holders of the sequence's first parts."""
    keys: tuple[tuple[bytes, ...], ...]
    """Keys of each of those parts' cached blocks. The last part may lack some."""
    num_tokens: int
    """Tokens that are not run again: at most all but the sequence's last."""
    credit: Mapping[HolderId, int]
    """Blocks of each holder that need no room."""
    num_blocks: int
    """Its full blocks up to the last cached one, the gap's and the unseen ones included."""
    has_tail: bool = False
    """The last block is not full."""
    gap: range = NOTHING
    """Missing tokens, whole blocks, with cached ones behind them."""
    first_token: int = 0
    """First token that a layer sees, at a block's start. Blocks before it may be missing."""
    sources: tuple[KVSource, ...] = ()
    """R-workers of other engines that keep the missing ones of these blocks."""


def offered(
    stock: Stock,
    keys: Seq[bytes],
    holders: Seq[HolderId],
    sizes: Seq[int],
    num_tokens: int,
    block_size: int,
    sources: tuple[KVSource, ...],
) -> Reuse:
    """Return what a sequence starts with that other engines keep: ``num_tokens``, or those before
    a block that a holder has under its key, and that no sequence may start with.

    Args:
        keys: blocks of the sequence's first tokens; the last one may not be full.
        holders: where its parts are to be.
        sizes: tokens to reserve for each part.
    """
    parts: list[Seq[bytes]] = []
    first = 0
    for holder, num_blocks in zip(holders, (-(-size // block_size) for size in sizes), strict=True):
        own = keys[first : first + num_blocks]
        good = list(itertools.takewhile(stock[holder].may_start_with, own))
        if good:
            parts.append(good)
        first += len(good)
        if len(good) < num_blocks:
            break
    num_tokens = min(num_tokens, first * block_size)
    kept = tuple(map(tuple, parts))
    num_blocks = min(first, num_offered(sources) // block_size)
    return Reuse(tuple(holders[: len(kept)]), kept, num_tokens, {}, num_blocks, sources=sources)


def reuses(
    stock: Stock, keys: Seq[bytes], sizes: Seq[int], most_tokens: int, *, with_tail: bool = False
) -> list[Reuse]:
    """Return what a sequence could start with.

    Args:
        keys: keys of its first blocks, all of them full.
        sizes: tokens to reserve for each of its parts.
        most_tokens: tokens that it could be spared.
        with_tail: the last block is not full, and only what ends with it counts.
    """
    if len(sizes) == 1:
        found = [_wholes(stock, holder, keys, most_tokens, with_tail) for holder in stock.holders]
        return [reuse for reuse in found if reuse is not None]
    parts = _parts(stock, keys, sizes)
    if not parts or (with_tail and sum(len(own) for _, own in parts) < len(keys)):
        return []
    reuse = _reuse(stock, parts, most_tokens, with_tail)
    return [] if reuse is None else [reuse]


def _reuse(
    stock: Stock,
    parts: Seq[tuple[HolderId, Seq[bytes]]],
    most_tokens: int,
    has_tail: bool,
    gap: range = NOTHING,
    num_unseen: int = 0,
) -> Reuse | None:
    """Return a start with blocks of one chain. None if nothing behind the gap would be spared.

    Args:
        parts: holder of each of the sequence's first parts, and its blocks there.
        gap: blocks of the chain that are missing.
        num_unseen: blocks of the chain before all of these.
    """
    size = stock.block_size
    num_blocks = num_unseen + sum(len(keys) for _, keys in parts) + len(gap)
    num_held = min(num_blocks * size, most_tokens)
    gap = range(gap.start * size, gap.stop * size)
    if gap and num_held <= gap.stop:
        return None
    credit: Counter[HolderId] = Counter()
    for holder, keys in parts:
        blocks = map(stock[holder].get, keys)
        # Idle blocks take room, and so do those that are to be fetched.
        credit[holder] += sum(block is not None and not block.is_idle for block in blocks)
    if num_held % size:
        credit[parts[-1][0]] -= 1  # its last block is copied
    holders = tuple([holder for holder, _ in parts])
    own = tuple([tuple(keys) for _, keys in parts])
    spared = num_held - len(gap), dict(credit), num_blocks - has_tail
    return Reuse(holders, own, *spared, has_tail, gap, num_unseen * size)


def _wholes(
    stock: Stock, holder: HolderId, keys: Seq[bytes], most_tokens: int, with_tail: bool
) -> Reuse | None:
    """Return what a holder has of a whole sequence. There is at most one gap: before those blocks
    that cost most to compute again."""
    index, size = stock[holder], stock.block_size
    if with_tail and not index.is_usable(keys[-1]):
        return None
    leading = leading_blocks(stock, index, keys, most_tokens)
    stretches = list(_stretches(index, keys, leading.stop))
    behind = NOTHING
    if stretches:
        cost = stock.policy.cost_of
        behind = max(stretches, key=lambda run: sum(cost((i + 1) * size) for i in run))
    if with_tail and (behind or leading).stop != len(keys):
        behind = stretches[-1] if stretches else NOTHING
        if behind.stop != len(keys):
            return None
    own = [*keys[leading.start : leading.stop], *keys[behind.start : behind.stop]]
    if not own:
        return None
    gap = range(leading.stop, behind.start) if behind else NOTHING
    return _reuse(stock, [(holder, own)], most_tokens, with_tail, gap, leading.start)


def leading_blocks(stock: Stock, index: Index, keys: Seq[bytes], most_tokens: int) -> range:
    """Return the blocks of a chain with which a sequence can start without a gap: its first ones,
    or a later run of blocks that has all that tokens behind it see."""

    def num_unseen(num_blocks: int) -> int:
        return stock.window.num_unseen(min(num_blocks * stock.block_size, most_tokens))

    found = range(index.num_leading(keys))
    if num_unseen(len(keys)):
        for run in _stretches(index, keys, found.stop):
            if run.start <= num_unseen(run.stop):
                found = run
    return range(min(num_unseen(found.stop), max(0, found.stop - 1)), found.stop)


def _stretches(index: Index, keys: Seq[bytes], first: int) -> Iterator[range]:
    """Return the runs of usable blocks from block ``first`` on."""
    numbers = range(first, len(keys))
    for is_there, members in itertools.groupby(numbers, lambda i: index.is_usable(keys[i])):
        if is_there:
            run = list(members)
            yield range(run[0], run[-1] + 1)


def _parts(stock: Stock, keys: Seq[bytes], sizes: Seq[int]) -> list[tuple[HolderId, Seq[bytes]]]:
    """Place a split sequence's parts, each on the holder that has most of it, up to the first part
    that no holder has whole."""
    parts: list[tuple[HolderId, Seq[bytes]]] = []
    for size in sizes:
        num_blocks = -(-size // stock.block_size)
        own, keys = keys[:num_blocks], keys[num_blocks:]
        leading = {holder: stock[holder].num_leading(own) for holder in stock.holders}
        best = max(stock.holders, key=leading.__getitem__)
        if leading[best]:
            parts.append((best, own[: leading[best]]))
        if leading[best] < num_blocks or not keys:
            break
    return parts
