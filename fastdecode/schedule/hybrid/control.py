"""KV on both sides, as it runs: when the rule is asked, what follows from what
it says, and whether it was right.

Where one holder is the device and the others are R-workers, the scheduler has a
``HybridControl``. It says which holders a sequence that starts may go to, and
how many lanes there are. The first is the **home lane**, of sequences whose KV
is on the device; the second is the **away lane**. A single lane has both.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId, Residence, SequenceId
from fastdecode.core.sequence import Sequence
from fastdecode.schedule.hybrid import forecast
from fastdecode.schedule.hybrid.forecast import Costs, Course, Known, Layout
from fastdecode.schedule.hybrid.guard import HybridGuard
from fastdecode.schedule.hybrid.inputs import Guess, HybridInputs
from fastdecode.schedule.hybrid.rule import Margins, choose
from fastdecode.schedule.reserving.ledger import BlockLedger
from fastdecode.schedule.running import Lane

MAX_LANES = 2
"""That there may ever be."""
EVERY = 64
"""Steps of the home lane between two looks at the whole."""
_SHARE = 200
"""Asking the rule takes one part in so many of the time, at most."""
_GUESSED_ERROR = 0.2
"""Of costs, while R-workers haven't been measured."""
_MEASURED_ERROR = 0.05
"""Of forecasts, at the least: they know no prompts, and nobody's chance."""
_MEASURED_STEPS = 32
"""Steps with R-workers that measure them."""

Rule: TypeAlias = Callable[[Known, Course, Costs, Margins], Course]
"""As ``choose``."""
View: TypeAlias = tuple[Seq[Lane], Seq[Sequence]]
"""Lanes, and those that wait."""


@dataclass(frozen=True)
class HybridOptions:
    device: HolderId
    """All other holders are R-workers."""
    guess: Guess | None = None
    """Of R-workers, until times are known of them; None: they are known."""
    error: float = _GUESSED_ERROR
    """How far costs may be off, until R-workers have been measured."""
    measured_steps: int = _MEASURED_STEPS
    """Steps with R-workers that measure them."""
    clock: Clock = time.monotonic
    """Seconds."""
    rule: Rule = choose


@dataclass
class HybridCounts:
    steps: Counter[str] = field(default_factory=Counter)
    """Of the home lane, and of others while nobody is at home, by mode:
    gpu-only, mixed, split-1, R-only."""
    num_closed: int = 0
    """How often R-workers were found not to pay, and left alone for a while."""


