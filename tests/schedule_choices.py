"""Schedulers' options, by what a user may choose."""

from __future__ import annotations

from typing import Any

from fastdecode.core.config.groups import Batching
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.options import ScheduleOptions

MAX_SEQUENCES = 7
PREFILL_CHUNK = 5
MAX_STEP_TOKENS = MAX_SEQUENCES + 7


def options(mode: str, num_lanes: int, **more: object) -> ScheduleOptions:
    given_ = {
        "max_num_sequences": MAX_SEQUENCES,
        "prefill_chunk": PREFILL_CHUNK,
        "max_step_tokens": MAX_STEP_TOKENS,
        "target_length": 24,
    }
    return schedule_options(mode, num_lanes, **(given_ | more))


def schedule_options(
    mode: str,
    num_lanes: int,
    split_tokens: int | None = None,
    max_closed_rows: int = ScheduleOptions.max_closed_rows,
    **batching: Any,
) -> ScheduleOptions:
    """Of a user's choices by name."""
    chosen = Batching(schedule=mode, lanes=num_lanes, **batching)
    return ScheduleOptions(chosen, split_tokens, max_closed_rows)


def without_headroom(scheduler: ContinuousScheduler) -> ContinuousScheduler:
    """The same with load limits alone: starts leave no room for later ones."""
    for lane in scheduler.lanes:
        lane.admission._headroom = None  # type: ignore[attr-defined]
    return scheduler
