"""The R-worker's state machine, synchronously: messages in, instructions out,
the books checked after every message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from state_machine import (
    BLOCK_SIZE,
    HELLO,
    KV,
    KV_BYTES,
    NUM_LAYERS,
    SPEC,
    Worker,
    attend,
    refusal,
    step_of,
)
from values import replace

from examples import examples
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError
from fastdecode.wire.messages import (
    MAX_ID,
    Accepted,
    Close,
    Hello,
    Open,
    Refused,
    Shutdown,
    Welcome,
)
from rworker.instructions import Compute, CopyBlocks, HangUp, Prepare, Send, Stop
from rworker.state import RWorkerState


def test_hello_makes_a_cache_as_large_as_the_memory(worker: Worker) -> None:
    prepare, send = Worker().tell(HELLO)
    assert isinstance(prepare, Prepare)
    num_bytes = prepare.num_blocks * prepare.layout.block_bytes * NUM_LAYERS
    assert KV_BYTES - prepare.layout.block_bytes * NUM_LAYERS < num_bytes <= KV_BYTES
    assert prepare.attention == HELLO.attention
    assert prepare.activation_dtype is DType.FLOAT32
    assert send == Send(0, Welcome("r7", prepare.num_blocks, BLOCK_SIZE, 3))


def test_hello_again_starts_afresh(worker: Worker) -> None:
    """Whatever was open or under way is forgotten."""
    assert worker.answer(Open(1, 8)) == Accepted(1)
    assert worker.tell(step_of((1, 0, 1))) == ()
    other = replace(
        HELLO, kv=replace(KV, block_size=8, dtype=DType.BFLOAT16), activation_dtype=DType.FLOAT16
    )
    prepare, send = worker.tell(other)
    assert isinstance(prepare, Prepare)
    assert (prepare.layout.dtype, prepare.layout.block_size) == ("bfloat16", 8)
    assert isinstance(send, Send)
    assert isinstance(send.message, Welcome)
    assert worker.answer(Open(1, 8)) == Accepted(1)
    assert worker.tell(step_of((1, 0, 1))) == ()


@pytest.mark.parametrize(
    ("hello", "reason", "code"),
    [
        (replace(HELLO, attention=(SPEC,)), "1 attention specs for 3 layers", "protocol_error"),
        (
            replace(HELLO, attention=(SPEC, SPEC, replace(SPEC, head_dim=8))),
            "layer 2",
            "protocol_error",
        ),
        (
            replace(HELLO, attention=(replace(SPEC, num_kv_heads=4),) * 3),
            "layer 0",
            "protocol_error",
        ),
        (replace(HELLO, kv=replace(KV, block_size=256)), "more memory", "out_of_capacity"),
    ],
)
def test_hello_refused(hello: Hello, reason: str, code: str) -> None:
    worker = Worker(kv_bytes=20_000)
    worker.fails(hello, reason, code=code)
    worker.fails(Open(1, 1), "first message must be Hello")


@pytest.mark.parametrize("option", ["kv_bytes", "num_threads", "max_sequences"])
def test_options_are_checked(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"r7: {option}=0"):
        RWorkerState("r7", **{"kv_bytes": 1, option: 0})


def test_nothing_goes_before_hello_but_shutdown() -> None:
    worker, begin = Worker(), step_of((1, 0, 1))
    for message in (Close(1), Open(1, 1), Open(2, 1, 1, parent_id=1), begin, attend(begin, 0)):
        worker.fails(message, "first message must be Hello")
    assert worker.tell(Shutdown()) == (Stop(),)


def test_open_is_refused_without_room_and_nothing_changes(worker: Worker) -> None:
    (welcome,) = (x.message for x in Worker().tell(HELLO) if isinstance(x, Send))
    assert isinstance(welcome, Welcome)
    capacity = welcome.num_blocks * BLOCK_SIZE
    refused = worker.answer(Open(1, capacity + 1))
    assert isinstance(refused, Refused)
    assert (refused.sequence_id, refused.code) == (1, "exceeds_capacity")
    assert worker.answer(Open(1, capacity - BLOCK_SIZE)) == Accepted(1)
    refused = worker.answer(Open(2, BLOCK_SIZE + 1))
    assert isinstance(refused, Refused)
    assert (refused.sequence_id, refused.code) == (2, "out_of_capacity")
    assert worker.answer(Open(2, BLOCK_SIZE)) == Accepted(2)


def test_too_many_sequences_are_refused() -> None:
    worker = Worker(max_sequences=1)
    worker.tell(HELLO)
    assert worker.answer(Open(1, 1)) == Accepted(1)
    assert isinstance(worker.answer(Open(2, 1)), Refused)


@pytest.mark.parametrize(
    "message",
    [
        Open(-1, 1),
        Open(MAX_ID + 1, 1),
        Open(9, 0),
        Open(9, 1 << 40),
        Open(True, 1),
        Open("9", 1),  # type: ignore[arg-type]
        Open(9, 1.5),  # type: ignore[arg-type]
        Open(1, 4),
        Close(9),
        Open(10, 4, 1, parent_id=9),
        Open(1, 4, 1, parent_id=1),
        Open(10, 4, 0, parent_id=1),
        Open(10, 8, 6, parent_id=1),
        Open(10, 3, 4, parent_id=1),
        Open(10, 1 << 40, 1, parent_id=1),
    ],
)
def test_bad_sequence_messages_fail(worker: Worker, message: Any) -> None:
    worker.tell(Open(1, 8))
    worker.run_step(step_of((1, 0, 5)))
    worker.fails(message)
    worker.run_step(step_of((1, 5, 3)))  # the books are as they were


def test_an_object_that_is_no_message_fails(worker: Worker) -> None:
    worker.fails("hello", "str is not a message")


INTEGERS = st.one_of(st.integers(0, 6), st.sampled_from([-1, 7, 12, 1 << 31, MAX_ID, MAX_ID + 1]))
MESSAGES = st.one_of(
    st.builds(Open, INTEGERS, INTEGERS),
    st.builds(Open, INTEGERS, INTEGERS, INTEGERS, parent_id=INTEGERS),
    st.builds(Close, INTEGERS),
    st.builds(
        lambda rows, lane: step_of(*rows, lane=lane),
        st.lists(
            st.tuples(st.integers(0, 6), st.integers(0, 9), st.integers(0, 9)),
            min_size=1,
            max_size=3,
        ),
        st.integers(0, 1),
    ),
    st.builds(
        lambda lane, layer, new: attend(step_of((1, 0, new), lane=lane), layer),
        st.integers(0, 1),
        st.integers(0, NUM_LAYERS),
        st.integers(0, 9),
    ),
    st.just(HELLO),
)


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(st.lists(MESSAGES, min_size=1, max_size=25))
def test_no_message_ever_corrupts_the_books(messages: list[Any]) -> None:
    worker = Worker(kv_bytes=20_000)
    worker.tell(HELLO)
    for message in messages:
        for instruction in () if refusal(message) else worker.tell(message):
            assert isinstance(instruction, (Send, HangUp, Prepare, CopyBlocks, Compute))
