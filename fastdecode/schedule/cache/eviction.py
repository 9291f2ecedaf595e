"""Which blocks a tier evicts first.

Blocks are columns, so that a policy looks at all at once. A pass over 100,000 takes milliseconds,
and a start evicts three: a pass therefore remembers the blocks that are worth least, one in
``_SHARE``, and evictions look at these and at what has changed since. Any other block is worth
more, until values have fallen with time: then another pass is due.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.schedule.cache.retention import COLUMNS, Policy, Values

if TYPE_CHECKING:
    from fastdecode.schedule.cache.blocks import Block

ANY: Final = 1
UNHIT: Final = 2
"""Never hit."""
STORED: Final = 4
"""The tier below has it, too."""

_FEWEST: Final = 256
"""Blocks that a pass remembers at least."""
_SHARE: Final = 64
"""A pass remembers one in as many blocks. It is good for as large a part of the longest time that
a block has been idle."""

Rows: TypeAlias = "slice | NDArray[np.int64]"
_Order: TypeAlias = "tuple[float, int, int]"
"""Worth, tokens up to its end, and row of a block: the lowest is evicted first."""


@dataclass
class _Ranked:
    """Rows that the last pass found, and those that have changed since."""

    rows: set[int]
    limit: int
    """Once there are more rows, a pass is due."""
    found_s: float
    until_s: float

    def is_good(self, now_s: float) -> bool:
        return self.found_s <= now_s <= self.until_s and len(self.rows) <= self.limit


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
        self._columns = np.zeros(0, COLUMNS)
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
        if not kinds:
            self._columns[row] = 0
            self._blocks[row] = None
            self._free.append(row)
            del self._entries[block]
            self._count_behind(block.parent, -1)
            return
        self._entries[block] = row, kinds, cost
        self._columns[row] = (
            cost, block.ended_s, block.num_leases, block.last_use, block.num_tokens,
            not self._behind[block], kinds,
        )  # fmt: skip
        self._mark(row)

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
                touched = [row for row in self._touched if self._blocks[row] is not None]
                for changed in self._orders(touched, now_s, kind, len(touched)):
                    latest[changed[2]] = changed
                    heapq.heappush(heap, changed)

    def least_value(self, now_s: float) -> float:
        """Return what the block is worth that is evicted first. Infinite if there is none."""
        return float(self._values(slice(None), now_s).min(initial=np.inf))

    def to_copy(self, count: int, now_s: float, more_than: float) -> list[Block]:
        """Return up to ``count`` blocks that were hit and the tier below lacks, in the order of
        eviction. All are worth more than ``more_than``."""
        columns = self._columns
        are_wanted = columns["kind"] == ANY
        num_wanted = int(np.count_nonzero(are_wanted))
        if not num_wanted:
            return []
        values = self._values(slice(None), now_s)
        ends = np.flatnonzero((values > more_than) & np.isfinite(values))
        ends = ends[np.lexsort((columns["num_tokens"][ends], values[ends]))]
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
            one = self._columns[row]
            assert self._at(row) is block and one["kind"] == kind
            assert one["is_end"] == (not behind[block]) and one["num_leases"] == block.num_leases

    def _at(self, row: int) -> Block:
        block = self._blocks[row]
        assert block is not None
        return block

    def _take_row(self, block: Block) -> int:
        if not self._free:
            num_rows = len(self._blocks)
            more = max(64, num_rows)
            self._blocks += [None] * more
            self._columns = np.concatenate([self._columns, np.zeros(more, COLUMNS)])
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
            self._columns["is_end"][entry[0]] = not self._behind[parent]
            self._mark(entry[0])
        if not self._behind[parent]:
            del self._behind[parent]

    def _mark(self, row: int) -> None:
        """Note that a row has changed."""
        self._touched.add(row)
        for ranked in self._ranked.values():
            ranked.rows.add(row)

    def _candidates(self, count: int, now_s: float, kind: int) -> list[_Order]:
        """Return the blocks to evict next, as a heap: at least one if there is any."""
        ranked = self._ranked.get(kind)
        found: list[_Order] = []
        if ranked is not None and ranked.is_good(now_s):
            found = self._orders(ranked.rows, now_s, kind, 2 * count)
        return found or self._orders(self._pass(count, now_s, kind).rows, now_s, kind, 2 * count)

    def _pass(self, count: int, now_s: float, kind: int) -> _Ranked:
        """Look at all blocks."""
        values = self._values(slice(None), now_s, kind)
        most = max(_FEWEST, count + len(values) // _SHARE)
        rows = set(_lowest(values, most).tolist())
        ended_s = self._columns["ended_s"][self._columns["kind"] > 0]
        span_s = max(0.0, now_s - float(ended_s.min(initial=np.inf))) / _SHARE
        ranked = self._ranked[kind] = _Ranked(rows, len(rows) + most, now_s, now_s + span_s)
        return ranked

    def _orders(self, rows: Iterable[int], now_s: float, kind: int, most: int) -> list[_Order]:
        """Return where rows stand in the order of eviction, as a heap: ``most`` of them, the first
        ones, or as many more as are worth the same."""
        some = np.array(list(rows), np.int64)
        if not len(some):
            return []
        values = self._values(some, now_s, kind)
        first = _lowest(values, most)
        some = some[first]
        numbers = self._columns["num_tokens"][some].tolist(), some.tolist()
        found = list(zip(values[first].tolist(), *numbers, strict=True))
        heapq.heapify(found)
        return found

    def _values(self, rows: Rows, now_s: float, kind: int = ANY) -> Values:
        """Return what rows are worth. Infinite if a row is not to be evicted."""
        some = self._columns[rows]
        may_go = (some["kind"] & kind) > 0
        if self._only_ends:
            may_go &= some["is_end"]
        return np.where(may_go, self._policy.values(some, now_s), np.inf)


def _lowest(values: Values, most: int) -> NDArray[np.int64]:
    """Return where the ``most`` lowest finite values are, and those that equal the last one."""
    if not 0 < most < len(values):
        return np.flatnonzero(np.isfinite(values))
    limit = np.partition(values, most - 1)[most - 1]
    return np.flatnonzero((values <= limit) & np.isfinite(values))
