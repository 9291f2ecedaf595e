"""``fastdecode r-worker``: keep the KV cache of somebody else's sequences, and compute their attention."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, NoReturn

from fastdecode.core.errors import ConfigError
from fastdecode.wire import mpi_job

if TYPE_CHECKING:
    from fastdecode.wire.mpi_job import MpiJob

# Of the memory that is free on a host, what the KV caches of its R-workers take together if nobody says.
DEFAULT_KV_SHARE = 0.5


def add_r_worker(commands: Any) -> None:
    parser = commands.add_parser(
        "r-worker",
        help="serve as an R-worker of an MPI job",
        description="Serve as an R-worker: mpirun -n 1 fastdecode generate ... : -n 3 fastdecode r-worker",
    )
    parser.set_defaults(run=_r_worker)
    parser.add_argument(
        "--kv-memory-gb",
        type=float,
        metavar="GB",
        help="KV cache; default: half of the host's free memory, shared out among the job's ranks there",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads; default: the cores it may use, shared out likewise"
    )
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))


def serve_if_r_rank(args: argparse.Namespace) -> None:
    """Roles by rank: in ``mpirun -n 4 fastdecode generate ...`` every rank but the first serves, and doesn't return."""
    if mpi_job.launched_size() is None or args.transport == "inproc":
        return
    job = mpi_job.join()
    if job.rank != mpi_job.S_RANK:
        serve_rank(job, kv_memory_gb=args.kv_memory_gb, num_threads=args.r_threads)


def _r_worker(args: argparse.Namespace) -> NoReturn:
    serve_rank(mpi_job.join(), kv_memory_gb=args.kv_memory_gb, num_threads=args.threads)


def serve_rank(job: MpiJob, *, kv_memory_gb: float | None, num_threads: int | None) -> NoReturn:
    """Serve the S-worker, rank 0, until it says Shutdown or is gone; then leave the job.

    Args:
        kv_memory_gb: KV cache in GB; None: this rank's share of half the free memory.
        num_threads: CPU threads; None: this rank's share of the cores.

    Raises:
        ConfigError: an option is out of range, or this is rank 0.
    """
    from fastdecode.wire.mpi import connect_to_s_worker
    from rworker.attention import AttentionExecutor
    from rworker.state import RWorkerState
    from rworker.worker import serve

    threads = num_threads if num_threads is not None else max(1, _cores() // mpi_job.local_size())
    if not 1 <= threads <= 4096:
        raise ConfigError(f"threads={threads} is not a whole number from 1 to 4096")
    kv_bytes = _kv_bytes(kv_memory_gb)
    hub = connect_to_s_worker(job)
    name = f"rank {job.rank} on {job.host}"
    serve(
        hub.connections[0],
        RWorkerState(name, kv_bytes=kv_bytes, num_threads=threads),
        AttentionExecutor(num_threads=threads),
    )
    hub.close()
    mpi_job.leave(0)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _kv_bytes(kv_memory_gb: float | None) -> int:
    import psutil

    if kv_memory_gb is None:
        return int(psutil.virtual_memory().available * DEFAULT_KV_SHARE) // mpi_job.local_size()
    if not 0 < kv_memory_gb <= 1e6:
        raise ConfigError(f"kv_memory_gb={kv_memory_gb} is not a number of GB above 0 and at most 1e6")
    return int(kv_memory_gb * 1e9)
