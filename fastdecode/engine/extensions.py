"""What the engine's loop can be extended by: a list of features that are on.

The loop (``fastdecode.engine.engine``) names none of them. It takes events from
each extension, gives it the instructions and answers of its kinds, and tells it
what became of steps. A feature that is off isn't in the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fastdecode.core.holders import HolderId, Part
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.requests import Requests
from fastdecode.engine.stats import EngineStats
from fastdecode.engine.step.lane_step import LaneStep
from fastdecode.schedule.lanes import LaneChoice
from fastdecode.schedule.life.events import Drawn, Event, Finish
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.plan import Chunk
from fastdecode.schedule.times import MeasuredTimes


@dataclass
class EngineState:
    """What the engine and its extensions share."""

    fleet: HolderPool
    lifecycle: Lifecycle
    requests: Requests
    stats: EngineStats = field(init=False)
    num_launched: int = 0  # steps that were launched so far

    def __post_init__(self) -> None:
        hybrid = self.lifecycle.scheduler.hybrid
        self.stats = EngineStats(
            hybrid=None if hybrid is None else hybrid.counts,
            resumed=self.lifecycle.adoptions.counts,
            tiers=self.lifecycle.scheduler.ledger.cache.stock.counts,
        )
        self.lifecycle.sequences.counts = self.stats


class Extension:
    """A feature. It overrides what concerns it."""

    instructions: ClassVar[tuple[type[Any], ...]] = ()
    """The lifecycle's instructions that it carries out (``do``)."""
    answers: ClassVar[tuple[type[Any], ...]] = ()
    """The answers of R-workers that it takes (``take``)."""

    @property
    def idle_pause_s(self) -> float:
        """How long to wait, where nothing can run and nothing has happened; 0: no wait."""
        return 0.0

    def num_lanes(self, current: int) -> int:
        """How many lanes the next step is to have."""
        return current

    def regrouped(self, num_lanes: int) -> None:
        """There are so many lanes now, and no step is in flight."""

    def listen(self) -> None:
        """Nothing is in flight, and nobody is waited for. Must not wait."""

    def news(self) -> Iterable[Event]:
        """What has happened since the last call. Must not wait."""
        return ()

    def do(self, instruction: Any) -> Iterable[Event]:
        """Carry out an instruction of its kinds; what happened at once."""
        return ()

    def take(self, holder: HolderId, answer: Any) -> Iterable[Event]:
        """A holder has given an answer of its kinds."""
        return ()

    def opened(self, part: Part) -> None:
        """A holder was asked to open a part."""

    def finishing(self, finish: Finish) -> None:
        """Take note of a sequence that is over, before its listener does."""

    def ran(self, chunks: Sequence[Chunk]) -> None:
        """A step has run these chunks, of sequences that are still wanted. Its
        tokens aren't known yet."""

    def drew(self, drawn: Sequence[Drawn]) -> None:
        """Tokens are known, and no listener has them yet."""

    def completed(self, step: LaneStep, seconds: float) -> None:
        """Listeners have a step's tokens; drawing and handing them on took so long."""


class StepTiming(Extension):
    """Measures the parts of every step.

    Args:
        lanes: decides on the number of lanes; None: it stays what it is.
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
        step.tell(self._times, self._lanes, seconds)
