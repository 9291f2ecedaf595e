"""Which way to prefetch is the fastest on this host for one layout: the ways take turns on
parts of one working set."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Final

import numpy as np

from cpu_kernels.dispatch import choose_variant, fits_byte_tiles
from cpu_kernels.isa import default_level
from cpu_kernels.kernels import attend
from cpu_kernels.layout import CARRIERS, BlockLayout, allocate_pool
from cpu_kernels.prefetch import DEFAULT_PREFETCH, PREFETCHES, Prefetch
from cpu_kernels.team import OpenMPTeam

MARGIN: Final = 0.04
"""The default is left for a way that takes so much less of its time, in the median of the
turns."""
WINS: Final = 7 / 8
"""And that is faster in so many of the turns."""
CALM: Final = 1.3
"""From one quarter of the default's turns to three quarters, times grow by less on a host that
does nothing else."""
LIMIT_S: Final = 0.3
MIN_TURNS: Final = 32
MAX_TURNS: Final = 64
_SEQUENCE_BLOCKS = 4
_PART_BYTES = 8 << 20
_MIN_PARTS = 8
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Trial:
    """What was measured, and which way it favours."""

    chosen: Prefetch
    gb_per_s: dict[str, float]
    """Of blocks, by the names of the ways; medians."""
    is_calm: bool
    """Whether the turns were alike enough for the result to be kept."""


def candidates(layout: BlockLayout, num_q_heads: int, source: str) -> tuple[Prefetch, ...]:
    """The ways that may be the fastest, the default first. Products in AMX tiles gain from no
    prefetch at some shapes and never from T1; other products the other way round."""
    group, level = num_q_heads // layout.num_kv_heads, default_level()
    variant = choose_variant(layout, group, level, source, ragged=False)
    left_out = "t1" if variant.dot == "amx" else "none"
    has_byte_tiles = fits_byte_tiles(layout, level)
    fitting = (way for way in PREFETCHES if has_byte_tiles or not way.byte_tiles)
    return tuple(way for way in fitting if not way.name.startswith(left_out))


def favour(seconds: Mapping[Prefetch, Sequence[float]]) -> Prefetch:
    """The default, unless another way is faster by MARGIN in the median of the turns, and in
    WINS of them; of several such ways the first that is within MARGIN of the best.

    Args:
        seconds: by way, one number for each turn.
    """
    ratios = {
        way: [a / b for a, b in zip(taken, seconds[DEFAULT_PREFETCH], strict=True)]
        for way, taken in seconds.items()
    }
    faster = {
        way: median(taken)
        for way, taken in ratios.items()
        if median(taken) <= 1 - MARGIN and sum(x < 1 for x in taken) >= WINS * len(taken)
    }
    best = min(faster.values(), default=1.0)
    return next(
        (way for way in seconds if faster.get(way, 1.0) <= best * (1 + MARGIN) and way in faster),
        DEFAULT_PREFETCH,
    )


def is_calm(seconds: Sequence[float]) -> bool:
    """Whether one way's turns took about as long as each other."""
    low, _, high = quantiles(seconds, n=4)
    return high < CALM * low


class _WorkingSet:
    """A cache of zeros and one step's queries, in parts that are attended one by one. Every
    page is written, or all of them would be one page."""

    def __init__(
        self, layout: BlockLayout, num_q_heads: int, source: str, num_bytes: int, threads: int
    ) -> None:
        sequence_bytes = _SEQUENCE_BLOCKS * layout.block_bytes
        batch = max(_PART_BYTES // sequence_bytes, 2 * threads)
        self.num_parts = max(_MIN_PARTS, num_bytes // (batch * sequence_bytes))
        num_blocks = self.num_parts * batch * _SEQUENCE_BLOCKS
        self._layout, self._source = layout, source
        self._pool = allocate_pool(layout, 1, num_blocks)[0]
        self._pool.reshape(-1)[::_PAGE_BYTES] = 0
        order = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        self._tables = order.reshape(self.num_parts, batch, -1)
        self._q = np.zeros((batch, num_q_heads, layout.head_dim), CARRIERS[source])
        self._out = np.empty_like(self._q)
        self._starts = np.arange(batch + 1, dtype=np.int32)
        self._lens = np.full(batch, _SEQUENCE_BLOCKS * layout.block_size, np.int32)
        self.part_bytes = batch * sequence_bytes

    def attend(self, part: int, prefetch: Prefetch, threads: Mapping[str, Any]) -> None:
        """Read one part of the cache."""
        attend(
            self._layout, self._pool, self._q, self._tables[part % self.num_parts], self._starts,
            self._lens - 1, self._lens, scale=1.0, out=self._out, source=self._source,
            prefetch=prefetch, **threads,
        )  # fmt: skip


def measure_prefetch(
    layout: BlockLayout,
    num_q_heads: int,
    source: str,
    *,
    num_bytes: int,
    num_threads: int = 1,
    team: OpenMPTeam | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Trial:
    """Attend parts of a cache in turns, MIN_TURNS times and on until LIMIT_S are over. A part
    isn't read again before the others were.

    Kernels that aren't on disk are compiled before, which takes seconds.

    Args:
        source: element type of q, as in ``attend``.
        num_bytes: of the cache; more than the caches of the CPU hold.
        num_threads, team: as in ``attend``.
    """
    work = _WorkingSet(layout, num_q_heads, source, num_bytes, num_threads)
    threads: dict[str, Any] = {"num_threads": num_threads, "team": team}
    ways = candidates(layout, num_q_heads, source)
    for way in ways:
        work.attend(0, way, threads)
    seconds: dict[Prefetch, list[float]] = {way: [] for way in ways}
    began_s, part = clock(), 0
    for turn in range(MAX_TURNS):
        if turn >= MIN_TURNS and clock() - began_s > LIMIT_S:
            break
        for way in ways:
            start_s, part = clock(), part + 1
            work.attend(part, way, threads)
            seconds[way].append(clock() - start_s)
    rates = {way.name: work.part_bytes / median(taken) / 1e9 for way, taken in seconds.items()}
    return Trial(favour(seconds), rates, is_calm(seconds[DEFAULT_PREFETCH]))
