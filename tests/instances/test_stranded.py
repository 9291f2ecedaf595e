"""Instances that lose their only R-worker, and live: their requests go on elsewhere at
once, health says degraded, and they are given requests again once it is back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator

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
from mpi_launch import Running
from zmq_r_workers import at, r_workers

from examples import TRIES_ALL
from fastdecode import LLM

pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")
pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from server_process import FASTDECODE, Server, serving

SILENCE_S = "2"
FEW = ("--dtype", "float32", "--block-size", "16", "--prefix-cache", "off")
WITHIN_S = 60.0
"""A hang is 300 s, ``worker_timeout_s``, which isn't set here."""


@contextlib.contextmanager
def with_r_worker(model: str, role: str) -> Iterator[tuple[Process, Running, str]]:
    """An instance, its only R-worker, and where that listens."""
    options = ("--keep-serving", "--silence-s", SILENCE_S, "--return-s", "0")
    with contextlib.ExitStack() as stack:
        (r_worker,), addresses = stack.enter_context(r_workers("*", options=options))
        its_own = (*FEW, "--worker-silence-s", SILENCE_S, *at(addresses))
        job = stack.enter_context(instance(model, role, engine=its_own))
        yield ready(job, role), r_worker, addresses[0]


@pytest.fixture(scope="module")
def others(model: str) -> Iterator[list[Process]]:
    """Instances that lose nobody."""
    with instances(model, "prefill", "decode") as processes:
        yield processes


@contextlib.contextmanager
def back(r_worker: Running, address: str, trouble: signal.Signals) -> Iterator[None]:
    """The R-worker is there again."""
    if trouble is signal.SIGSTOP:
        os.kill(r_worker.pid, signal.SIGCONT)
        yield
        return
    port = address.rpartition(":")[2]
    with r_workers(port, options=("--keep-serving", "--silence-s", SILENCE_S)):
        yield


LOSSES = [("decode", signal.SIGKILL)]
MORE_LOSSES = [("prefill", signal.SIGSTOP), ("prefill", signal.SIGKILL), ("decode", signal.SIGSTOP)]
"""In ``make test`` the server below has its R-workers stopped, one after the other."""


@pytest.mark.parametrize(
    ("role", "trouble"), LOSSES + MORE_LOSSES * TRIES_ALL, ids=lambda x: getattr(x, "name", x)
)
def test_requests_of_an_instance_without_an_r_worker_go_on_elsewhere(
    model: str, one: LLM, others: list[Process], role: str, trouble: signal.Signals
) -> None:
    asked, how = prompts(24, seed=71), params(24, seed=71, n=2)
    expected = tokens(one.generate(asked, how))
    with contextlib.ExitStack() as stack:
        hurt, r_worker, address = stack.enter_context(with_r_worker(model, role))
        llm = stack.enter_context(controller(model, [hurt, *others]))
        assert answers(llm.generate(asked, how)) == answers(one.generate(asked, how))
        os.kill(r_worker.pid, trouble)
        found = llm.generate(asked, how)
        assert not any(output.error for output in found) and tokens(found) == expected
        assert llm.until(lambda: engine(llm).remote[0].stranded is not None, WITHIN_S)
        assert engine(llm).remote[0].broken is None and hurt.job.process.is_running()
        assert llm._running.num_live_r_workers == llm._running.num_r_workers - 1
        with back(r_worker, address, trouble):
            assert llm.until(lambda: engine(llm).remote[0].stranded is None)
            assert tokens(llm.generate(asked, how)) == expected
            assert_all_is_free(llm)


def test_a_server_is_degraded_and_answers(model: str) -> None:
    """By two instances at addresses, of which one loses its only R-worker, and then
    the other; both come back."""
    asked = prompts(6, seed=72)
    with contextlib.ExitStack() as stack:
        prefill, first, _ = stack.enter_context(with_r_worker(model, "prefill"))
        decode, second, _ = stack.enter_context(with_r_worker(model, "decode"))
        addresses = f"{prefill.address},{decode.address}"
        command = [*FASTDECODE, "serve", model, "--port", "0", "--instances", addresses]
        server = stack.enter_context(serving(command))
        whole = [_complete(server, prompt) for prompt in asked]
        assert server.get("/health") == {"status": "ok"}
        os.kill(first.pid, signal.SIGSTOP)
        server.wait_until(lambda: server.status()["num_live_r_workers"] == 1)
        assert server.get("/health") == {
            "status": "ok", "degraded": "1 of 2 R-workers are there"
        }  # fmt: skip
        assert [_complete(server, prompt) for prompt in asked] == whole
        os.kill(second.pid, signal.SIGSTOP)
        server.wait_until(lambda: server.status()["state"] == "no_r_worker")
        status, _, raw = server.ask("GET", "/health")
        assert (status, json.loads(raw)["reason"]) == (503, "no_r_worker")
        for r_worker in (first, second):
            os.kill(r_worker.pid, signal.SIGCONT)
        server.wait_until(lambda: server.get("/health") == {"status": "ok"})
        assert [_complete(server, prompt) for prompt in asked] == whole


def _complete(server: Server, prompt: list[int]) -> str:
    status, said = server.complete(prompt=prompt, max_tokens=9, temperature=0)
    assert status == 200, said
    return str(said["choices"][0]["text"])
