"""Instances that live and are of no use: one whose engine hangs, and one that
says what can't be. Requests continue elsewhere, and both may come back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
from instance_processes import (
    Process,
    assert_all_is_free,
    controller,
    engine,
    instance,
    instances,
    ready,
)
from instance_runs import answers, params, prompts, tokens
from msgspec import Raw
from news import WAIT_S
from raw_messages import RawDeltas
from zmq_r_workers import at, r_workers

from fastdecode import LLM
from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.delta import Delta
from fastdecode.core.dtype import DType
from fastdecode.core.errors import WorkerError
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.sequence import Request
from fastdecode.engine.instances.processes import listen
from fastdecode.wire.instances import Deltas, InstanceHello, InstanceWelcome, Submit
from fastdecode.wire.transport import TIMEOUT, PeerLostError

pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

NEVER = "600"
PATIENT = "30"
"""Seconds of silence: no process is stopped as a whole, and the machine may be busy."""


@pytest.fixture(scope="module")
def two(model: str) -> Iterator[list[Process]]:
    with instances(
        model, "prefill", "decode", options=("--worker-silence-s", PATIENT)
    ) as processes:
        yield processes


def test_an_engine_that_hangs_in_a_process_that_lives_is_gone_on_without(
    model: str, one: LLM, two: list[Process]
) -> None:
    role = "decode"
    asked, how = prompts(16, seed=51), params(16, seed=51, n=2)
    with contextlib.ExitStack() as stack:
        options = ("--keep-serving", "--silence-s", NEVER)
        (r_worker,), addresses = stack.enter_context(r_workers("*", options=options))
        few = ("--dtype", "float32", "--block-size", "16", "--prefix-cache", "off")
        its_own = (*few, "--worker-silence-s", NEVER, *at(addresses))
        hurt = ready(stack.enter_context(instance(model, role, engine=its_own)), role)
        with controller(
            model, [hurt, *two], worker_timeout_s=3.0, worker_silence_s=float(PATIENT)
        ) as llm:
            assert answers(llm.generate(asked, how)) == answers(one.generate(asked, how))
            r_worker.process.send_signal(signal.SIGSTOP)
            try:
                outputs = llm.generate(asked, how)
                assert not any(output.error for output in outputs)
                assert tokens(outputs) == tokens(one.generate(asked, how))
                assert llm.until(lambda: engine(llm).clients[0].broken is not None)
                why = engine(llm).clients[0].broken
                assert isinstance(why, WorkerError) and why.code == TIMEOUT
                assert hurt.job.process.is_running()
            finally:
                r_worker.process.send_signal(signal.SIGCONT)
            assert llm.until(lambda: engine(llm).clients[0].broken is None)
            assert answers(llm.generate(asked, how)) == answers(one.generate(asked, how))
            assert_all_is_free(llm)


Lie: TypeAlias = "Callable[[Liar, Request], Any]"
LIES: dict[str, Lie] = {
    "a sequence too many": lambda liar, request: Deltas(
        (Delta(request.request_id, request.params.n, token_ids=(7,)),)
    ),
    "no msgpack": lambda liar, request: RawDeltas(Raw(b"\xc1")),
    "deep lists": lambda liar, request: RawDeltas(Raw(b"\x91" * 100_000 + b"\x01")),
    "another welcome": lambda liar, request: liar.welcome(),
}
"""One of each kind. ``test_trust.py`` and ``test_status_figures.py`` have the others."""


class Liar(threading.Thread):
    """An instance that answers its first request with a lie, and welcomes the next
    controller once it may."""

    def __init__(self, model: str, max_model_len: int, lie: Lie) -> None:
        super().__init__(daemon=True)
        self._lie = lie
        self._max_model_len = max_model_len
        self._hash = open_checkpoint(model).model_hash
        self._listener = listen("tcp://127.0.0.1:*", "liar", None, float(PATIENT))
        self.address = self._listener.address
        self.greeted = 0
        self.may_welcome = threading.Event()
        self.may_welcome.set()
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            try:
                peer, message = self._listener.receive_any(0.1)
            except PeerLostError as lost:
                self._listener.connections[lost.index].close()
                continue
            except WorkerError:
                continue  # woken, or nothing came
            if isinstance(message, InstanceHello):
                self.greeted += 1
                assert self.may_welcome.wait(WAIT_S)
                self._listener.connections[peer].send(self.welcome())
            elif isinstance(message, Submit):
                lie: Any = self._lie(self, message.requests[0])
                self.may_welcome.clear()
                with contextlib.suppress(WorkerError):  # the controller may have hung up by now
                    self._listener.connections[peer].send(lie)

    def welcome(self) -> InstanceWelcome:
        role, dtype = InstanceRole.BOTH, DType("float32")
        return InstanceWelcome(
            "liar", role, self._hash, dtype, dtype, self._max_model_len, 1 << 20, 16, 64, 512, 1, 1
        )

    def end(self) -> None:
        self.is_over = True
        self.may_welcome.set()
        self._listener.wake()
        self.join(WAIT_S)
        self._listener.close()


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_an_instance_that_lies_is_lost_alone_and_may_come_back(
    lie: Lie, model: str, one: LLM, two: list[Process]
) -> None:
    asked, how = prompts(12, seed=52), params(12, seed=52)
    liar = Liar(model, one.facts.max_model_len, lie)
    liar.start()
    try:
        lies = Process(two[0].job, "both", liar.address)
        with controller(model, [lies, *two], worker_silence_s=float(PATIENT)) as llm:
            others = {each: each.welcome for each in engine(llm).clients[1:]}
            assert answers(llm.generate(asked, how)) == answers(one.generate(asked, how))
            assert llm.until(lambda: engine(llm).clients[0].broken is not None)
            assert all(each.welcome is welcome for each, welcome in others.items())
            liar.may_welcome.set()
            assert llm.until(lambda: engine(llm).clients[0].broken is None)
            assert liar.greeted >= 2
    finally:
        liar.end()
