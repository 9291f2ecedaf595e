"""Instances that lose their only R-worker, and live: their requests go on elsewhere at
once, health says degraded, and they are given requests again once it is back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator

import pytest
from instance_processes import Process, instance, ready
from instance_runs import prompts
from mpi_launch import FASTDECODE, Running
from zmq_r_workers import at, r_workers

pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")
pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from server_process import Server, serving

SILENCE_S = "2"
FEW = ("--dtype", "float32", "--block-size", "16", "--prefix-cache", "off")


@contextlib.contextmanager
def with_r_worker(model: str, role: str) -> Iterator[tuple[Process, Running, str]]:
    """An instance, its only R-worker, and where that listens."""
    options = ("--keep-serving", "--silence-s", SILENCE_S, "--return-s", "0")
    with contextlib.ExitStack() as stack:
        (r_worker,), addresses = stack.enter_context(r_workers("*", options=options))
        its_own = (*FEW, "--worker-silence-s", SILENCE_S, *at(addresses))
        job = stack.enter_context(instance(model, role, engine=its_own))
        yield ready(job, role), r_worker, addresses[0]


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
