"""Which blocks a tier evicts first.

Blocks are columns, so that a policy looks at all at once. A pass over 100,000 takes milliseconds,
and a start evicts three: a pass therefore remembers the blocks that are worth least, one in
``_SHARE``, and evictions look at these and at what has changed since. Any other block is worth
more, until values have fallen with time, or as many have changed: then another pass is due.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.schedule.cache.retention import Columns, Policy, Values

if TYPE_CHECKING:
    from fastdecode.schedule.cache.blocks import Block

ANY: Final = 1
UNHIT: Final = 2
"""Never hit."""
STORED: Final = 4
"""The tier below has it, too."""

_FEWEST: Final = 256
"""Blocks that a pass remembers at least."""
_SHARE: Final = 128
"""A pass remembers one in as many blocks. It is good for as large a part of the longest time that
a block has been idle."""

_IS_END: Final = Columns._fields.index("is_end")

Rows: TypeAlias = NDArray[np.int64]
_Order: TypeAlias = tuple[float, float, int]
"""Worth, tokens up to its end, and row of a block: the lowest is evicted first."""


@dataclass
class _Ranked:
    """Rows that the last pass found, and those that have changed since."""

    found: Rows
    most: int
    """Rows to find. While one is as it was found, none is worth less that is not here."""
    until_s: float
    changed: set[int] = field(default_factory=set)

    def is_good_for(self, count: int, now_s: float) -> bool:
        """Return True if the next ``count`` blocks to evict are here."""
        return now_s <= self.until_s and len(self.changed) + count < self.most

    @property
    def rows(self) -> Rows:  # some may be there twice
        return np.concatenate((self.found, np.array([*self.changed], np.int64)))


class Evictable:
    """The blocks of one tier that may be evicted, each of one or more kinds: ``ANY``, and perhaps
    ``UNHIT`` and ``STORED``.

    Args:
        policy: what a block is worth.
        only_ends: blocks stay that have others behind them.
    """

    def __init__(self, policy: Policy, *, only_ends: bool = False) -> None:
        self._policy = policy
        self._only_ends = only_ends
        self._entries: dict[Block, tuple[int, int, float]] = {}  # row, kinds, cost
        self._blocks: list[Block | None] = []  # by row
        self._free: list[int] = []
        self._columns = np.zeros((len(Columns._fields), 0))
        self._kinds = np.zeros(0, np.uint8)
        self._behind: Counter[Block] = Counter()
        self._ranked: dict[int, _Ranked] = {}  # by kind
        self._touched: set[int] = set()
        self.num_unhit = 0
        self.num_stored = 0

    def __len__(self) -> int:
        return len(self._entries)

    def has_behind(self, block: Block) -> bool:
        """Return True if any of these blocks has ``block`` as its parent."""
        return self._behind[block] > 0

    def put(self, block: Block, kinds: int) -> None:
        """Add or update a block. Without any kind, remove it."""
        row, before, cost = self._entries.get(block, (-1, 0, 0.0))
        if not kinds and not before:
            return
        self.num_unhit += bool(kinds & UNHIT) - bool(before & UNHIT)
        self.num_stored += bool(kinds & STORED) - bool(before & STORED)
        if not before:
            row, cost = self._take_row(block), self._policy.cost_of(block.num_tokens)
            self._count_behind(block.parent, 1)
        self._kinds[row] = kinds
        self._mark(row)
        if not kinds:
            self._blocks[row] = None
            self._free.append(row)
            del self._entries[block]
            self._count_behind(block.parent, -1)
            return
        self._entries[block] = row, kinds, cost
        self._columns[:, row] = (
            cost, block.ended_s, block.last_use, block.num_leases, block.num_tokens,
            block not in self._behind,
        )  # fmt: skip

    def in_order(self, count: int, now_s: float, kind: int = ANY) -> Iterator[Block]:
        """Yield the blocks of a kind to evict, the first one first. The caller removes each before
        it asks for another, and asks for about ``count``."""
        while heap := self._candidates(count, now_s, kind):
            latest = {order[2]: order for order in heap}
            while heap:
                order = heapq.heappop(heap)
                if latest.get(order[2]) != order:
                    continue  # it changed meanwhile
                del latest[order[2]]
                self._touched.clear()
                yield self._at(order[2])
                touched = np.array([row for row in self._touched if self._kinds[row]], np.int64)
                for changed in self._orders(touched, now_s, kind) if len(touched) else ():
                    latest[changed[2]] = changed
                    heapq.heappush(heap, changed)

    def least_value(self, now_s: float) -> float:
        """Return what the block is worth that is evicted first. Infinite if there is none."""
        return float(self._values(now_s).min(initial=np.inf))

    def to_copy(self, count: int, now_s: float, more_than: float) -> list[Block]:
        """Return up to ``count`` blocks that were hit and the tier below lacks, in the order of
        eviction. All are worth more than ``more_than``."""
        are_wanted = self._kinds == ANY
        num_wanted = int(np.count_nonzero(are_wanted))
        if not num_wanted:
            return []
        values = self._values(now_s)
        ends = np.flatnonzero((values > more_than) & np.isfinite(values))
        num_tokens = Columns(*self._columns).num_tokens
        ends = ends[np.lexsort((num_tokens[ends], values[ends]))]
        chosen = dict.fromkeys(ends[are_wanted[ends]][:count].tolist())
        if len(chosen) < min(count, num_wanted):
            self._add_before(chosen, ends.tolist(), count, are_wanted)
        return [self._at(row) for row in chosen]

    def _add_before(
        self, chosen: dict[int, None], ends: list[int], count: int, are_wanted: NDArray[np.bool_]
    ) -> None:
        """Add blocks that become ends when those behind them are evicted."""
        seen: set[int] = set()
        for end in ends:
            block = self._at(end).parent
            while block in self._entries and (row := self._entries[block][0]) not in seen:
                if len(chosen) == count:
                    return
                seen.add(row)
                if are_wanted[row]:
                    chosen.setdefault(row)
                block = block.parent

    def check_invariants(self, members: Iterable[Block]) -> None:
        """Recount. ``members``: the blocks that may be evicted."""
        expected = set(members)
        assert expected == set(self._entries), "blocks may be evicted that may not, or the reverse"
        kinds = [kinds for _, kinds, _ in self._entries.values()]
        assert self.num_unhit == sum(bool(kind & UNHIT) for kind in kinds)
        assert self.num_stored == sum(bool(kind & STORED) for kind in kinds)
        behind = Counter(block.parent for block in expected if block.parent is not None)
        assert self._behind == behind, "blocks behind others are miscounted"
        for block, (row, kind, _) in self._entries.items():
            one = Columns(*self._columns[:, row])
            assert self._at(row) is block and self._kinds[row] == kind
            assert one.is_end == (not behind[block]) and one.num_leases == block.num_leases

    def _at(self, row: int) -> Block:
        block = self._blocks[row]
        assert block is not None
        return block

    def _take_row(self, block: Block) -> int:
        if not self._free:
            num_rows = len(self._blocks)
            more = max(64, num_rows)
            self._blocks += [None] * more
            self._columns = np.pad(self._columns, ((0, 0), (0, more)))
            self._kinds = np.pad(self._kinds, (0, more))
            self._free.extend(range(num_rows + more - 1, num_rows - 1, -1))
        row = self._free.pop()
        self._blocks[row] = block
        return row

    def _count_behind(self, parent: Block | None, count: int) -> None:
        """Count a block more or less behind ``parent``, which need not be here itself."""
        if parent is None:
            return
        self._behind[parent] += count
        entry = self._entries.get(parent)
        if entry is not None:
            self._columns[_IS_END, entry[0]] = not self._behind[parent]
            self._mark(entry[0])
        if not self._behind[parent]:
            del self._behind[parent]

    def _mark(self, row: int) -> None:
        """Note that a row has changed."""
        self._touched.add(row)
        for ranked in self._ranked.values():
            ranked.changed.add(row)

    def _candidates(self, count: int, now_s: float, kind: int) -> list[_Order]:
        """Return the blocks to evict next, as a heap: at least one if there is any."""
        found: list[_Order] = []
        if (ranked := self._ranked.get(kind)) is not None and ranked.is_good_for(count, now_s):
            found = self._orders(ranked.rows, now_s, kind, 2 * count)
        return found or self._orders(self._pass(count, now_s, kind), now_s, kind, 2 * count)

    def _pass(self, count: int, now_s: float, kind: int) -> Rows:
        """Look at all blocks. Return the rows that are worth least."""
        values = self._values(now_s, kind)
        most = max(_FEWEST, count + len(values) // _SHARE)
        ended_s = Columns(*self._columns).ended_s
        first_s = float(ended_s.min(initial=np.inf, where=self._kinds > 0))
        span_s = max(0.0, now_s - first_s) / _SHARE
        found = _lowest(values, most)
        self._ranked[kind] = _Ranked(found, most, now_s + span_s)
        return found

    def _orders(self, rows: Rows, now_s: float, kind: int, most: int = 0) -> list[_Order]:
        """Return where rows stand in the order of eviction, as a heap: all, or the ``most`` first
        ones and those that are worth the same."""
        values = self._values(now_s, kind, rows)
        first = _lowest(values, most)
        num_tokens = Columns(*self._columns).num_tokens[rows[first]].tolist()
        found = list(zip(values[first].tolist(), num_tokens, rows[first].tolist(), strict=True))
        heapq.heapify(found)
        return found

    def _values(self, now_s: float, kind: int = ANY, rows: Rows | None = None) -> Values:
        """Return what rows, or all, are worth. Infinite if a row is not to be evicted."""
        columns, kinds = self._columns, self._kinds
        if rows is not None:
            columns, kinds = columns.take(rows, axis=1), kinds[rows]
        some, may_go = Columns(*columns), (kinds & kind) > 0
        if self._only_ends:
            may_go &= some.is_end > 0
        return np.where(may_go, self._policy.values(some, now_s), np.inf)


def _lowest(values: Values, most: int) -> Rows:
    """Return where the ``most`` lowest finite values are, and those that equal the last one. 0
    stands for all."""
    if not 0 < most < len(values):
        return np.flatnonzero(np.isfinite(values))
    limit = np.partition(values, most - 1)[most - 1]
    return np.flatnonzero((values <= limit) & np.isfinite(values))
