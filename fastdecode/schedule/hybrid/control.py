"""KV on both sides, as it runs: when the rule is asked, and what follows from its answer.

The device is one holder, the others are R-workers. Sequences on the device step in the first lane,
the **home lane**, the others in the second, the **away lane**. A single lane has both.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId, Residence, SequenceId
from fastdecode.core.sequence import Sequence
from fastdecode.schedule.hybrid import forecast
from fastdecode.schedule.hybrid.forecast import Costs, Course, Guess, Known, Layout, Work
from fastdecode.schedule.lengths import LengthPredictor
from fastdecode.schedule.plan import Lane, cached_at_end
from fastdecode.schedule.reserving.ledger import BlockLedger
from fastdecode.schedule.times import StepTime

MAX_LANES = 2
EVERY = 64  # steps of the home lane between two looks at the whole
_SHARE = 200  # the rule takes at most 1 / _SHARE of the time
_MEASURED_ERROR = 0.05  # of forecasts at least: they know no prompts, and no chance
_HORIZON = 256  # leading waiting sequences that the rule knows
_WINDOW = 64  # steps of the home lane that the guard judges together
_MIN_RATE = 0.97  # of what the device alone would give
_CLOSED_STEPS = 256  # of the home lane, for which no sequence goes away after that

Rule: TypeAlias = Callable[[Known, Course, Costs, float], Course]
View: TypeAlias = tuple[Seq[Lane], Seq[Sequence]]  # lanes, and the sequences that wait


@dataclass(frozen=True)
class HybridOptions:
    """How the two sides share sequences. All holders but ``device`` are R-workers."""

    device: HolderId
    guess: Guess
    error: float = 0.2  # part by which costs may be off until R-workers have been measured
    measured_steps: int = 32  # steps with R-workers that measure them
    clock: Clock = time.monotonic
    rule: Rule = forecast.choose


@dataclass
class HybridCounts:
    """Steps in each mode, and how often the guard kept sequences from leaving."""

    steps: Counter[str] = field(default_factory=Counter)
    """Steps of the home lane, and of others while it is empty: gpu-only, mixed, split-1, R-only."""
    num_closed: int = 0


class HybridGuard:
    """Keeps sequences from leaving for a while after R-workers made all slower.

    What the device would give alone is predicted, and the prediction trusted as far as it was
    right while the device was alone.
    """

    def __init__(self, counts: HybridCounts) -> None:
        self._counts = counts
        self._is_right: float | None = None  # measured over predicted rate of the device alone
        self.closed_for = 0  # steps of the home lane for which no sequence goes away
        self._before_s: float | None = None
        self._restart()

    def away_step(self, num_decoding: int) -> None:
        """Note that ``num_decoding`` away sequences got a token each."""
        self._num_away_tokens += num_decoding
        self._is_alone = False

    def home_step(
        self, num_decoding: int, expected_s: float, now_s: float, *, is_alone: bool, is_full: bool
    ) -> None:
        """Note the end of a step of the home lane.

        Args:
            num_decoding: Home sequences that got a token each.
            expected_s: Seconds that it would have taken with no sequence away.
            is_alone: True if no sequence is away.
            is_full: True if a sequence waits for room. An idle device is not judged.
        """
        self.closed_for = max(0, self.closed_for - 1)
        before_s, self._before_s = self._before_s, now_s
        if before_s is None or not is_full:
            self._restart()
            return
        self._num_home_tokens += num_decoding
        self._elapsed_s += now_s - before_s
        self._expected_s += expected_s
        self._is_alone = self._is_alone and is_alone
        self._num_steps += 1
        if self._num_steps >= _WINDOW:
            if self._elapsed_s > 0 and self._expected_s > 0:
                self._judge()
            self._restart()

    def _judge(self) -> None:
        alone = self._num_home_tokens / self._expected_s
        measured = (self._num_home_tokens + self._num_away_tokens) / self._elapsed_s
        if self._is_alone:
            self._is_right = measured / alone
        elif self._is_right is not None and measured < _MIN_RATE * self._is_right * alone:
            self.closed_for = _CLOSED_STEPS
            self._counts.num_closed += 1

    def _restart(self) -> None:
        self._num_steps = self._num_home_tokens = self._num_away_tokens = 0
        self._elapsed_s = self._expected_s = 0.0
        self._is_alone = True


class HybridControl:
    """Decides where sequences start, and in how many lanes they step.

    Args:
        times: Step times, as far as they are measured.
        max_num_sequences: Most sequences that run at once.
    """

    def __init__(
        self,
        options: HybridOptions,
        ledger: BlockLedger,
        lengths: LengthPredictor,
        times: StepTime,
        max_num_sequences: int,
    ) -> None:
        self._options, self._ledger, self._clock = options, ledger, options.clock
        self._device = options.device
        self._lengths, self._times = lengths, times
        self._max_num_sequences = max_num_sequences
        self.view: Callable[[], View] = lambda: ((), ())  # the scheduler gives it
        self._course = Course(Layout.SPLIT)
        self._leaving: set[SequenceId] = set()  # those that may go to R-workers
        self._num_lanes = 1
        self._num_home_steps = self._num_away_steps = 0
        self._asked_at = self._parted_at = -EVERY  # steps of the home lane
        self._ask_at_s = -math.inf
        self._asked_for = (-1, -1)  # sequences that ran and waited
        self.counts = HybridCounts()
        self._guard = HybridGuard(self.counts)

    def begin_plan(self, head: Sequence) -> None:
        """Ask the rule for those that wait, if the device has no room for the first (``head``)."""
        free_blocks = self._ledger.available_blocks(self._device)
        has_room = self._fits_home(head) and self._num_blocks(head) <= free_blocks
        stays = has_room and not self._is_cached_away(head)
        if head.sequence_id in self._leaving or stays:
            return
        lanes, waiting = self.view()
        numbers = sum(len(lane.running) for lane in lanes), len(waiting)
        if numbers != self._asked_for:  # otherwise none has arrived, started or ended since
            self._asked_for = numbers
            self._ask()

    def among(
        self, lane: int, sequence: Sequence, tiers: Seq[Seq[HolderId]]
    ) -> list[list[HolderId]]:
        """Return the holders, of those with room, where a sequence may start in this lane.

        On the device whenever that has room, unless the rule has found that what R-workers have
        cached of it is worth the way there.
        """
        fits_home, has_room = self._fits_home(sequence), any(self._device in tier for tier in tiers)
        away = [found for tier in tiers if (found := [h for h in tier if h != self._device])]
        may_leave = sequence.sequence_id in self._leaving and not self._guard.closed_for
        follows = away and may_leave and self._is_cached_away(sequence)
        if fits_home and has_room and not follows:
            return [[self._device]] if lane == 0 else []
        is_alone = self._num_lanes == 1
        if not away or (lane == 0 and not is_alone):
            return []
        may_go = may_leave and (self._course.layout is Layout.MIXED) is is_alone
        # A home sequence that runs makes room at its end. What only waits to be fetched by
        # another engine may wait for a sibling that has not run.
        waits = fits_home and not may_go
        if waits and any(x.reserved_tokens[self._device] for x in self.view()[0]):
            return []
        return away

    def alike(self, holder: HolderId, present: Seq[HolderId]) -> Seq[HolderId]:
        """Return the holders on the same side."""
        return [one for one in present if (one == self._device) == (holder == self._device)]

    def started(self, sequence: Sequence, residence: Residence) -> None:
        """Note where a sequence starts.

        If it was to leave and found room at home, the others' leave is void: with fewer that
        share an away lane's weights it might not pay.
        """
        if sequence.sequence_id in self._leaving and residence.is_on(self._device):
            self._leaving = set()
            self._asked_for = (-1, -1)
        self._leaving.discard(sequence.sequence_id)

    def lane_of(self, holder: HolderId, num_lanes: int) -> int:
        """Return the lane of a sequence on this holder when there are ``num_lanes``."""
        return 0 if holder == self._device else num_lanes - 1

    def observe(self, lane: int, num_decoding: int, loads: Mapping[int, int]) -> None:
        """Note that a lane's step was run. See ``LaneControl.observe``."""
        if num_decoding and any(holder != self._device for holder in loads):
            self._num_away_steps += 1
        if lane:
            self._guard.away_step(num_decoding)
        lanes, waiting = self.view()
        is_alone = not any(map(self._has_away, lanes))
        if lane == 0 or not lanes[0].running:
            has_home = any(lane.reserved_tokens[self._device] for lane in lanes)
            mode = "R-only" if not has_home else "mixed" if len(lanes) == 1 else "split-1"
            self.counts.steps["gpu-only" if is_alone else mode] += 1
            self._num_home_steps += 1
        if lane == 0 and num_decoding and (costs := self._costs()) is not None:
            expected_s = costs.home_s(num_decoding, loads.get(self._device, 0))
            self._guard.home_step(
                num_decoding, expected_s, self._clock(), is_alone=is_alone, is_full=bool(waiting)
            )

    def decide(self) -> int:
        """Return the number of lanes that there should be. ``regrouped`` follows a change."""
        lanes, waiting = self.view()
        has_away = any(map(self._has_away, lanes))
        if (waiting or has_away) and self._num_home_steps - self._asked_at >= EVERY:
            self._ask()
        if has_away or self._leaving:
            self._parted_at = self._num_home_steps
            return 1 if self._course.layout is Layout.MIXED else 2
        # An away lane that is empty stays for a while: others may go soon.
        is_long_ago = self._num_home_steps - self._parted_at >= EVERY
        return 1 if is_long_ago else self._num_lanes

    def regrouped(self, num_lanes: int) -> None:
        """Note the new number of lanes."""
        self._num_lanes = num_lanes

    def _ask(self) -> None:
        self._asked_at, started_s = self._num_home_steps, self._clock()
        if started_s < self._ask_at_s:
            return
        self._leaving = set()
        costs = self._costs()
        if costs is None or self._guard.closed_for:
            return
        is_measured = self._num_away_steps >= self._options.measured_steps
        error = _MEASURED_ERROR if is_measured else self._options.error
        lanes, waiting = self.view()
        known = self._known(lanes, waiting)
        self._course = self._options.rule(known, self._course, costs, error)
        num_leaving = forecast.num_leaving(known, self._course.num_away)
        self._leaving = {one.sequence_id for one in waiting[:num_leaving]}
        now_s = self._clock()
        self._ask_at_s = now_s + _SHARE * (now_s - started_s)

    def _is_cached_away(self, sequence: Sequence) -> bool:
        """Return True if R-workers have cached more of it than the device has."""
        at_home, away = self._num_reused(sequence)
        return away > at_home

    def _fits_home(self, sequence: Sequence) -> bool:
        """Return True if the empty device has room for the sequence. It has none for one in parts:
        the lane at home would wait for the holders of the others."""
        shape, num_tokens = self._ledger.shape, sequence.max_cached_tokens
        fits = shape.blocks_for(num_tokens) <= self._ledger.capacity.blocks(self._device)
        return fits and len(shape.sizes(num_tokens)) == 1

    def _has_away(self, lane: Lane) -> bool:
        return any(num and holder != self._device for holder, num in lane.reserved_tokens.items())

    def _known(self, lanes: Iterable[Lane], waiting: Iterable[Sequence]) -> Known:
        home: list[Work] = []
        away: list[Work] = []
        for run in (run for lane in lanes for run in lane.running.values()):
            length = len(run.sequence.token_ids)
            num_steps = max(1, run.projected.target_length + 1 - length)
            num_blocks = self._ledger.shape.blocks_for(run.residence.num_tokens)
            side = home if run.residence.is_on(self._device) else away
            side.append(Work(num_steps, length, num_blocks, run.sequence.num_uncached))
        capacity, r_workers = self._ledger.capacity, self._r_workers
        return Known(
            tuple(home),
            tuple(away),
            tuple(map(self._waiting, islice(waiting, _HORIZON))),
            home_blocks=capacity.blocks(self._device),
            away_blocks=tuple(map(capacity.blocks, r_workers)),
            away_free=tuple(map(self._ledger.available_blocks, r_workers)),
            most_running=self._max_num_sequences,
        )

    def _costs(self) -> Costs | None:
        """Return what steps cost, or None while too little is known."""
        if math.isnan(self._times.s_part_s(1)) or not self._r_workers:
            return None
        room = {worker: self._ledger.capacity.blocks(worker) for worker in self._r_workers}
        return Costs.of(self._times, self._device, room, self._options.guess)

    def _num_reused(self, sequence: Sequence) -> tuple[int, int]:
        """Return the cached tokens that a waiting sequence could start with, at home and away."""
        cache = self._ledger.cache
        if not cache.chains.are_on:
            return 0, 0
        at_home = away = 0
        for reuse in cache.reuses(sequence, (self._reserved(sequence),)):
            if reuse.holders[0] == self._device:
                at_home = max(at_home, reuse.num_tokens)
            else:
                away = max(away, reuse.num_tokens)
        return at_home, away

    @property
    def _r_workers(self) -> Seq[HolderId]:
        """R-workers on which sequences may start."""
        return [h for h in self._ledger.holders.open if h != self._device]

    def _waiting(self, sequence: Sequence) -> Work:
        num_steps = max(1, self._lengths.expected(sequence) - sequence.num_generated)
        length, num_blocks = sequence.num_tokens, self._num_blocks(sequence)
        at_home, away = self._num_reused(sequence)
        return Work(num_steps, length, num_blocks, length - at_home, max(0, away - at_home))

    def _num_blocks(self, sequence: Sequence) -> int:
        return self._ledger.shape.blocks_for(self._reserved(sequence))

    def _reserved(self, sequence: Sequence) -> int:
        """Return the tokens for which it reserves room at first."""
        return cached_at_end(sequence, self._lengths.safe(sequence))
