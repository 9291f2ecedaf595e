"""Requests and what they say, as they go from one process to another."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from random_requests import DELTAS, REQUESTS

from fastdecode.core.delta import Delta
from fastdecode.core.errors import (
    CapacityError,
    FastDecodeError,
    ProtocolError,
    RequestError,
    WorkerError,
)
from fastdecode.core.holders import KVSource
from fastdecode.core.sequence import Request, SamplingParams
from fastdecode.wire.instances.request_json import (
    delta_from_json,
    delta_to_json,
    request_from_json,
    request_to_json,
)
from fastdecode.wire.json_fields import AsJson

SOURCE = KVSource("tcp://127.0.0.1:7000", 0, "ab" * 16, 0, 9, 0, 2)
REQUEST = Request("a", (5, 6), SamplingParams(), 8, seed=1, sources=(SOURCE,))


def through(said: Any) -> Any:
    return json.loads(json.dumps(said))


@given(REQUESTS)
def test_requests_come_as_they_went(request: Request) -> None:
    assert request_from_json(through(request_to_json(request))) == request


@given(DELTAS)
def test_deltas_come_as_they_went(delta: Delta) -> None:
    assert delta_from_json(through(delta_to_json(delta))) == delta


@pytest.mark.parametrize("kind", [FastDecodeError, RequestError, CapacityError, WorkerError])
def test_errors_keep_their_class(kind: type[FastDecodeError]) -> None:
    told = delta_from_json(through(delta_to_json(Delta("a", 0, error=kind("why", code="how")))))
    assert type(told.error) is kind
    assert told.error is not None and (told.error.message, told.error.code) == ("why", "how")


def test_a_class_that_nobody_else_knows_comes_as_the_closest_that_is_known() -> None:
    told = delta_from_json(delta_to_json(Delta("a", 0, error=ProtocolError("why"))))
    assert type(told.error) is FastDecodeError


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 7), (1, [-1]), (1, [1.5]), (1, [True]), (1, None), (2, {"n": 0}), (2, {"no": 1}),
        (3, 0), (3, 1 << 60), (4, "x"), (4, 1 << 70), (7, -1), (8, [[-1, []]]), (8, [[0, ["x"]]]),
        (9, [["a"]]), (9, [[1] * 7]), (9, None),
        (11, [[]]), (11, [["a"]]), (11, None),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused(place: int, value: Any) -> None:
    said = through(request_to_json(REQUEST))
    assert request_from_json(said) == REQUEST
    said[place] = value
    with pytest.raises(ProtocolError):
        request_from_json(said)


@pytest.mark.parametrize(
    "source",
    [
        replace(SOURCE, ticket="ab"), replace(SOURCE, num_tokens=0),
        replace(SOURCE, first_token=-1), replace(SOURCE, num_tokens=1 << 62),
        replace(SOURCE, num_heads=0), replace(SOURCE, first_head=1 << 40),
        replace(SOURCE, address="x" * (1 << 17)), replace(SOURCE, address="a\nb"),
        replace(SOURCE, address="\ud800"),
    ],
)  # fmt: skip
def test_sources_that_no_r_worker_would_read_are_refused(source: KVSource) -> None:
    said = through(request_to_json(replace(REQUEST, sources=(source,))))
    with pytest.raises(ProtocolError):
        request_from_json(said)
    with pytest.raises(ProtocolError):
        delta_from_json(through(delta_to_json(Delta("a", 0, sources=(source,)))))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, None), (1, -1), (1, 1 << 20), (2, 5), (3, [1 << 40]), (4, [[1]]), (5, "tired"),
        (6, ["NoError", "a", "b"]), (6, ["WorkerError", 1, "b"]), (7, -3), (8, 5), (2, "\ud800"),
        (4, [[1, float("nan"), []]]), (4, [[1, float("inf"), []]]), (4, [[1, "-1", []]]),
        (4, [[1, -1.0, [[2, float("nan")]]]]),
    ],
)  # fmt: skip
def test_what_is_no_delta_is_refused(place: int, value: Any) -> None:
    said = through(delta_to_json(Delta("a", 0, "x", (1,))))
    said[place] = value
    with pytest.raises(ProtocolError):
        delta_from_json(said)


@pytest.mark.parametrize("said", [{}, "", {"a": 1}, None, 7])
def test_what_is_no_list_is_no_sequence_of_requests(said: object) -> None:
    with pytest.raises(ProtocolError, match="not what belongs there"):
        AsJson.listed(request_to_json, request_from_json).value(said)
