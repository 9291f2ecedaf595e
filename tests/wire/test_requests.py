"""Requests and what they say, as they go from one process to another."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from messages_for_tests import in_one_piece
from random_requests import DELTAS, REQUESTS
from raw_messages import RawDeltas, RawSubmit, said

from fastdecode.core.delta import Delta
from fastdecode.core.errors import (
    CapacityError,
    FastDecodeError,
    ProtocolError,
    RequestError,
    WorkerError,
)
from fastdecode.core.holders import KVSource
from fastdecode.core.sequence import CacheUse, Request, SamplingParams
from fastdecode.wire.codec import Codec
from fastdecode.wire.instances import Deltas, Submit

CODEC = Codec()
SOURCE = KVSource("tcp://127.0.0.1:7000", 1 << 62, 0, 9, 0, 2, 0, 3)
REQUEST = Request("a", (5, 6), SamplingParams(), 8, seed=1, sources=(SOURCE,))


def came(message: Any) -> Any:
    return CODEC.decode(in_one_piece(message))


def error_of(error: FastDecodeError) -> FastDecodeError:
    found = came(Deltas((Delta("a", 0, error=error),))).deltas[0].error
    assert isinstance(found, FastDecodeError)
    return found


@given(REQUESTS)
def test_requests_come_as_they_went(request: Request) -> None:
    assert came(Submit((request,))).requests == (request,)


@given(DELTAS)
def test_deltas_come_as_they_went(delta: Delta) -> None:
    assert came(Deltas((delta,))).deltas == (delta,)


@pytest.mark.parametrize("kind", [FastDecodeError, RequestError, CapacityError, WorkerError])
def test_errors_keep_their_class(kind: type[FastDecodeError]) -> None:
    error = error_of(kind("why", code="how"))
    assert (type(error), error.message, error.code) == (kind, "why", "how")


def test_a_class_that_no_peer_knows_comes_as_the_closest_that_is_known() -> None:
    assert type(error_of(ProtocolError("why"))) is FastDecodeError


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": 7}, {"prompt_token_ids": [-1]}, {"prompt_token_ids": [1.5]},
        {"prompt_token_ids": [True]}, {"prompt_token_ids": None}, {"params": {"n": 0}},
        {"params": {"n": "x"}}, {"max_tokens": 0}, {"max_tokens": 1 << 60}, {"seed": "x"},
        {"cache": {"turn": -1}}, {"drawn": {-1: []}}, {"drawn": {0: ["x"]}},
        {"sources": [["a"]]}, {"sources": [{}]}, {"sources": None},
        {"bad_words": [[]]}, {"bad_words": [["a"]]}, {"bad_words": None},
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused(changes: dict[str, Any]) -> None:
    good = said(REQUEST)
    assert came(RawSubmit([good])).requests == (REQUEST,)
    with pytest.raises(ProtocolError, match="Submit: "):
        came(RawSubmit([{**good, **changes}]))


@pytest.mark.parametrize(
    "changes",
    [
        {"reading": "ab"}, {"reading": -1}, {"num_layers": 0}, {"num_tokens": 0},
        {"first_token": -1}, {"num_tokens": 1 << 62},
        {"num_heads": 0}, {"first_head": 1 << 40}, {"address": "x" * (1 << 17)},
        {"address": "a\nb"},
    ],
)  # fmt: skip
def test_sources_that_no_r_worker_would_read_are_refused(changes: dict[str, Any]) -> None:
    sources = [{**said(SOURCE), **changes}]
    with pytest.raises(ProtocolError):
        came(RawSubmit([{**said(REQUEST), "sources": sources}]))
    with pytest.raises(ProtocolError):
        came(RawDeltas([{**said(Delta("a", 0)), "sources": sources}]))


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": None}, {"index": -1}, {"index": 1 << 20}, {"text": 5},
        {"token_ids": [1 << 40]}, {"logprobs": [[1]]}, {"finish_reason": "tired"},
        {"error": ["NoError", "a", "b"]}, {"error": ["WorkerError", 1, "b"]}, {"error": "x"},
        {"num_cached_tokens": -3}, {"sources": 5},
        {"logprobs": [{"token_id": 1, "logprob": float("nan")}]},
        {"logprobs": [{"token_id": 1, "logprob": float("inf")}]},
        {"logprobs": [{"token_id": 1, "logprob": "-1"}]},
        {"logprobs": [{"token_id": 1, "logprob": -1.0, "top": [[2, float("nan")]]}]},
    ],
)  # fmt: skip
def test_what_is_no_delta_is_refused(changes: dict[str, Any]) -> None:
    good = said(Delta("a", 0, "x", (1,)))
    assert came(RawDeltas([good])).deltas == (Delta("a", 0, "x", (1,)),)
    with pytest.raises(ProtocolError, match="Deltas: "):
        came(RawDeltas([{**good, **changes}]))


@pytest.mark.parametrize("requests", [{}, "", {"a": 1}, None, 7])
def test_what_is_no_list_is_no_sequence_of_requests(requests: object) -> None:
    with pytest.raises(ProtocolError, match="Expected `array`"):
        came(RawSubmit(requests))


def test_a_lone_surrogate_costs_no_other_request() -> None:
    said = "no model \ud800"
    (delta,) = came(Deltas((Delta("a", 0, error=WorkerError(said)),))).deltas
    assert str(delta.error) == "no model ?"
    for kind, field in (
        (SamplingParams, "stop"),
        (SamplingParams, "bad_words"),
        (CacheUse, "salt"),
    ):
        with pytest.raises(RequestError, match="lone surrogate"):
            kind(**{field: ["\ud800"] if field == "bad_words" else "\ud800"})
