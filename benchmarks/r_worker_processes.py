"""R-workers and instances in processes of their own, at addresses of this host,
for benchmarks."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from end_to_end import MODELS, VOCAB
from random_llama import llama_config, write_checkpoint

COMMAND = [sys.executable, "-m", "fastdecode.cli.main", "r-worker", "--threads", "1"]
LONGEST = 16384
"""Tokens of a sequence of the models that ``model_or_random`` makes."""


@dataclass(frozen=True)
class RWorkers:
    """Those that run."""

    processes: list[subprocess.Popen[str]]
    addresses: list[str]

    @property
    def resident_bytes(self) -> int:
        """Memory of all."""
        return sum(psutil.Process(each.pid).memory_info().rss for each in self.processes)


@contextlib.contextmanager
def r_workers(number: int, kv_memory_gb: float, *options: str) -> Iterator[RWorkers]:
    """Start some, of one thread each, and end them."""
    bind = ["--bind", "tcp://127.0.0.1:*", "--kv-memory-gb", str(kv_memory_gb), *options]
    processes = [
        subprocess.Popen([*COMMAND, *bind], stdout=subprocess.PIPE, text=True)
        for _ in range(number)
    ]
    try:
        yield RWorkers(processes, [_address_of(process) for process in processes])
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def pinned_instances(
    model: str, roles: Sequence[str], *options: str
) -> Iterator[dict[str, psutil.Process]]:
    """Start instances of these roles, of one thread for each part, each on a core of its
    own: the first cores that this process may use. Gives the processes by address.

    Raises:
        RuntimeError: there are fewer cores.
    """
    every = os.sched_getaffinity(0)
    if len(roles) > len(every):
        raise RuntimeError(f"{len(roles)} instances want a core each, and there are {len(every)}")
    engine = ["--dtype", "float32", "--r-threads", "1", "--prefix-cache", "off"]
    command = [sys.executable, "-m", "fastdecode.cli.main", "instance", model, *engine, *options]
    with contextlib.ExitStack() as stack:
        processes = []
        for role, core in zip(roles, sorted(every), strict=False):
            os.sched_setaffinity(0, {core})  # which those that are started inherit
            try:
                process = subprocess.Popen(
                    [*command, "--role", role],
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            finally:
                os.sched_setaffinity(0, every)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield {_address_of(process): psutil.Process(process.pid) for process in processes}


def _address_of(process: subprocess.Popen[str]) -> str:
    """Once it says where it listens."""
    assert process.stdout is not None
    for line in process.stdout:
        if " listens at " in line:
            return line.split(" listens at ")[1].split()[0]
    raise RuntimeError("it ended before it listened; see what it said above")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What ``model_or_random`` is told."""
    parser.add_argument("--model", help="a model directory; default: random parameters")
    parser.add_argument("--shape", default="mha32m", help="of the random parameters")


def model_or_random(model: str | None, shape: str, directory: str) -> str:
    """A model directory: the one that is given, or a random checkpoint."""
    if model is not None:
        return model
    config: dict[str, Any] = {**MODELS[shape], "max_position_embeddings": LONGEST}
    write_checkpoint(Path(directory), llama_config(vocab_size=VOCAB, **config), shape)
    return directory
