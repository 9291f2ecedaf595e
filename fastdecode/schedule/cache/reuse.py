"""What kept blocks a sequence could start with."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from fastdecode.core.holders import HolderId, KVSource
from fastdecode.core.sequence import NOTHING
from fastdecode.schedule.cache.blocks import Index
from fastdecode.schedule.cache.stock import Stock


@dataclass(frozen=True)
class Reuse:
    """Kept blocks that a sequence could start with."""

    holders: tuple[HolderId, ...]
    """Of the sequence's first parts: where these have to be."""
    keys: tuple[tuple[bytes, ...], ...]
    """Of each of those parts, the blocks that are there; all of it but in the
    last."""
    num_tokens: int
    """That needn't run: all but the last token of the sequence at most."""
    credit: Mapping[HolderId, int]
    """Blocks of each holder that it needn't have room for."""
    num_blocks: int
    """Those of its full blocks up to where what is there ends, the gap's and
    the unseen ones included."""
    has_tail: bool = False
    """The last block isn't full."""
    gap: range = NOTHING
    """Of a whole sequence: tokens that aren't there, whole blocks, with others
    behind them that are."""
    first_token: int = 0
    """Of a whole sequence: no layer sees those before it, whole blocks. They
    needn't be there."""
    sources: tuple[KVSource, ...] = ()
    """Other engines' R-workers that keep what is missing of these blocks."""


@dataclass(frozen=True)
class _Found:
    """Blocks of one chain that are there, and may be used."""

    parts: Seq[tuple[HolderId, Seq[bytes]]]
    """Of the sequence's first parts, the holder and its blocks."""
    gap: range = NOTHING
    """Blocks of the chain that aren't there, with those behind them that are."""
    num_unseen: int = 0
    """Blocks of the chain before all of these."""

    def reuse(
        self, stock: Stock, most_tokens: int, block_size: int, *, has_tail: bool
    ) -> Reuse | None:
        """None: of what is behind the gap, nothing would be spared.

        Args:
            most_tokens: that the sequence could be spared, its gap included.
            has_tail: the last block isn't full.
        """
        num_own = sum(len(keys) for _, keys in self.parts)
        num_blocks = self.num_unseen + num_own + len(self.gap)
        num_held = min(num_blocks * block_size, most_tokens)
        gap = range(self.gap.start * block_size, self.gap.stop * block_size)
        if gap and num_held <= gap.stop:
            return None
        credit: Counter[HolderId] = Counter()
        for holder, keys in self.parts:
            credit[holder] += len(keys) - _num_idle(stock[holder], keys)
        if num_held % block_size:
            credit[self.parts[-1][0]] -= 1  # its last block is copied
        return Reuse(
            tuple([holder for holder, _ in self.parts]),
            tuple([tuple(keys) for _, keys in self.parts]),
            num_held - len(gap),
            dict(credit),
            num_blocks - has_tail,
            has_tail,
            gap,
            self.num_unseen * block_size,
        )


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
    return Reuse(
        tuple(holders[: len(parts)]),
        tuple(map(tuple, parts)),
        num_tokens,
        {},
        num_tokens // block_size,
        sources=sources,
    )


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
        with_tail: only what ends with the last of the blocks will do, and that
            isn't full.
    """
    if len(sizes) > 1:
        parts = _parts(stock, keys, sizes, block_size)
        is_there = bool(parts) and (not with_tail or sum(len(own) for _, own in parts) == len(keys))
        chains = [_Found(parts)] if is_there else []
    else:
        chains = list(_wholes(stock, keys, most_tokens, block_size, with_tail))
    found = [one.reuse(stock, most_tokens, block_size, has_tail=with_tail) for one in chains]
    return [reuse for reuse in found if reuse is not None]


def _wholes(
    stock: Stock,
    keys: Seq[bytes],
    most_tokens: int,
    block_size: int,
    with_tail: bool,
) -> Iterator[_Found]:
    """Of a whole sequence: what each holder has."""
    if with_tail and not any(stock[holder].is_usable(keys[-1]) for holder in stock.holders):
        return

    def num_unseen(num_blocks: int) -> int:
        return stock.window.num_unseen(min(num_blocks * block_size, most_tokens))

    for holder in stock.holders:
        index = stock[holder]
        leading = leading_blocks(index, keys, num_unseen)
        behind = _dearest(
            index, keys, leading.stop, lambda x: stock.policy.cost_of((x + 1) * block_size)
        )
        if with_tail and (behind or leading).stop != len(keys):
            leading, behind = _to_the_end(index, keys, leading)
        own = [*keys[leading.start : leading.stop], *keys[behind.start : behind.stop]]
        if own:
            gap = range(leading.stop, behind.start) if behind else NOTHING
            yield _Found([(holder, own)], gap, leading.start)


def leading_blocks(index: Index, keys: Seq[bytes], num_unseen: Callable[[int], int]) -> range:
    """The blocks of a chain that are there and that a sequence can start with,
    without a gap: its first ones, or, as many as there are, those that are seen
    from behind them.

    Args:
        num_unseen: of the blocks before a sequence's first token to run, as many
            as are given, those that it sees nothing of.
    """
    found = range(index.num_leading(keys))
    if num_unseen(len(keys)):
        for run in _stretches(index, keys, found.stop):
            if run.start <= num_unseen(run.stop):
                found = run
    return range(min(num_unseen(found.stop), max(0, found.stop - 1)), found.stop)


def _dearest(index: Index, keys: Seq[bytes], first: int, cost: Callable[[int], float]) -> range:
    """Of the stretches of blocks that are there the one that costs most to
    compute again: there is at most one gap."""
    dearest, behind = 0.0, NOTHING
    for stretch in _stretches(index, keys, first):
        spared = sum(map(cost, stretch))
        if spared > dearest:
            dearest, behind = spared, stretch
    return behind


def _to_the_end(index: Index, keys: Seq[bytes], leading: range) -> tuple[range, range]:
    """The leading blocks and the last stretch, if it has the last block; else
    nothing."""
    last = [NOTHING, *_stretches(index, keys, leading.stop)][-1]
    return (leading, last) if last.stop == len(keys) else (NOTHING, NOTHING)


def _stretches(index: Index, keys: Seq[bytes], first: int) -> Iterator[range]:
    """Runs of blocks that are there, from a missing one on."""
    numbers = range(first, len(keys))
    for is_there, members in itertools.groupby(numbers, lambda i: index.is_usable(keys[i])):
        if is_there:
            run = list(members)
            yield range(run[0], run[-1] + 1)


def _num_idle(index: Index, keys: Seq[bytes]) -> int:
    """How many of these blocks, all of which are usable, are idle, or take room
    once they are fetched."""
    blocks = map(index.get, keys)
    return sum(block is None or block.is_idle for block in blocks)


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
