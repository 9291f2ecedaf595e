"""Extensions of the engine's loop: a list of features that are on.

The loop (``fastdecode.engine.engine``) names none of them. It takes events from each extension,
gives it the instructions and answers of its kinds, and reports steps to it. A feature that is off
isn't in the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fastdecode.core.holders import HolderId, Part
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.requests import Requests
from fastdecode.engine.stats import EngineStats
from fastdecode.engine.step.pipeline import LaneStep
from fastdecode.schedule.lanes import LaneChoice
from fastdecode.schedule.life.events import Drawn, Event, Finish
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.plan import Chunk
from fastdecode.schedule.times import MeasuredTimes, RPartTime


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
        """Look for external events, while no step is in flight and no answer is owed. Must not
        wait."""

    def news(self) -> Iterable[Event]:
        """Return what has happened since the last call. Must not wait."""
        return ()

    def do(self, instruction: Any) -> Iterable[Event]:
        """Carry out an instruction of its kinds. Return the events that it caused."""
        return ()

    def take(self, holder: HolderId, answer: Any) -> Iterable[Event]:
        """Take a holder's answer of its kinds. Return the events that it caused."""
        return ()

    def opened(self, part: Part) -> None:
        """Note that a holder was asked to open a part."""

    def finishing(self, finish: Finish) -> None:
        """Note that a sequence is over, before its listener gets its end."""

    def ran(self, chunks: Sequence[Chunk]) -> None:
        """Note that a step has run these chunks, of sequences that are still wanted. Its tokens
        aren't known yet."""

    def drew(self, drawn: Sequence[Drawn]) -> None:
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
