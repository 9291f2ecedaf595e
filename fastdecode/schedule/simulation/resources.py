"""Resources that lanes share while they step: the S-worker, R-workers, links."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from fastdecode.schedule.life.events import Run
from fastdecode.schedule.plan import Chunk
from fastdecode.schedule.times import Prompts, StepTime


@dataclass
class Flight:
    """A lane's step under way. Seconds are what it would need of each resource alone."""

    run: Run
    s_part_s: float
    """Time of the S-worker, or of the device."""
    r_parts_s: tuple[float, ...]
    """Time of each R-worker."""
    trip_s: float
    """Time of the way to R-workers and back."""
    loads: dict[int, int]
    """Cached tokens to which it attends, by holder."""
    num_tokens: int
    link_s: float = 0.0
    """Time of the link, which one lane uses at a time."""
    left: float = 1.0
    """Share of it that is still to come."""

    @property
    def num_decoding(self) -> int:
        return sum(chunk.num_tokens == 1 for chunk in self.run.chunks)

    @property
    def way_s(self) -> float:
        """Return its time if nothing else runs."""
        return self.s_part_s + max(self.r_parts_s, default=0.0) + self.trip_s


@dataclass(frozen=True)
class SimulatedStep:
    """One round: a step of every lane."""

    started_s: float
    step_s: float
    s_part_s: float
    """Time in which the S-worker was busy."""
    r_part_s: float
    """Time in which the busiest R-worker was busy."""
    r_parts_s: float
    """Sum of the times in which R-workers were busy."""
    load_tokens: int
    num_running: int
    num_tokens: int


class Resources(Protocol):
    """Times of lanes' steps that run side by side."""

    steps: list[SimulatedStep]
    """Rounds so far, where lanes step in rounds."""

    def flight(self, run: Run) -> Flight:
        """Return what a step needs."""

    def steps_s(self, flights: Mapping[int, Flight], now_s: float) -> Mapping[int, float]:
        """Return the time of each lane's whole step beside the others."""


@dataclass
class Rounds:
    """Lanes share the S-worker and the R-workers, and step in rounds, in each of which every lane
    makes one step. A lane is at one of the two at a time, so a round takes

        max(sum of the lanes' S-parts, the busiest R-worker's sum of R-parts, the link's sum,
        the slowest lane's S-part + R-part + trip)

    as ``cycle_s`` has it for equal lanes: S + R with one lane, and max(S, R) per lane with two,
    while the link is quick.
    """

    times: StepTime
    num_r_workers: int
    steps: list[SimulatedStep] = field(default_factory=list)

    def flight(self, run: Run) -> Flight:
        loads, times = loads_of(run.chunks), self.times
        num_tokens = sum(chunk.num_tokens for chunk in run.chunks)
        r_parts_s = tuple(
            times.r_part_s(worker, loads[worker]) if loads.get(worker) else 0.0
            for worker in range(self.num_r_workers)
        )
        s_part_s, trip_s = times.s_part_s(*tokens_of(run.chunks)), times.trip_s(num_tokens)
        link_s = times.link_s(num_tokens)
        return Flight(run, s_part_s, r_parts_s, trip_s, loads, num_tokens, link_s)

    def steps_s(self, flights: Mapping[int, Flight], now_s: float) -> Mapping[int, float]:
        # All lanes have just begun.
        every = list(flights.values())
        s_part_s = sum(flight.s_part_s for flight in every)
        busy_s = [sum(parts) for parts in zip(*(flight.r_parts_s for flight in every), strict=True)]
        link_s = sum(flight.link_s for flight in every)
        round_s = max(s_part_s, link_s, *busy_s, *(flight.way_s for flight in every))
        self.steps.append(
            SimulatedStep(
                started_s=now_s,
                step_s=round_s,
                s_part_s=s_part_s,
                r_part_s=max(busy_s),
                r_parts_s=sum(busy_s),
                load_tokens=sum(sum(flight.loads.values()) for flight in every),
                num_running=sum(len(flight.run.chunks) for flight in every),
                num_tokens=sum(flight.num_tokens for flight in every),
            )
        )
        return dict.fromkeys(flights, round_s)


def tokens_of(chunks: Seq[Chunk]) -> tuple[int, Prompts]:
    """Return how many sequences decode, and the parts of prompts."""
    prompts = [(c.sequence.num_cached, c.num_tokens) for c in chunks if c.num_tokens > 1]
    return len(chunks) - len(prompts), prompts


def loads_of(chunks: Seq[Chunk]) -> dict[int, int]:
    """Return the tokens that are cached once the chunks have run, by holder."""
    loads: dict[int, int] = {}
    for chunk in chunks:
        residence, num_cached = chunk.sequence.residence, chunk.sequence.num_cached
        assert residence is not None
        for part in residence.parts:
            seen = max(0, min(num_cached + chunk.num_tokens - part.first_token, part.num_tokens))
            loads[part.holder] = loads.get(part.holder, 0) + seen
    return loads
