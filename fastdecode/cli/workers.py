"""Processes that serve others: ``fastdecode r-worker`` keeps KV caches and computes attention over
MPI, or at an address. ``fastdecode instance`` is an engine that runs what a controller gives it."""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fastdecode.cli.options import (
    EXIT_WORKERS_LOST,
    add_engine_options,
    add_options,
    add_status_option,
    engine_options,
    read_options,
    tell,
)
from fastdecode.cli.parser import add_model
from fastdecode.core.config.instances import InstanceRole, Instances
from fastdecode.core.config.options import option, switch
from fastdecode.core.errors import ConfigError, imports_for
from fastdecode.core.files import STANDARD, check_paths
from fastdecode.core.host.processes import end_with, interrupt
from fastdecode.jobs.stopping import stop_signals
from fastdecode.wire.mpi.job import join
from fastdecode.wire.ranks import InstanceRanks

if TYPE_CHECKING:
    from fastdecode.engine.instances.server import InstanceServer

MOST_FILES = 256
"""Files that an R-worker at an address may open: about 50 that it needs, and open connections."""
INSTANCE = "fastdecode instance"
ANY_PORT = "tcp://127.0.0.1:*"


@dataclass(frozen=True)
class Resources:
    kv_memory_gb: float | None = option(
        None, "KV cache; default: half of the free memory, divided among ranks", unit="GB"
    )
    threads: int | None = option(
        None, "CPU threads; default: one for each CPU it is bound to, or its share of all"
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
    bind: str | None = option(
        None, "tcp://HOST:PORT; off loopback a key is needed too", metavar="ADDRESS"
    )
    key: str | None = option(
        None, "the cluster's key; none: no encryption, on a trusted network", metavar="FILE"
    )
    name: str | None = option(
        None, "what to be called in logs; default: the host and port", metavar="NAME"
    )
    silence_s: float = option(
        5.0, "longest time without a peer's heartbeat", low=0.1, high=3600, unit="s"
    )
    return_s: float = option(
        60.0, "how long to wait for a lost S-worker, without its cache", low=0, high=1e6, unit="s"
    )
    session_keep_s: float = option(
        300.0, "how long to keep KV of a lost, resumable job", low=0, high=1e6, unit="s"
    )
    model_hash: str | None = option(
        None, "serve S-workers that run this model only", metavar="HASH"
    )
    keep_serving: bool = switch("when an S-worker leaves, wait for the next")
    new_key: Path | None = option(None, "write a new key to this file, and do nothing else")


@dataclass(frozen=True)
class Rank:
    instances: tuple[str, ...] = option(
        (), "as the S-workers' --instances; launch --placement sets it", metavar="RANKS"
    )
    exit_with_parent: bool = switch("end when the parent process ends")


def add_r_worker(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve as an R-worker. In an MPI job: mpirun -n 1 fastdecode generate ... : -n 3 "
        "fastdecode r-worker. At an address: fastdecode r-worker --bind tcp://HOST:PORT, and on "
        "the S-worker's host fastdecode generate --r-worker tcp://HOST:PORT ..."
    )
    parser.set_defaults(run=run_r_worker)
    add_options(parser, Resources, "resources")
    add_options(parser, Address, "at an address")
    add_options(parser, Rank)


def run_r_worker(args: argparse.Namespace) -> int:
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
    keys = _zmq_keys()
    from fastdecode.wire.zmq.hub import ZmqHub, ZmqListener
    from rworker.host import make_worker
    from rworker.serving_terms import ServingTerms
    from rworker.tiers.disk import disk_of
    from rworker.worker import GracePeriod, serve

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


@dataclass(frozen=True)
class InstanceOptions:
    role: str = option(
        "both", "what controllers give it, at first", choices=tuple(x.value for x in InstanceRole)
    )
    bind: str = option(
        ANY_PORT, f"where controllers connect (default: {ANY_PORT})", metavar="ADDRESS"
    )
    export: str | None = option(
        None, "where others fetch prompts: the first of its R-workers' ports", metavar="ADDRESS"
    )
    name: str | None = option(
        None, "what to be called in logs; default: the host and port", metavar="NAME"
    )


def add_instance(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Load a model, and run what a controller gives this process: generate, "
        "run-batch or serve with --instances. Serves one controller at a time, and then the next. "
        "Stops upon SIGTERM or Ctrl-C."
    )
    parser.set_defaults(run=_instance)
    add_model(parser)
    group = parser.add_argument_group("instance")
    add_options(group, InstanceOptions)
    add_status_option(group)
    add_engine_options(parser)


@stop_signals(interrupt)  # until it serves
def _instance(args: argparse.Namespace) -> int:
    from fastdecode.core.config.engine import EngineConfig

    own, options = read_options(args, InstanceOptions), engine_options(args)
    key = options["key"]
    if not options["r_worker_addresses"]:  # it is for R-workers that connect to this process
        options["key"] = None
    config = EngineConfig.of(args.model, **options)
    with imports_for(f"{INSTANCE} (an S-worker)"):
        from fastdecode.engine.instances.processes import InstancePlace, serve_instance
        from fastdecode.measure.status_file import engine_status, status_file
    check_paths(STANDARD, status=args.status)
    name = own.name or f"{socket.gethostname()} {own.bind.rpartition(':')[2]}"
    place = InstancePlace(InstanceRole(own.role), own.bind, own.export, key, name)

    def listening(address: str, serving: InstanceServer) -> None:
        def end(number: int, frame: FrameType | None) -> None:
            serving.end()

        stops.enter_context(stop_signals(end))
        look = engine_status(args.model, serving.service, lambda: serving.stats)
        stops.enter_context(status_file(args.status, "instance", look, tell))
        print(f"instance {name} ({own.role}) listens at {address}", flush=True)

    with contextlib.ExitStack() as stops:
        broken = serve_instance(config, place, tell, listening)
    if broken is None:
        return 0
    tell(f"{INSTANCE}: the engine broke down: {broken}")
    return EXIT_WORKERS_LOST
