"""Extensions of the engine's loop: a list of features that are on.

The loop (``fastdecode.engine.engine``) names none of them. It takes events from each extension,
gives it the instructions and answers of its kinds, and reports steps to it. A feature that is off
isn't in the list.

Every engine has ``Recovery``: sequences of lost R-workers are recomputed, or continue from
replicas, and replacements join. It never waits. While all are lost, the thread that steps the
engine waits (``pause_s``), and serves its inbox meanwhile.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId, Part
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.fleet.replacements import Replacements
from fastdecode.engine.fleet.replicas import Replicas
from fastdecode.engine.requests import Requests
from fastdecode.engine.stats import EngineStats
from fastdecode.engine.step.pipeline import LaneStep
from fastdecode.schedule.holder_states import HolderState
from fastdecode.schedule.lanes import LaneChoice
from fastdecode.schedule.life import events
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.plan import Chunk
from fastdecode.schedule.times import MeasuredTimes, RPartTime
from fastdecode.wire.blocks import TakenOver

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
"""Pause between two looks while all R-workers are lost, which grows with the time."""
_LOOK_AWAY_S = 2 * _LONGEST_PAUSE_S
"""After a longer time between two looks, there was nothing to run."""


@dataclass
class EngineState:
    """State that the engine and its extensions share."""

    fleet: HolderPool
    lifecycle: Lifecycle
    requests: Requests
    stats: EngineStats = field(init=False)
    num_launched: int = 0  # steps launched so far

    def __post_init__(self) -> None:
        hybrid = self.lifecycle.scheduler.hybrid
        self.stats = EngineStats(
            hybrid=None if hybrid is None else hybrid.counts,
            resumed=self.lifecycle.adoptions.counts,
            tiers=self.lifecycle.scheduler.ledger.cache.stock.counts,
        )
        self.lifecycle.sequences.counts = self.stats


class Extension:
    """A feature. It overrides the calls that it needs."""

    instructions: ClassVar[tuple[type[Any], ...]] = ()
    """The lifecycle's instructions that it carries out (``do``)."""
    answers: ClassVar[tuple[type[Any], ...]] = ()
    """The answers of R-workers that it takes (``take``)."""

    @property
    def has_work(self) -> bool:
        """True if this feature needs steps though no request is open."""
        return False

    @property
    def idle_pause_s(self) -> float:
        """Seconds between two looks of this feature while nothing can run and nothing has
        happened. 0 if it needs none."""
        return 0.0

    def num_lanes(self, current: int) -> int:
        """Return the number of lanes that the next step is to have."""
        return current

    def regrouped(self, num_lanes: int) -> None:
        """Note that the number of lanes has changed. No step is in flight."""

    def listen(self) -> None:
        """Look for external events, without waiting. No step is in flight, no answer is owed."""

    def news(self) -> Iterable[events.Event]:
        """Return what has happened since the last call. Must not wait."""
        return ()

    def do(self, instruction: Any) -> Iterable[events.Event]:
        """Carry out an instruction of its kinds. Return the events that it caused."""
        return ()

    def take(self, holder: HolderId, answer: Any) -> Iterable[events.Event]:
        """Take a holder's answer of its kinds. Return the events that it caused."""
        return ()

    def opened(self, part: Part) -> None:
        """Note that a holder was asked to open a part."""

    def finishing(self, finish: events.Finish) -> None:
        """Note that a sequence is over, before its listener gets its end."""

    def ran(self, chunks: Sequence[Chunk]) -> None:
        """Note that a step has run these chunks of sequences still wanted. Its tokens follow."""

    def drew(self, drawn: Sequence[events.Drawn]) -> None:
        """Note new tokens, before any listener gets them."""

    def completed(self, step: LaneStep, seconds: float) -> None:
        """Note that listeners have a step's tokens. ``seconds``: Time for drawing and delivery."""


