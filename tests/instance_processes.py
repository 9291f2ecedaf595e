"""Instances as processes at addresses of this host."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpi_launch import Running, running

FASTDECODE = [sys.executable, "-m", "fastdecode.cli.main"]
PATHS = {"PYTHONPATH": str(Path(__file__).parents[1])}
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
    with running([*command, "--bind", f"tcp://127.0.0.1:{port}"], **PATHS) as job:
        yield job


def ready(job: Running, role: str) -> Process:
    """Once it says where it listens."""

    def is_told() -> bool:
        lines = [line for line in job.output().splitlines(keepends=True) if " listens at " in line]
        return bool(lines) and lines[-1].endswith("\n")

    job.wait_until(is_told)
    return Process(job, role, job.output().split(" listens at ")[-1].split()[0])


@contextlib.contextmanager
def instances(model: str, *roles: str, options: tuple[str, ...] = ()) -> Iterator[list[Process]]:
    """Processes of these roles, ready."""
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(instance(model, role, *options)) for role in roles]
        yield [ready(job, role) for job, role in zip(jobs, roles, strict=True)]
