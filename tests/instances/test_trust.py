"""What an instance may say of a request, and what it can't have seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastdecode.core.delta import Delta
from fastdecode.core.errors import ProtocolError, RequestError
from fastdecode.core.holders import KVSource
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.sequence import Request, SamplingParams, TokenLogprob
from fastdecode.engine.instances.routed import InstanceRun, RoutedRequest
from fastdecode.schedule.dispatch import DispatchJob

PROMPT = (5, 6, 7, 8, 9)
PLAIN = Request("a", PROMPT, SamplingParams(n=2, min_tokens=2), 4, seed=1)
PROMPT_ONLY = replace(PLAIN, params=SamplingParams(n=2), max_tokens=1, hands_over=True)
SOURCE = KVSource("p-r0", 7, 0, 5, 0, 1, 0, 1, is_held=True)
FETCHING = replace(PLAIN, drawn={0: (20, 21), 1: (30,)}, sources=(SOURCE,))
LOGGED = replace(FETCHING, params=SamplingParams(n=2, logprobs=1))


@pytest.fixture(scope="module")
def spec(model: str) -> ModelSpec:
    return open_checkpoint(model).spec(max_model_len=None)


def said(index: int = 0, *tokens: int, **more: Any) -> Delta:
    return Delta("a", index, token_ids=tokens, **more)


def logged(*tokens: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, -1.0, ()) for token in tokens)


TRUE = {
    "step by step": (PLAIN, [said(0, 20), said(1, 30, 31), said(0, 21, 22)]),
    "all at once": (PLAIN, [said(0, 1, 2, 3, 4, finish_reason="length")]),
    "an early stop": (PLAIN, [said(0, 1, 2, finish_reason="stop")]),
    "a prompt on offer": (PROMPT_ONLY, [said(0, sources=(SOURCE,)), said(0, 1), said(1, 2)]),
    "a prompt that stops": (PROMPT_ONLY, [said(0, 1, finish_reason="stop"), said(1, 2)]),
    "a fetched prompt": (FETCHING, [said(0, has_fetched=True), said(0, 20, 21, 22)]),
    "blocks that stay": (
        PLAIN, [said(0, 1, 2, sources=(replace(SOURCE, num_tokens=9, is_held=False),))],
    ),
    "known tokens in pieces": (FETCHING, [said(0, 20), said(0, 21, 22)]),
    "logprobs of new tokens": (
        LOGGED, [said(0, 20, 21, 9, logprobs=logged(9)), said(0, 8, logprobs=logged(8))],
    ),
    "an error": (PLAIN, [said(0, 1), said(0, error=RequestError("it fails"))]),
}  # fmt: skip
LIES = {
    "a sequence too many": (PLAIN, [said(2, 1)]),
    "too many tokens": (PLAIN, [said(0, 1, 2, 3, 4, 5)]),
    "too many tokens, one by one": (PLAIN, [said(0, 1, 2, 3), said(0, 4, 5)]),
    "length too early": (PLAIN, [said(0, 1, 2, 3, finish_reason="length")]),
    "a prompt as long as it may be": (PROMPT_ONLY, [said(0, 1, finish_reason="length")]),
    "a prompt's second token": (PROMPT_ONLY, [said(0, 1, 2)]),
    "beyond the vocabulary": (PLAIN, [said(0, 1 << 30)]),
    "more after the end": (PLAIN, [said(0, 1, 2, finish_reason="stop"), said(0, 3)]),
    "two ends": (PLAIN, [said(0, 1, 2, finish_reason="stop"), said(0, finish_reason="stop")]),
    "logprobs unasked": (PLAIN, [said(0, 1, logprobs=logged(1))]),
    "logprobs left out": (LOGGED, [said(0, 20, 21, 9)]),
    "logprobs of others": (LOGGED, [said(0, 20, 21, 9, logprobs=logged(8))]),
    "an offer unasked": (PLAIN, [said(0, 1, sources=(SOURCE,)), said(1, 1)]),
    "an offer of more": (
        PROMPT_ONLY, [said(0, 1, sources=(replace(SOURCE, first_token=1),)), said(1, 1)],
    ),
    "more blocks than tokens": (
        PLAIN, [said(0, 1, sources=(replace(SOURCE, num_tokens=10, is_held=False),))],
    ),
    "an offer of other heads": (
        PROMPT_ONLY, [said(0, 1, sources=(replace(SOURCE, first_head=512),)), said(1, 1)],
    ),
}  # fmt: skip


def hear(asked: Request, deltas: list[Delta], spec: ModelSpec) -> None:
    run, routed = InstanceRun(asked, 0), RoutedRequest(asked, None, DispatchJob(0, 5, 9))
    for delta in deltas:
        if delta.error is None:
            run.check(delta, spec)
            routed.tell(run, delta)


@pytest.mark.parametrize("name", TRUE)
def test_what_can_be_is_believed(name: str, spec: ModelSpec) -> None:
    hear(*TRUE[name], spec)


@pytest.mark.parametrize("name", LIES)
def test_what_cannot_be_is_a_lie(name: str, spec: ModelSpec) -> None:
    with pytest.raises(ProtocolError, match="says of a request what can't be: "):
        hear(*LIES[name], spec)