class StepTiming(Extension):
    """Measures the parts of every step, without those of lost holders. With several stages it
    measures what the slowest one's took.

    Args:
        lanes: Decides on the number of lanes. None to keep it.
    """

    def __init__(self, times: MeasuredTimes, lanes: LaneChoice | None = None) -> None:
        self._times = times
        self._lanes = lanes

    def num_lanes(self, current: int) -> int:
        return current if self._lanes is None else self._lanes.decide()

    def regrouped(self, num_lanes: int) -> None:
        if self._lanes is not None:
            self._lanes.regrouped(num_lanes)

    def completed(self, step: LaneStep, seconds: float) -> None:
        reports = () if step.passage is None else step.passage.reports
        r_compute_s, batch = step.record.r_compute_s, step.batch
        r_parts: dict[int, RPartTime] = {}
        for span in step.record.spans:
            if (holder := span.holder) not in step.record.lost:
                later_s = [float(done.r_compute_s[holder]) for done in reports]
                r_s = max(r_compute_s[holder], *later_s, 0.0)
                r_parts[holder] = RPartTime(span.load_tokens, span.num_prompt_tokens, r_s)
        s_part_s = max(step.s_part_s(seconds), *(done.s_part_s for done in reports), 0.0)
        self._times.observe(batch.num_decoding, batch.num_prompt_tokens, s_part_s, r_parts)
        if batch.num_decoding:
            trips_s = step.round_trips_s + sum([done.round_trip_s for done in reports])
            self._times.observe_trip(trips_s)
        if self._lanes is not None:
            loads = {holder: part.load_tokens for holder, part in r_parts.items()}
            self._lanes.observe(step.lane, batch.num_decoding, loads)


