"""R-workers in processes of their own, at addresses of this host, for
benchmarks."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator
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
def r_workers(number: int, kv_memory_gb: float) -> Iterator[RWorkers]:
    """Start some, of one thread each, and end them."""
    bind = ["--bind", "tcp://127.0.0.1:*", "--kv-memory-gb", str(kv_memory_gb)]
    processes = [
        subprocess.Popen([*COMMAND, *bind], stdout=subprocess.PIPE, text=True)
        for _ in range(number)
    ]
    try:
        said = [process.stdout.readline() for process in processes if process.stdout]
        yield RWorkers(processes, [line.split(" listens at ")[1].strip() for line in said])
    finally:
        for process in processes:
            process.kill()
            process.wait()


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
