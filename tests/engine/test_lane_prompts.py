"""Prompts under way on a prompt stage: one a lane, which goes on where it was, or behind
what is fetched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import Holder, HolderId, HolderKind
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.engine.stages.prompts import LanePrompts, PastStep, PromptPlan
from fastdecode.engine.stages.stage_forward import LaterStageForward
from fastdecode.engine.step.layout import StepBatch
from fastdecode.wire.blocks import AttendResult, FetchChunk, FetchedChunk
from fastdecode.wire.stages import StagePass
from sworker.buffers import Fetched
from sworker.paged import PagedKV

FIRST_LANE, MOST_TOKENS, NUM_LANES = 2, 32, 2
SPEC = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)
KV = KVSpec(1, 2, 8, DType.FLOAT32, 16)


@pytest.fixture
def prompts() -> LanePrompts:
    num_blocks = NUM_LANES * MOST_TOKENS // KV.block_size
    return LanePrompts(
        PagedKV(KV, (SPEC,), num_blocks, torch.device("cpu")), FIRST_LANE, MOST_TOKENS
    )


def batch(*rows: tuple[int, int, int, int], lane: int = FIRST_LANE) -> StepBatch:
    """Rows of (sequence, column, tokens before, tokens that come): it ends with
    them unless the column is negative."""
    ids, columns, past, new = (np.array(x) for x in zip(*rows, strict=True))
    draws = (columns >= 0).astype(np.uint8)
    x = np.zeros((int(new.sum()), 4), np.float32)
    passed = StagePass(
        0, lane, x, ids, (np.abs(columns) % 10).astype(np.int32), past.astype(np.int32),
        new.astype(np.int32), draws, np.zeros(0, np.int32),
    )  # fmt: skip
    holder = Holder(HolderKind.R_WORKER, False, False, KV.token_bytes)
    return StepBatch.passed_on(passed, (holder,) * 3, torch.from_numpy(x))


ENDS, GOES_ON = 1, -11
"""In the place of a column, 1."""


REFUSED: list[tuple[list[tuple[int, int, int, int]], int, str]] = [
    ([(5, GOES_ON, 0, 4), (6, GOES_ON, 0, 4)], FIRST_LANE, "2 prompts at a time"),
    ([(9, GOES_ON, 8, 4), (6, 2, 8, 4)], FIRST_LANE, "2 prompts at a time"),
    ([(9, ENDS, 8, 1)], FIRST_LANE, "a row that decodes"),
    ([(9, GOES_ON, 8, 25)], FIRST_LANE, "32 is the most"),
    ([(5, ENDS, 0, 4)], 0, "lane 0 isn't one of prompts"),
    ([(5, ENDS, 0, 4)], FIRST_LANE + NUM_LANES, "isn't one of prompts"),
]


@pytest.mark.parametrize(("rows", "lane", "reason"), REFUSED, ids=str)
def test_what_a_scheduler_never_does_is_refused(
    rows: list[tuple[int, int, int, int]], lane: int, reason: str, prompts: LanePrompts
) -> None:
    assert prompts.begin(batch((9, GOES_ON, 0, 8))) is not None
    with pytest.raises(ProtocolError, match=reason):
        prompts.begin(batch(*rows, lane=lane))


def test_a_step_whose_past_was_dropped_goes_on_without_it(prompts: LanePrompts) -> None:
    """The first stage knows that its rows mean nothing."""
    asked: list[Any] = []
    fleet: Any = SimpleNamespace(send=lambda holder, message: asked.append(message))
    holder = Holder(HolderKind.R_WORKER, False, False, KV.token_bytes)
    cpu = torch.device("cpu")
    plan = PromptPlan((SPEC,), DType.FLOAT32, fleet, cpu, (holder,) * 3, rooms=prompts)
    step = plan.begin(batch((9, ENDS, 8, 4)))
    assert isinstance(step, PastStep)
    step.scatter(0, *(torch.randn(4, heads, 8) for heads in (4, 2, 2)))
    assert not step.ready
    (question,) = [message for message in asked if isinstance(message, FetchChunk)]
    step.deliver_past(HolderId(1), question.join([FetchedChunk(np.empty(0, np.uint8))]))
    assert step.ready and not step.settled
    o = np.empty((0, 2, 8), np.float32)
    step.deliver(HolderId(1), AttendResult(0, FIRST_LANE, 0, o, None, 0.0))
    assert step.settled


def test_a_prompt_stage_reports_when_all_is_stored() -> None:
    """The next stage needn't wait for that."""
    done: list[str] = []
    x, stored = torch.zeros(2, 4), [False]
    passage = LaterStageForward(
        Fetched(x),
        lambda rows: done.append("passed on"),
        lambda rows: done.append("reported"),
        lambda: stored[0],
    )
    assert passage.can_go_on and passage.go_on() is None
    assert done == ["passed on"] and not passage.can_go_on
    stored[0] = True
    assert passage.can_go_on and passage.go_on() is not None
    assert done == ["passed on", "reported"]


def missing(prompts: LanePrompts, row: tuple[int, int, int, int], lane: int) -> list[int]:
    """The tokens that a step fetches first."""
    begun = prompts.begin(batch(row, lane=lane))
    assert begun is not None
    _, past = begun
    if past is None:
        return []
    asked = list(past.questions(lane))
    assert {(one.lane, *one.sequence_ids.tolist(), one.holder) for one in asked} == {
        (lane, row[0], abs(row[1]) % 10)
    }
    runs = [(int(one.first_tokens[0]), int(one.num_tokens[0])) for one in asked]
    return [x for first, count in runs for x in range(first, first + count)]


def test_what_is_not_in_the_room_is_fetched(prompts: LanePrompts) -> None:
    """No sequence's K and V are read as another's."""
    lane = FIRST_LANE
    assert not missing(prompts, (9, GOES_ON, 0, 8), lane)
    assert missing(prompts, (9, ENDS, 8, 4), lane + 1) == list(range(8))
    assert not missing(prompts, (9, ENDS, 7, 4), lane), "a step that counts no more was behind"
    assert missing(prompts, (9, GOES_ON, 14, 2), lane) == [11, 12, 13]
    assert not missing(prompts, (7, GOES_ON, 0, 6), lane)
    assert missing(prompts, (9, ENDS, 16, 2), lane) == list(range(16))
    assert missing(prompts, (7, ENDS, 6, 2), lane) == list(range(6))
