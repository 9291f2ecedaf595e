"""What every command has, and imports nothing else for."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

from fastdecode.wire.mpi.launcher import repeats_other_rank

EXIT_UNEXPECTED = 1
EXIT_INFEASIBLE = 1
"""Of questions that have an answer: what was asked for can't be."""
EXIT_SOME_FAILED = 3
EXIT_WORKERS_LOST = 4


def duration(text: str) -> float:
    """Seconds: ``5``, ``0.005s``, ``5ms``, ``800us``."""
    scales = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    unit = next((unit for unit in scales if text.strip().endswith(unit)), "")
    try:
        return float(text.strip().removesuffix(unit)) * scales.get(unit, 1.0)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: give seconds, or like 5ms"
        ) from None


def is_said_by_other_rank() -> bool:
    """Whether a rank before this one, with the same command line, says what is wrong
    with that. All ranks of an MPI job then end together."""
    return find_spec("mpi4py") is not None and repeats_other_rank()


def add_log_level_option(parser: argparse.ArgumentParser, default: str = "warning") -> None:
    parser.add_argument(
        "--log-level", default=default, choices=("debug", "info", "warning", "error")
    )


def tell(text: str) -> None:
    """A line for a person, on stderr. A closed stderr ends no job."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def progress_teller(every_s: float = 5.0) -> Callable[[str], None]:
    """Tells how far a command is, with the seconds so far, at most once in ``every_s``."""
    began_s = told_s = time.monotonic()

    def progress(text: str) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= every_s:
            told_s = now_s
            tell(f"{text} in {now_s - began_s:.0f} s")

    return progress
