"""``fastdecode r-worker``: keep the KV cache of other processes' sequences, and compute their
attention.

In an MPI job every rank but the first is an R-worker. With ``--bind`` an R-worker has an
address that S-workers connect to over ZeroMQ.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdecode.cli.options import add_options, read_options
from fastdecode.core.config.instances import Instances
from fastdecode.core.config.options import check_options, option, switch
from fastdecode.core.errors import ConfigError, imports_for
from fastdecode.core.host.processes import end_with
from fastdecode.wire.mpi.job import join
from fastdecode.wire.mpi.ranks import InstanceRanks

MOST_FILES = 256
"""Files that an R-worker at an address may open. It needs about 50. The others are connections
that may be open at a time, from anywhere."""


@dataclass(frozen=True)
class Resources:
    """What an R-worker may use of its host."""

    kv_memory_gb: float | None = option(
        None,
        "memory for the KV cache; default: half of the host's free memory, divided among its ranks",
        unit="GB",
    )
    threads: int | None = option(
        None,
        "CPU threads; default: one for each CPU it is bound to, or else a share of the host's CPUs",
    )
    cache_disk: str | None = option(
        None, "directory for copies of kept KV blocks; only you may use it", metavar="DIR"
    )
    cache_disk_gb: float | None = option(None, "disk space for this R-worker", unit="GB")
    cpus: str | None = option(None, "run on these CPUs only, such as 0-15,32-47", metavar="LIST")
    numa_node: str | None = option(
        None, "run on the CPUs of this NUMA node only; auto: the job's ranks take turns"
    )


@dataclass(frozen=True)
class Address:
    """How S-workers reach an R-worker, and how long it waits for them."""

    bind: str | None = option(
        None, "tcp://HOST:PORT; off loopback a key is needed too", metavar="ADDRESS"
    )
    key: str | None = option(
        None,
        "the cluster's key, the same file on every host; none: neither key nor encryption, on a "
        "trusted network",
        metavar="FILE",
    )
    name: str | None = option(
        None, "what to be called in logs; default: the host and port", metavar="NAME"
    )
    silence_s: float = option(
        5.0,
        "give up an S-worker or R-worker whose heartbeat is missing this long",
        low=0.1,
        high=3600,
        unit="s",
    )
    return_s: float = option(
        60.0,
        "after the S-worker is lost, wait this long for its return, without its cache",
        low=0,
        high=1e6,
        unit="s",
    )
    session_keep_s: float = option(
        300.0,
        "after the S-worker of a resumable job is lost, keep its KV cache this long for the "
        "resumed job; 0: do not keep it (default: 300)",
        low=0,
        high=1e6,
        unit="s",
    )
    model_hash: str | None = option(
        None, "serve S-workers that run this model only", metavar="HASH"
    )
    keep_serving: bool = switch("when an S-worker leaves, wait for the next")
    new_key: Path | None = option(None, "write a new key to this file, and do nothing else")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Rank:
    """What the job says that an R-worker belongs to."""

    instances: tuple[str, ...] = option(
        (),
        "the same as the S-workers' --instances; fastdecode launch --placement sets it",
        metavar="RANKS",
    )
    exit_with_parent: bool = switch("end when the parent process ends")


def add_r_worker(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve as an R-worker. In an MPI job: mpirun -n 1 fastdecode generate ... : "
        "-n 3 fastdecode r-worker. At an address: fastdecode r-worker --bind tcp://HOST:PORT, "
        "and on the S-worker's host fastdecode generate --r-worker "
        "tcp://HOST:PORT ..."
    )
    parser.set_defaults(run=run_r_worker)
    add_options(parser, Resources, "resources")
    add_options(parser, Address, "at an address")
    add_options(parser, Rank)


def run_r_worker(args: argparse.Namespace) -> int:
    """Serve until the job, or the last S-worker, has ended. Return the exit code."""
    own, at = read_options(args, Resources), read_options(args, Address)
    rank = read_options(args, Rank)
    if at.new_key is not None:
        _zmq_keys().ClusterKey.create(at.new_key)
        return 0
    from rworker.host import bind_cpus, serve_rank

    placed = Instances(rank.instances).placed
    num_sharing = bind_cpus(own.cpus, own.numa_node)
    if rank.exit_with_parent:
        end_with(os.getppid(), "this R-worker")
    if at.bind is None:
        if at.key is not None or at.keep_serving or at.model_hash is not None:
            raise ConfigError("--key, --model-hash and --keep-serving belong to --bind")
        serve_rank(
            join(),
            kv_memory_gb=own.kv_memory_gb,
            num_threads=own.threads,
            num_sharing_cpus=num_sharing,
            cache_disk=own.cache_disk,
            cache_disk_gb=own.cache_disk_gb,
            instances=InstanceRanks(placed) if placed else None,
            silence_s=at.silence_s,
        )
    return _serve_at(at.bind, own, at)


def _serve_at(bind: str, own: Resources, at: Address) -> int:
    """Serve S-workers that connect to an address: one, or one after another."""
    keys = _zmq_keys()
    from fastdecode.wire.zmq.hub import ZmqHub, ZmqListener
    from rworker.grace_period import GracePeriod
    from rworker.host import make_worker
    from rworker.serving_terms import ServingTerms
    from rworker.tiers.disk import disk_of
    from rworker.worker import serve

    key = keys.read_key(at.key)
    serving = ServingTerms(at.model_hash, at.keep_serving, at.return_s, at.session_keep_s)
    name = at.name or f"{socket.gethostname()} {bind.rpartition(':')[2]}"
    state, executor = make_worker(
        name,
        kv_memory_gb=own.kv_memory_gb,
        num_threads=own.threads,
        disk=disk_of(own.cache_disk, own.cache_disk_gb),
        serving=serving,
    )
    # ZeroMQ accepts every connection, and each may make it keep an unfinished frame. Where no
    # more files may be opened, connections wait outside.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft > MOST_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, hard))
    listener = ZmqListener(bind, name, key=key, silence_s=at.silence_s)
    neighbours = ZmqHub(key, silence_s=at.silence_s)
    try:
        print(f"R-worker {name} listens at {listener.address}", flush=True)
        serve(listener, state, executor, GracePeriod(serving), neighbours)
    finally:
        neighbours.close()
        listener.close()
    return 0


def _zmq_keys() -> Any:
    with imports_for("an R-worker at an address"):
        from fastdecode.wire.zmq import keys
    return keys
