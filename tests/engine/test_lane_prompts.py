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
from fastdecode.engine.stages.prompts import FetchingPart, LanePrompts, PromptPlan
from fastdecode.engine.step.batch import StepBatch
from fastdecode.wire.blocks import AttendResult, FetchChunk, FetchedChunk
from fastdecode.wire.stages import StagePass
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
    _, begun = plan.begin(batch((9, ENDS, 8, 4)), SimpleNamespace())  # type: ignore[arg-type]
    remote, fetching = begun.remote, begun.parts[-1]
    assert remote is not None and isinstance(fetching, FetchingPart)
    q, k, v = (torch.randn(4, heads, 8) for heads in (4, 2, 2))
    for part in begun.parts:
        part.scatter(0, q, k, v, None)
    assert not fetching.ready()
    (question,) = [message for message in asked if isinstance(message, FetchChunk)]
    fetching.deliver_past(HolderId(1), question.join([FetchedChunk(np.empty(0, np.uint8))]))
    assert fetching.ready() and remote.ready() and not remote.settled
    o = np.empty((0, 2, 8), np.float32)
    remote.answered(HolderId(1), AttendResult(0, FIRST_LANE, 0, o, None, 0.0))
    assert remote.settled
