"""Instances as processes at addresses of this host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpi_launch import FASTDECODE, Running, running
from news import NewsLLM

from fastdecode import LLM
from fastdecode.engine.instances.router import Router

SILENCE_S = 2.0
ENGINE = (
    *("--dtype", "float32", "--r-threads", "1", "--kv-memory-gb", "0.004"),
    *("--block-size", "16", "--prefix-cache", "off", "--worker-silence-s", str(SILENCE_S)),
)


@dataclass(frozen=True)
class Process:
    """An instance."""

    job: Running
    role: str
    address: str

    @property
    def pid(self) -> int:
        return self.job.pid


@contextlib.contextmanager
def instance(
    model: str, role: str, *options: str, port: str = "*", engine: tuple[str, ...] = ENGINE
) -> Iterator[Running]:
    """A process that may not be ready yet."""
    command = [*FASTDECODE, "instance", model, "--role", role, *engine, *options]
    with running([*command, "--bind", f"tcp://127.0.0.1:{port}"]) as job:
        yield job


def ready(job: Running, role: str) -> Process:
    """Wait until an instance listens."""
    return Process(job, role, job.address())


@contextlib.contextmanager
def instances(model: str, *roles: str, options: tuple[str, ...] = ()) -> Iterator[list[Process]]:
    """Processes of these roles, ready."""
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(instance(model, role, *options)) for role in roles]
        yield [ready(job, role) for job, role in zip(jobs, roles, strict=True)]


def controller(model: str, processes: list[Process], **options: Any) -> NewsLLM:
    addresses = [each.address for each in processes]
    return NewsLLM(model, instances=addresses, **{"worker_silence_s": SILENCE_S, **options})


def engine(llm: LLM) -> Router:
    found = llm._running.engine
    assert isinstance(found, Router)
    return found


def assert_all_is_free(llm: NewsLLM) -> None:
    """No instance has a sequence, or a block of one."""
    running = llm._running
    router, dispatcher = engine(llm), engine(llm).dispatcher
    assert not (router.by_request or router.by_run or router.by_job)
    assert not any(queue.num_tokens for queue in dispatcher.prefill)
    assert not any(room.num_tokens or room.num_sequences for room in dispatcher.decode)
    for number, each in enumerate(engine(llm).clients):
        if each.broken is None:
            assert llm.until(lambda number=number: _used(running, number) == 0)


def _used(running: Any, number: int) -> int | None:
    figures = running.engine.clients[number].figures()
    return None if figures is None else sum(x.kv_blocks_used for x in figures.r_workers)
