"""An R-worker without a thread: the same answers as one with a thread, and the
manners of a connection."""

from __future__ import annotations

import logging
import weakref
from unittest.mock import Mock

import numpy as np
import pytest
from values import replace

from fastdecode.core.dtype import DType
from fastdecode.core.errors import WorkerError
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.messages import (
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    Close,
    Failed,
    FromRWorker,
    Hello,
    Open,
    Shutdown,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.transport import CLOSED, Connection, PolledHub
from rworker.attention import AttentionExecutor
from rworker.inline import WORKER, InlineConnection, make_inline_worker
from rworker.state import RWorkerState
from rworker.worker import RWorkerExecutor, start_worker_thread
from sworker.kernels.threads import openmp_library

SPEC = AttentionSpec(6, 2, 16, scale=0.25)
HELLO = Hello("hash", KVSpec(2, 2, 16, DType.FLOAT32, 16), (SPEC, SPEC), DType.FLOAT32)
NUM_SEQUENCES, PROMPT_TOKENS = 3, 40


def job() -> list[ToRWorker]:
    """Open, one step of prompts, one of single tokens, in two layers each; close."""
    rng = np.random.default_rng(0)
    ids = np.arange(NUM_SEQUENCES, dtype=np.int64)
    messages: list[ToRWorker] = [HELLO]
    messages += [Open(i, PROMPT_TOKENS + 1) for i in range(NUM_SEQUENCES)]
    past = 0
    for step, num_new in enumerate((PROMPT_TOKENS, 1)):
        counts = np.full(NUM_SEQUENCES, num_new, np.int32)
        messages.append(BeginStep(step, 0, ids, counts * 0 + past, counts, counts, counts + past))
        past += num_new
        rows = NUM_SEQUENCES * num_new
        for layer in range(2):
            q, k, v = (
                rng.standard_normal((rows, heads, 16)).astype(np.float32) for heads in (6, 2, 2)
            )
            messages.append(Attend(step, 0, layer, q, k, v))
    return [*messages, *(Close(i) for i in range(NUM_SEQUENCES)), Shutdown()]


def converse(connection: Connection[ToRWorker, FromRWorker]) -> list[FromRWorker]:
    answers = []
    for message in job():
        connection.send(message)
        if not isinstance(message, (BeginStep, Close, Shutdown)):
            answer = connection.receive(120)
            answers.append(
                replace(answer, o=answer.o.copy()) if isinstance(answer, AttendResult) else answer
            )
    return answers


def inline(executor: RWorkerExecutor | None = None) -> InlineConnection:
    if executor is None:
        return make_inline_worker("r0", kv_bytes=1 << 20, num_threads=2)
    return InlineConnection(RWorkerState("r0", kv_bytes=1 << 20), executor)


@pytest.mark.parametrize("has_own_threads", [True, False])
def test_answers_are_those_of_a_thread(has_own_threads: bool) -> None:
    library = None if has_own_threads else openmp_library()
    found = converse(
        make_inline_worker("r0", kv_bytes=1 << 20, num_threads=2, openmp_library=library)
    )
    worker = start_worker_thread("r0", kv_bytes=1 << 20, num_threads=2)
    expected = converse(worker.connection)
    worker.join(60)
    assert len(found) == len(expected) == 1 + NUM_SEQUENCES + 4
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, AttendResult):
            assert isinstance(one, AttendResult)
            assert (one.step, one.lane, one.layer) == (other.step, other.lane, other.layer)
            assert (one.o == other.o).all() and np.abs(one.o).max() > 0.1
        else:
            assert one == other


def test_works_when_it_is_waited_for() -> None:
    connection = inline()
    connection.send(HELLO)
    connection.send(Open(0, 10))
    connection.send(Close(0))
    # Refused as a protocol error, were the one before not closed by then.
    connection.send(Open(0, 10))
    hub = PolledHub([connection])
    assert isinstance(hub.receive_any()[1], Welcome)
    assert [hub.receive_any(), hub.receive_any()] == [(WORKER, Accepted(0))] * 2
    assert connection.poll() is None
    with pytest.raises(AssertionError, match="R-worker r0 owes no answer"):
        connection.receive(1.0)


def test_ends_when_told() -> None:
    connection = inline()
    connection.send(HELLO)
    connection.send(Shutdown())
    assert isinstance(connection.receive(), Welcome)
    with pytest.raises(WorkerError, match="R-worker r0 has closed") as closed:
        connection.receive()
    assert closed.value.code == CLOSED
    with pytest.raises(WorkerError, match="R-worker r0 has closed"):
        connection.send(HELLO)


def test_closed_on_this_side() -> None:
    connection = inline()
    connection.send(HELLO)
    connection.close()
    connection.close()
    for call in (connection.poll, lambda: connection.send(HELLO)):
        with pytest.raises(WorkerError, match="was closed on this side"):
            call()


def test_broken_protocol_is_answered_and_ends_it() -> None:
    connection = inline()
    connection.send(Open(0, 10))
    connection.send(HELLO)
    failed = connection.receive()
    assert isinstance(failed, Failed) and "Open" in failed.message
    with pytest.raises(WorkerError, match="R-worker r0 has closed"):
        connection.receive()  # nobody looks at what came after it


def attending(error: BaseException) -> InlineConnection:
    """Return an R-worker that was sent its first Attend, whose computation raises ``error``."""
    executor = AttentionExecutor()
    executor.compute = Mock(side_effect=error)  # type: ignore[method-assign]
    connection = inline(executor)
    for message in [message for message in job() if not isinstance(message, Close)][
        : 3 + NUM_SEQUENCES
    ]:
        connection.send(message)
    assert isinstance(message, Attend)
    for _ in range(1 + NUM_SEQUENCES):
        connection.receive()
    return connection


def test_crash_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    connection = attending(ZeroDivisionError("no kernel"))
    with caplog.at_level(logging.ERROR):
        assert connection.receive() == Failed("r0", "worker_failed", "ZeroDivisionError: no kernel")
    assert "R-worker r0 crashed" in caplog.text and "no kernel" in caplog.text
    with pytest.raises(WorkerError, match="R-worker r0 has closed"):
        connection.receive()


def test_nobody_waits_for_what_was_interrupted() -> None:
    connection = attending(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        connection.receive()
    assert connection.receive() == Failed("r0", "interrupted", "it was interrupted")
    with pytest.raises(WorkerError, match="R-worker r0 has closed"):
        connection.receive()


def test_cache_goes_with_the_connection() -> None:
    executor = AttentionExecutor()
    connection = inline(executor)
    connection.send(HELLO)
    assert isinstance(connection.receive(), Welcome)
    gone = weakref.ref(executor)
    connection.close()
    del executor
    assert gone() is None


def test_threads_of_another_runtime_are_not_needed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        connection = make_inline_worker(
            "r0", kv_bytes=1 << 20, num_threads=2, openmp_library="/no/libgomp.so"
        )
    assert "has threads of its own" in caplog.text
    connection.send(HELLO)
    assert isinstance(connection.receive(), Welcome)