class Recovery(Extension):
    """Decides what follows a loss, and admits replacements. Every engine has one.

    Args:
        replacements: R-workers that may come; None if none may.
    """

    def __init__(
        self,
        state: EngineState,
        replacements: Replacements | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._state = state
        self._fleet = state.fleet
        self._sequences = state.lifecycle.sequences
        self._holders = state.lifecycle.holders
        self._replacements = replacements
        self._clock = clock
        self._looked_s = self._since_s = -math.inf
        self.pause_s = 0.0
        """While all are lost: seconds until the next look. 0 otherwise."""
        self.is_watching = False
        """True if ``news`` may have any, or ``is_stranded`` may be true."""
        self._count_newcomers()  # those from before the engine was made

    def lose(self, holder: HolderId) -> events.Lost | events.Interrupted:
        """Return what follows the loss of a holder: ``Lost`` for good, or ``Interrupted``
        until its replica takes over."""
        self.is_watching = True
        return events.Lost(holder, self._is_sure_to_return)

    @property
    def idle_pause_s(self) -> float:
        """Short while lost holders return: requests may wait for that alone."""
        return _FIRST_PAUSE_S if self._holders.returning else 0.0

    def news(self) -> Iterable[events.Event]:
        """Return replacements that have joined, once no sequence is on the lost ones."""
        if self._replacements is not None and (vacant := self._vacant):
            yield from (*self._given_up(), *self._joined(vacant))
        if not self._holders.having(HolderState.LOST):
            self.is_watching, self.pause_s = False, 0.0

    @property
    def _is_sure_to_return(self) -> bool:
        """Return True if what is left of a lost holder is going to be one again."""
        return self._replacements is not None and self._replacements.timeout_s == math.inf

    def _given_up(self) -> Iterator[events.Event]:
        """Yield lost holders of which nothing is left, though something was."""
        if self._holders.returning and not self._is_sure_to_return:
            yield from map(events.Lost, sorted(self._holders.returning))

    @property
    def _vacant(self) -> list[HolderId]:
        """Lost holders without sequences: no step on them is in flight."""
        lost = self._holders.having(HolderState.LOST)
        return [holder for holder in lost if not self._sequences.is_on(holder)]

    def is_stranded(self) -> bool:
        """Return True if all are lost, and replacements may come: nothing can run until
        they have. Only the time between calls counts.

        Raises:
            WorkerError: If all are lost for good, with the reason of the first loss.
        """
        if not self._holders.are_lost:
            self.pause_s = 0.0
            return False
        now = self._clock()
        if not self.pause_s or now - self._looked_s > _LOOK_AWAY_S:
            self._since_s = now
        self._looked_s, stranded_s = now, now - self._since_s
        timeout_s = 0.0 if self._replacements is None else self._replacements.timeout_s
        if not stranded_s and 0 < timeout_s < math.inf:
            logger.warning(
                "every R-worker is lost: trying to reach one, for %g s (worker_timeout_s)",
                timeout_s,
            )
        if stranded_s >= timeout_s and not (
            self._replacements is not None and self._replacements.look(self._vacant)
        ):
            reasons = (self._fleet.gone or self._fleet.lost).values()
            raise copy(next(iter(reasons)))
        self.pause_s = min(max(_FIRST_PAUSE_S, 2 * self.pause_s), _LONGEST_PAUSE_S)
        return True

    def _joined(self, vacant: Collection[HolderId]) -> Iterator[events.Event]:
        """Admit the replacements of these holders."""
        assert self._replacements is not None
        for index, welcome in self._replacements.look(vacant).items():
            if (holder := HolderId(index)) in vacant:
                self._replacements.admit(holder)
                self._fleet.revive(holder)
                yield events.Joined(holder, welcome.num_blocks)
        self._count_newcomers()

    def _count_newcomers(self) -> None:
        """Count the R-workers that have replaced lost ones since the last call."""
        for name in self._fleet.members.take_newcomers():
            self._state.stats.num_rejoined += 1
            logger.warning("%s has replaced an R-worker that was lost", name)


class ReplicaRecovery(Recovery):
    """Recovers from replicas what can be, and the rest as ``Recovery`` does: a neighbour takes
    over the lost R-worker's cache, and gives it to a replacement once that has a copy."""

    instructions: ClassVar = (events.TakeOver,)
    answers: ClassVar = (TakenOver,)

    def __init__(
        self,
        state: EngineState,
        replicas: Replicas,
        replacements: Replacements | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(state, replacements, clock)
        self._replicas, self.is_watching = replicas, True
        self._cache = state.lifecycle.scheduler.ledger.cache
        state.stats.replicas = replicas.figures
        replicas.hand_over_to(replacements)

    def lose(self, holder: HolderId) -> events.Lost | events.Interrupted:
        is_kept = self._replicas.lose(holder, is_used=self._is_used(holder))
        return events.Interrupted(holder) if is_kept else super().lose(holder)

    def _is_used(self, holder: HolderId) -> bool:
        """Return True if sequences are on a holder, or conversations continue there."""
        return self._sequences.is_on(holder) or self._cache.is_awaited(holder)

    def do(self, order: events.TakeOver) -> Iterable[events.Event]:
        """Ask a neighbour to take over; it may be lost meanwhile, too."""
        if not self._replicas.take_over(order):
            yield super().lose(order.holder)

    def take(self, holder: HolderId, answer: TakenOver) -> Iterable[events.Event]:
        """Take in what the neighbour has. It may be asked once more."""
        taken = self._replicas.taken_over(holder, answer)
        return () if taken is None else (taken,)

    def news(self) -> Iterable[events.Event]:
        """Return takeovers of which nothing is left, caches that are given back, and
        replacements that have joined; then close the ring again."""
        replicas = self._replicas
        replicas.take_news(self._state.num_launched - 1)
        if not self._state.lifecycle.adoptions:
            # Unused holders that neighbours took over.
            leaving, used = replicas.is_leaving, self._is_used
            empty = [x for x in replicas.adopted if not used(x) and not leaving(x)]
            for holder in empty:
                replicas.emptied(holder)
            yield from map(super().lose, empty)
        # Where others are lacking, or conversations continue there, sequences start again.
        reopened, adopted = replicas.reopened(), self._holders.having(HolderState.ADOPTED)
        found = [x for x in adopted if x in reopened or self._cache.is_awaited(x)]
        yield from map(events.Reopened, found)
        yield from self._returned()
        self._count_newcomers()
        replicas.mend(super()._vacant, may_return=self._replacements is not None)

    @property
    def _vacant(self) -> list[HolderId]:
        """Lost holders without sequences, outside of rings: a closed ring lacks them."""
        return [holder for holder in super()._vacant if not self._replicas.is_in_ring(holder)]

    def _returned(self) -> Iterator[events.Event]:
        """Yield replacements of lost holders; and of holders that neighbours took over,
        once the replacement has a copy."""
        replicas, vacant = self._replicas, self._vacant
        if self._replacements is None or not (vacant or replicas.adopted):
            return
        leaving: list[HolderId] = []
        if not self._state.lifecycle.adoptions:
            leaving = replicas.leaving(self._is_used)
        joined = [*self._given_up(), *self._joined(vacant)]
        yield from map(events.Leaving, leaving)
        yield from joined
