"""Schedulers' options, by what a user may choose."""

from __future__ import annotations

from typing import Any

from fastdecode.core.config.groups import Batching
from fastdecode.core.sequence import Sequence
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.options import ScheduleOptions

MAX_SEQUENCES = 7
PREFILL_CHUNK = 5
MAX_STEP_TOKENS = MAX_SEQUENCES + 7


def options(mode: str, num_lanes: int, **more: object) -> ScheduleOptions:
    given_: dict[str, object] = {
        "max_num_sequences": MAX_SEQUENCES,
        "prefill_chunk": PREFILL_CHUNK,
        "max_step_tokens": MAX_STEP_TOKENS,
    }
    if mode == "fixed-f":
        given_["expected_output_tokens"] = 24
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


class LongestLengths:
    """Every sequence may run to its max_tokens. Neither load nor blocks are
    ever more than what was projected."""

    def expected(self, sequence: Sequence) -> int:
        return sequence.request.max_tokens

    def safe(self, sequence: Sequence) -> int:
        return sequence.request.max_tokens

    def observe(self, sequence: Sequence) -> None:
        pass
