"""``fastdecode r-worker``: keep the KV cache of somebody else's sequences, and
compute their attention.

Two ways to be reached. As a rank of an MPI job: every rank but the first is an
R-worker. Or with ``--bind``, at an address that S-workers connect to over
ZeroMQ.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import socket
from pathlib import Path
from typing import Any

from cost_model.numbers import number_within
from fastdecode.cli.options import (
    add_log_level_option,
    tell,
)
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.instances import Instances
from fastdecode.core.errors import ConfigError, imports_for
from fastdecode.core.host.parents import end_with
from fastdecode.engine.rank_roles import serve_other_rank
from fastdecode.wire.mpi import joining
from fastdecode.wire.mpi.roles import InstanceRanks

logger = logging.getLogger(__name__)

MOST_FILES = 256
"""That an R-worker at an address opens. It needs 50 or so: the others are the
connections that there may be at a time, of whomever."""


LINK_SECURITY_HELP = (
    "with --new-key, what the key does between hosts: encrypt, or authenticate "
    "(much faster; for a trusted network: its members can read and change KV, queries, and the "
    "prompts and texts of instances)"
)


def add_r_worker(commands: Any) -> None:
    parser = commands.add_parser(
        "r-worker",
        help="serve as an R-worker, in an MPI job or at an address",
        description="Serve as an R-worker. In an MPI job: mpirun -n 1 fastdecode generate ... : "
        "-n 3 fastdecode r-worker. At an address: fastdecode r-worker --bind tcp://HOST:PORT, "
        "and on the S-worker's host fastdecode generate --r-worker "
        "tcp://HOST:PORT ...",
    )
    parser.set_defaults(run=_r_worker)
    _add_resources(parser.add_argument_group("resources"))
    _add_address(parser.add_argument_group("at an address"))
    parser.add_argument(
        "--instances", action="append", default=[], metavar="RANKS",
        help="the same as the S-workers' --instances; fastdecode launch --placement sets it",
    )  # fmt: skip
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="end when the parent process ends"
    )
    add_log_level_option(parser)


def _add_resources(resources: argparse._ArgumentGroup) -> None:
    resources.add_argument(
        "--kv-memory-gb", type=float, metavar="GB",
        help="memory for the KV cache; default: half of the host's free memory, divided among its "
        "ranks",
    )  # fmt: skip
    resources.add_argument(
        "--threads", type=int, metavar="N",
        help="CPU threads; default: one for each CPU it is bound to, or else a share of the host's "
        "CPUs",
    )  # fmt: skip
    resources.add_argument(
        "--cache-disk", metavar="DIR",
        help="directory for copies of kept KV blocks; only you may use it",
    )  # fmt: skip
    resources.add_argument(
        "--cache-disk-gb", type=float, metavar="GB", help="disk space for this R-worker"
    )
    resources.add_argument(
        "--cpus", metavar="LIST", help="run on these CPUs only, such as 0-15,32-47"
    )
    resources.add_argument(
        "--numa-node", metavar="N",
        help="run on the CPUs of this NUMA node only; auto: the job's ranks take turns",
    )  # fmt: skip


def _add_address(address: argparse._ArgumentGroup) -> None:
    address.add_argument(
        "--bind", metavar="ADDRESS", help="tcp://HOST:PORT; off loopback a key is needed too"
    )
    address.add_argument(
        "--key", type=Path, metavar="FILE", help="the cluster's key, the same file on every host"
    )
    address.add_argument(
        "--name", metavar="NAME", help="what to be called in logs; default: the host and port"
    )
    address.add_argument(
        "--silence-s", type=float, default=5.0, metavar="S",
        help="give up an S-worker or R-worker whose heartbeat is missing this long (default: 5)",
    )  # fmt: skip
    address.add_argument(
        "--return-s", type=float, default=60.0, metavar="S",
        help="after the S-worker is lost, wait this long for its return, without its cache "
        "(default: 60)",
    )  # fmt: skip
    address.add_argument(
        "--session-keep-s", type=float, default=300.0, metavar="S",
        help="after the S-worker of a resumable job is lost, keep its KV cache this long for the "
        "resumed job (default: 300; 0: do not keep it)",
    )  # fmt: skip
    address.add_argument(
        "--model-hash", metavar="HASH", help="serve S-workers that run this model only"
    )
    address.add_argument(
        "--keep-serving", action="store_true", help="when an S-worker leaves, wait for the next"
    )
    address.add_argument(
        "--new-key", type=Path, metavar="FILE",
        help="write a new key to this file, and do nothing else",
    )  # fmt: skip
    address.add_argument(
        "--link-security", choices=("encrypt", "authenticate"), default="encrypt", metavar="HOW",
        help=LINK_SECURITY_HELP,
    )  # fmt: skip


def serve_if_r_rank(args: argparse.Namespace, engine_options: dict[str, Any]) -> None:
    """Roles by rank: see ``serve_other_rank``. Raises ConfigError."""
    serve_other_rank(EngineConfig.of(args.model, **engine_options), tell)


def _r_worker(args: argparse.Namespace) -> int:
    if args.new_key is not None:
        _zmq_access().ClusterKey.create(args.new_key, args.link_security)
        return 0
    if args.link_security != "encrypt":
        raise ConfigError(
            f"--link-security {args.link_security} is written into a key's file: make one with "
            f"--new-key FILE --link-security {args.link_security}, and copy it to every host"
        )
    from rworker.host import bind_cpus, serve_rank

    number_within("silence_s", args.silence_s, 0.1, 3600, "number of seconds")
    placed = Instances(tuple(args.instances)).placed
    num_sharing = bind_cpus(args.cpus, args.numa_node)
    if args.exit_with_parent:
        end_with(os.getppid(), "this R-worker")
    if args.bind is None:
        if args.key is not None or args.keep_serving or args.model_hash is not None:
            raise ConfigError("--key, --model-hash and --keep-serving belong to --bind")
        serve_rank(
            joining.join(),
            kv_memory_gb=args.kv_memory_gb,
            num_threads=args.threads,
            num_sharing_cpus=num_sharing,
            cache_disk=args.cache_disk,
            cache_disk_gb=args.cache_disk_gb,
            instances=InstanceRanks(placed) if placed else None,
            silence_s=args.silence_s,
        )
    for option in ("return_s", "session_keep_s"):
        number_within(option, getattr(args, option), 0, 1e6, "number of seconds")
    return _serve_at(args)


def _serve_at(args: argparse.Namespace) -> int:
    """Serve S-workers that connect to an address: one, or one after another."""
    access = _zmq_access()
    from fastdecode.wire.zmq.listener import ZmqListener
    from fastdecode.wire.zmq.neighbours import ZmqNeighbours
    from rworker.grace_period import GracePeriod
    from rworker.host import make_worker
    from rworker.serving_terms import ServingTerms
    from rworker.tiers.disk import disk_of
    from rworker.worker import serve

    key = None if args.key is None else access.ClusterKey.read(args.key)
    serving = ServingTerms(args.model_hash, args.keep_serving, args.return_s, args.session_keep_s)
    name = args.name or f"{socket.gethostname()} {args.bind.rpartition(':')[2]}"
    state, executor = make_worker(
        name,
        kv_memory_gb=args.kv_memory_gb,
        num_threads=args.threads,
        disk=disk_of(args.cache_disk, args.cache_disk_gb),
        serving=serving,
    )
    _limit_files()
    listener = ZmqListener(args.bind, name, key=key, silence_s=args.silence_s)
    neighbours = ZmqNeighbours(key, args.silence_s)
    try:
        print(f"R-worker {name} listens at {listener.address}", flush=True)
        serve(listener, state, executor, GracePeriod(serving), neighbours)
    finally:
        neighbours.close()
        listener.close()
    return 0


def _limit_files() -> None:
    """ZeroMQ accepts all that come, and each may have it keep a frame that it
    hasn't sent whole. Where no more files may be opened, they wait outside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft > MOST_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, hard))


def _zmq_access() -> Any:
    with imports_for("an R-worker at an address"):
        from fastdecode.wire.zmq import access
    return access