class HybridControl:
    """See the module.

    Args:
        options: see there.
        ledger: counts what is reserved.
        teller: what the rule is told.
    """

    def __init__(self, options: HybridOptions, ledger: BlockLedger, inputs: HybridInputs) -> None:
        self._options = options
        self._device = options.device
        self._ledger = ledger
        self._inputs = inputs
        self._clock = options.clock
        self._view: Callable[[], View] = lambda: ((), ())
        self._course = Course(Layout.SPLIT)
        self._leaving: set[SequenceId] = set()  # who may go to R-workers by now
        self._num_lanes = 1
        self._num_home_steps = self._num_away_steps = 0
        self._asked_at = self._parted_at = -EVERY  # steps of the home lane
        self._ask_at_s = -math.inf
        self._asked_for = (-1, -1)  # sequences that ran and waited
        self._watch = HybridGuard()
        self.counts = HybridCounts()

    def attach(self, view: Callable[[], View]) -> None:
        """What runs and waits, whenever it is looked at."""
        self._view = view

    def begin_plan(self, head: Sequence) -> None:
        """Somebody waits; ``head`` is the first. What is there for those for
        whom the device has no room?"""
        has_room = self._could_hold(self._device, head) and self._inputs.has_room(head)
        stays = has_room and self._course.home_is_open and not self._is_kept_away(head)
        if head.sequence_id in self._leaving or stays:
            return
        lanes, waiting = self._view()
        numbers = sum(len(lane.running) for lane in lanes), len(waiting)
        if numbers != self._asked_for:  # nobody has come, started or ended since
            self._asked_for = numbers
            self._ask()

    def among(
        self, lane: int, sequence: Sequence, tiers: Seq[Seq[HolderId]]
    ) -> list[list[HolderId]]:
        """Of the holders that have room for a sequence, those where it may
        start in this lane. On the device whenever that has room, unless the rule
        has found that what R-workers have kept of it is worth the way there."""
        is_home, is_alone = lane == 0, self._num_lanes == 1
        fits_home = self._could_hold(self._device, sequence)
        has_room = any(self._device in tier for tier in tiers)
        away = [found for tier in tiers if (found := [h for h in tier if h != self._device])]
        follows = bool(away) and self._follows_its_blocks(sequence)
        if fits_home and has_room and self._home_is_open(sequence) and not follows:
            return [[self._device]] if is_home else []
        if not away or (is_home and not is_alone):
            return []
        is_mixed = self._course.layout is Layout.MIXED
        has_leave = sequence.sequence_id in self._leaving or not self._course.home_is_open
        may_go = has_leave and is_mixed is is_alone and not self._watch.is_closed
        if not fits_home or may_go or not self._frees_home():
            return away
        return []

    def alike(self, holder: HolderId, present: Seq[HolderId]) -> Seq[HolderId]:
        """See ``HolderChoice``: the holders on the same side."""
        return [one for one in present if (one == self._device) == (holder == self._device)]

    def started(self, sequence: Sequence, residence: Residence) -> None:
        """A sequence starts there. If it was to leave, and found room at home
        after all, the others' leave is void: with fewer who share an away
        lane's weights it might not pay."""
        if sequence.sequence_id in self._leaving and residence.is_on(self._device):
            self._leaving = set()
            self._asked_for = (-1, -1)
        self._leaving.discard(sequence.sequence_id)

    def lane_of(self, holder: HolderId, num_lanes: int) -> int:
        """Return the lane of a sequence on this holder when there are ``num_lanes``."""
        return 0 if holder == self._device else num_lanes - 1

    def observe(self, lane: int, num_decoding: int, loads: Mapping[int, int]) -> None:
        """A lane's step was run; see ``LaneControl.observe``."""
        is_with_r_workers = any(holder != self._device for holder in loads)
        if is_with_r_workers and num_decoding:
            self._num_away_steps += 1
        if lane:
            self._watch.away_step(num_decoding)
        lanes, waiting = self._view()
        if lane == 0 or not lanes[0].running:
            self._num_home_steps += 1
            self.counts.steps[self._mode(lanes)] += 1
            self.counts.num_closed = self._watch.num_closed
        if lane == 0 and num_decoding:
            costs = self._inputs.costs()
            if costs is not None:
                self._watch.home_step(
                    num_decoding,
                    costs.home_s(num_decoding, loads.get(self._device, 0)),
                    self._clock(),
                    is_alone=not any(map(self._has_away, lanes)),
                    is_full=bool(waiting),
                )

    def decide(self) -> int:
        """The number of lanes that there should be. If it isn't what it was,
        ``regrouped`` is due."""
        lanes, waiting = self._view()
        has_away = any(map(self._has_away, lanes))
        if (waiting or has_away) and self._num_home_steps - self._asked_at >= EVERY:
            self._ask()
        if has_away or self._leaving or not self._course.home_is_open:
            self._parted_at = self._num_home_steps
            return 1 if self._course.layout is Layout.MIXED else 2
        # Who has come home stays for a while: others may go soon.
        is_long_ago = self._num_home_steps - self._parted_at >= EVERY
        return 1 if is_long_ago else self._num_lanes

    def regrouped(self, num_lanes: int) -> None:
        """There are so many lanes now."""
        self._num_lanes = num_lanes

    def _ask(self) -> None:
        self._asked_at, started_s = self._num_home_steps, self._clock()
        if started_s < self._ask_at_s:
            return
        self._leaving = set()
        costs = self._inputs.costs()
        if costs is None or self._watch.is_closed:
            self._course = replace(self._course, home_is_open=True)
            return
        is_measured = self._num_away_steps >= self._options.measured_steps
        error = _MEASURED_ERROR if is_measured else self._options.error
        lanes, waiting = self._view()
        known = self._inputs.known(lanes, waiting)
        self._course = self._options.rule(known, self._course, costs, Margins(error=error))
        num_leaving = forecast.num_leaving(known, self._course)
        self._leaving = {one.sequence_id for one in waiting[:num_leaving]}
        now_s = self._clock()
        self._ask_at_s = now_s + _SHARE * (now_s - started_s)

    def _is_kept_away(self, sequence: Sequence) -> bool:
        """Whether R-workers have kept more of it than the device has."""
        at_home, away = self._inputs.num_reused(sequence)
        return away > at_home

    def _follows_its_blocks(self, sequence: Sequence) -> bool:
        """Whether it is to leave though the device has room for it."""
        is_leaving = sequence.sequence_id in self._leaving and not self._watch.is_closed
        return is_leaving and self._is_kept_away(sequence)

    def _home_is_open(self, sequence: Sequence) -> bool:
        if self._course.home_is_open:
            return True
        return not any(self._could_hold(holder, sequence) for holder in self._inputs.r_workers)

    def _could_hold(self, holder: HolderId, sequence: Sequence) -> bool:
        """Whether it has room for the sequence when it is empty. The device has none for one
        in parts: the lane at home would wait for the holders of the others."""
        shape = self._ledger.shape
        if holder == self._device and len(shape.sizes(sequence.max_cached_tokens)) > 1:
            return False
        return shape.blocks_for(sequence.max_cached_tokens) <= self._ledger.capacity.blocks(holder)

    def _frees_home(self) -> bool:
        """Whether a sequence runs on the device, whose end makes room there. What waits
        there to be fetched by another engine may wait for a sibling that has not run."""
        return any(lane.reserved_tokens[self._device] for lane in self._view()[0])

    def _has_away(self, lane: Lane) -> bool:
        """Whether any of its sequences are away."""
        return any(num and holder != self._device for holder, num in lane.reserved_tokens.items())

    def _mode(self, lanes: Seq[Lane]) -> str:
        if not any(map(self._has_away, lanes)):
            return "gpu-only"
        if not any(lane.reserved_tokens[self._device] for lane in lanes):
            return "R-only"
        return "mixed" if len(lanes) == 1 else "split-1"
