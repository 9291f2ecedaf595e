"""Prompts that stages bring straight to an R-worker: several, over connections of
their own, in any order of layers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from state_machine import HELLO, HKV, NUM_LAYERS, D, Worker, attend, step_of
from values import replace

from examples import examples
from fastdecode.wire.blocks import ChunkForm, DropCache, FetchChunk, FetchedChunk
from fastdecode.wire.messages import (
    Accepted,
    AttendResult,
    CloseSequence,
    Failed,
    ForkSequence,
    OpenSequence,
    Shutdown,
    StorePrompt,
)
from rworker.instructions import Compute, HangUp, ReadChunk, Send, Stop

SESSION = 77
FED = replace(HELLO, session=SESSION, feeders=("prompt stage 0", "prompt stage 1"))


def stored(*rows: tuple[int, int, int], layer: int = 0, **changes: Any) -> StorePrompt:
    """Rows of (sequence, tokens before, tokens that come)."""
    ids, past, new = (np.array(column) for column in zip(*rows, strict=True))
    k = np.zeros((int(new.sum()), HKV, D), np.float32)
    counts = past.astype(np.int32), new.astype(np.int32)
    message = StorePrompt(SESSION, 5, 1, layer, ids.astype(np.int64), *counts, k, k, 0)
    return replace(message, **changes)


class Fed(Worker):
    """An R-worker whose S-worker is peer 0, and prompt stages the others."""

    def __init__(self) -> None:
        super().__init__()
        self.tell(FED)

    def refuses(self, peer: int, message: Any) -> str:
        send, hang_up = self.say(peer, message)
        assert isinstance(send, Send) and isinstance(send.message, Failed)
        assert hang_up == HangUp(peer)
        assert self.lose(peer, may_return=False) == ()
        return send.message.message


@settings(max_examples=examples(200, share=4), deadline=None)
@given(st.randoms(use_true_random=False), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_layers_come_in_any_order_and_once(chance: random.Random, counts: list[int]) -> None:
    """Two sequences' chunks, each stage with layers of its own."""
    worker, past = Fed(), 0
    for sequence in (1, 2):
        assert worker.answer(OpenSequence(sequence, sum(counts) + 1)) == Accepted(sequence)
    slots: dict[int, list[int]] = {layer: [] for layer in range(NUM_LAYERS)}
    for count in counts:
        layers = list(range(NUM_LAYERS))
        chance.shuffle(layers)
        for number, layer in enumerate(layers):
            arrivals = worker.state._caches.at(0).books.arrivals  # type: ignore[union-attr]
            assert sorted(arrivals) == ([1, 2] if number else [])
            peer = 1 + layer % 2
            come = stored((1, past, count), (2, past, count), layer=layer)
            (compute,) = worker.say(peer, come)
            assert isinstance(compute, Compute)
            assert (compute.to, compute.layer, compute.plan.num_queries) == (peer, layer, 0)
            slots[layer] += compute.plan.slots.tolist()
        past += count
    assert slots[0] == slots[1] == slots[2] and len({*slots[0]}) == 2 * past
    assert len(worker.run_step(step_of((1, past, 1), (2, past, 1)))) == NUM_LAYERS


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"session": SESSION + 1}, "no cache that prompts may come into"),
    ({"session": 0}, "no cache that prompts may come into"),
    ({"layer": NUM_LAYERS}, "layer"),
    ({"k": np.zeros((3, HKV, D), np.float32)}, "k"),
    ({"v": np.zeros((4, HKV, D + 1), np.float32)}, "v"),
    ({"k": np.zeros((4, HKV, D), np.uint16)}, "k"),
    ({"num_new": np.array([-4], np.int32)}, "num_new"),
    ({"num_past": np.array([-1], np.int32)}, "num_past"),
    ({"num_past": np.array([1], np.int32)}, "have come"),
    ({"sequence_ids": np.array([9])}, "9"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED, ids=str)
def test_what_isnt_due_is_refused_and_changes_nothing(changes: dict[str, Any], reason: str) -> None:
    worker = Fed()
    worker.answer(OpenSequence(1, 8))
    assert reason in worker.refuses(1, stored((1, 0, 4), **changes))
    for layer in range(NUM_LAYERS):
        worker.say(2, stored((1, 0, 4), layer=layer))
    worker.run_step(step_of((1, 4, 1)))


def test_a_layer_comes_once_and_all_before_what_is_behind_them() -> None:
    worker = Fed()
    worker.answer(OpenSequence(1, 8))
    worker.say(1, stored((1, 0, 4), layer=1))
    assert "due" in worker.refuses(2, stored((1, 0, 4), layer=1))
    assert "in every layer" in worker.refuses(3, stored((1, 4, 2), layer=1))
    assert "in every layer" in worker.refuses(4, stored((1, 0, 3), layer=0))
    for layer in (0, 2):
        worker.say(1, stored((1, 0, 4), layer=layer))
    assert "in every layer" in worker.refuses(5, stored((1, 0, 4), layer=0))


def test_room_is_reserved_before() -> None:
    worker = Fed()
    worker.answer(OpenSequence(1, 3))
    assert "1" in worker.refuses(1, stored((1, 0, 4)))
    worker.answer(OpenSequence(2, 4))
    worker.say(2, stored((2, 0, 4)))


