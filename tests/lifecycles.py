"""A lifecycle by itself, in the hands of a test: an event in, instructions out."""

from __future__ import annotations

from collections.abc import Mapping

from remembering_store import BLOCK_SIZE
from schedule_choices import options

from fastdecode.core.sequence import FinishReason
from fastdecode.schedule.life import events
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.modes import make_scheduler
from fastdecode.wire.blocks import Close


def lifecycle(blocks: tuple[int, ...] = (40,), num_lanes: int = 2, **more: object) -> Lifecycle:
    chosen = options("greedy", num_lanes, **more)
    return Lifecycle(make_scheduler(chosen, blocks, BLOCK_SIZE, opening_steps=1))


def closing(asked: events.Ask) -> events.Ask:
    return events.Ask(asked.part, Close(asked.part.part_id))


def tell(life: Lifecycle, event: events.Event) -> list[events.Instruction]:
    instructions = life.handle(event)
    life.check_invariants()
    return instructions


def step(
    life: Lifecycle, lane: int = 0, reasons: Mapping[int, FinishReason] | None = None
) -> list[events.Instruction]:
    """A step of the lane from its launch to its end."""
    (run,) = tell(life, events.LaneReady(lane))
    return end(life, run, reasons)


def end(
    life: Lifecycle, run: events.Instruction, reasons: Mapping[int, FinishReason] | None = None
) -> list[events.Instruction]:
    """All whose chunk is their last draw a token, which may end them."""
    assert isinstance(run, events.Run)
    drawing = [x.sequence for x in run.chunks if x.num_tokens == x.sequence.num_uncached]
    drawn = [events.Drawn(one, 7, (reasons or {}).get(one.index)) for one in drawing]
    return tell(life, events.StepDone(run.lane, tuple(drawn)))
