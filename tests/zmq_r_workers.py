"""R-workers as processes at addresses of this host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mpi_launch import FASTDECODE, Running, running


@contextlib.contextmanager
def r_workers(
    *ports: str, options: tuple[str, ...] = ()
) -> Iterator[tuple[list[Running], list[str]]]:
    """Processes, and the addresses at which they listen."""
    with contextlib.ExitStack() as stack:
        jobs = []
        for port in ports:
            command = [*FASTDECODE, "r-worker", "--threads", "1", "--kv-memory-gb", "0.01"]
            jobs.append(
                stack.enter_context(
                    running([*command, "--bind", f"tcp://127.0.0.1:{port}", *options])
                )
            )
        yield jobs, [job.address() for job in jobs]


def at(addresses: list[str]) -> list[str]:
    """How an S-worker's command names them."""
    return [word for address in addresses for word in ("--r-worker", address)]