def test_nobody_steps_or_forks_what_is_arriving() -> None:
    for message, reason in (
        (step_of((1, 4, 1)), "arriving"),
        (ForkSequence(1, 2, 3, 8), "in every layer"),
    ):
        worker = Fed()
        worker.answer(OpenSequence(1, 8))
        worker.say(1, stored((1, 0, 4)))
        worker.fails(message, reason)


def test_nothing_comes_for_what_steps_or_is_closed() -> None:
    worker = Fed()
    worker.answer(OpenSequence(1, 8))
    begin = step_of((1, 0, 1))
    worker.tell(begin)
    assert "open step" in worker.refuses(1, stored((1, 1, 2)))
    for layer in range(NUM_LAYERS):
        worker.tell(attend(begin, layer))
    worker.say(2, stored((1, 1, 2)))
    worker.tell(CloseSequence(1))
    assert "1" in worker.refuses(2, stored((1, 1, 2), layer=1))
    assert worker.answer(OpenSequence(1, 8)) == Accepted(1)


def test_whoever_brings_prompts_has_no_other_rights_and_takes_nothing_along() -> None:
    worker = Fed()
    worker.answer(OpenSequence(1, 8))
    worker.say(1, stored((1, 0, 4)))
    assert "prompt stage may not" in worker.refuses(1, OpenSequence(2, 8))
    worker.fails(stored((1, 0, 4), layer=1), "a S-worker may not say that")
    worker = Fed()
    worker.answer(OpenSequence(1, 8))
    worker.say(1, stored((1, 0, 4)))
    assert worker.state.lost(1) == ()
    assert worker.tell(Shutdown()) == (Stop(),)


def test_what_comes_for_a_cache_that_was_dropped_is_answered() -> None:
    """Its S-worker knows; and the prompt stage goes on with other caches."""
    worker = settled()
    worker.tell(DropCache(SESSION, 0, holder=1))
    worker.tell(replace(FED, holder=1))
    assert worker.answer(OpenSequence(1, 8, holder=1)) == Accepted(1)
    (send,) = worker.say(1, stored((1, 5, 2), layer=2))
    assert isinstance(send, Send) and isinstance(send.message, AttendResult)
    stored_at = (send.message.step, send.message.lane, send.message.layer)
    assert stored_at == (5, 1, 2) and not len(send.message.o)
    (send,) = worker.say(2, fetched(1, 4))
    assert isinstance(send, Send) and isinstance(send.message, FetchedChunk)
    assert not len(send.message.data)
    (compute,) = worker.say(1, stored((1, 0, 4), holder=1))
    assert isinstance(compute, Compute)


def test_a_cache_without_feeders_takes_no_prompts() -> None:
    worker = Worker()
    worker.tell(replace(HELLO, session=SESSION))
    worker.answer(OpenSequence(1, 8))
    send, _ = worker.state.handle(1, stored((1, 0, 4)))
    assert isinstance(send, Send) and isinstance(send.message, Failed)
    assert "no cache that prompts may come into" in send.message.message


@pytest.mark.parametrize("hello", [replace(FED, session=0), replace(FED, feeders=("a",) * 2)])
def test_feeders_are_each_one_and_in_a_sessions_name(hello: Any) -> None:
    Worker().fails(hello, "")


def fetched(
    first_token: int, num_tokens: int, layer: int = 1, sequence: int = 1, session: int = SESSION
) -> FetchChunk:
    columns = [np.array([x], np.int32) for x in (first_token, num_tokens)]
    sides = layer, 1, 0, HKV
    ids = np.array([sequence], np.int64)
    return FetchChunk(ChunkForm.TOKENS, *sides, ids, *columns, 0, session=session, lane=1)


def settled() -> Fed:
    """Sequence 1 has five tokens in every layer, and sequence 2 three in some."""
    worker = Fed()
    for sequence in (1, 2):
        assert worker.answer(OpenSequence(sequence, 20)) == Accepted(sequence)
    for layer in range(NUM_LAYERS):
        worker.say(1, stored((1, 0, 5), layer=layer))
    worker.say(1, stored((2, 0, 3)))
    return worker


def test_what_is_cached_is_read_by_prompt_stages() -> None:
    worker = settled()
    (read,) = worker.say(2, fetched(1, 4))
    assert isinstance(read, ReadChunk) and (read.to, len(read.places)) == (2, 4)
    assert (read.request.first_layer, read.request.num_layers) == (1, 1)
    assert read.request.num_heads == HKV


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"session": SESSION + 1}, "no cache that prompts may come into"),
        ({"layer": NUM_LAYERS}, "first_layer"),
        ({"num_tokens": 5}, "5 are in every layer"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"first_token": -1}, "first_token"),
        ({"first_token": 1 << 30}, "are asked for"),
        ({"sequence": 2}, "0 are in every layer"),
        ({"sequence": 9}, "sequence 9"),
    ],
)
def test_what_is_not_there_is_not_read(wrong: dict[str, int], reason: str) -> None:
    assert reason in settled().refuses(2, fetched(**{"first_token": 1, "num_tokens": 4, **wrong}))
