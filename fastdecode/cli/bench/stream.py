"""``fastdecode bench stream``: how near streams of K and V come to what carries
them, link by link.

Exit codes: 0 every link reaches its share; 1 one doesn't; 2 usage; 4 an
R-worker was lost.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cost_model.numbers import number_within, whole_number
from fastdecode.cli.measuring import measuring
from fastdecode.cli.options import add_log_level_option, add_status_option, tell
from fastdecode.core.config.groups import Cluster
from fastdecode.core.errors import ConfigError, imports_for
from fastdecode.wire.mpi import job as mpi_job
from fastdecode.wire.mpi import joining, launcher

if TYPE_CHECKING:
    from fastdecode.measure.links.local_links import LocalLinks
    from fastdecode.measure.links.rates import LinkRate

STREAM: Final = "bench stream"
EXIT_SLOW: Final = 1
LINKS: Final = ("memory", "threads", "disk", "zmq")
"""Of this machine; what is measured if nobody says."""
MOST_MIB: Final = 1 << 14


def add_stream(benches: Any) -> None:
    """Add the subcommand to those of ``bench``."""
    parser: argparse.ArgumentParser = benches.add_parser(
        "stream",
        help="each link's rate, and which share of the raw rate it is",
        description="Stream K and V in chunks of 4 MiB over the links that R-workers have, and the "
        "raw thing in turns: copies in memory, plain writes to disk, plain ZeroMQ and MPI sends. "
        "Alone: links of this machine. In an MPI job: those of its ranks. With --r-worker: those "
        "of these R-workers, which have nobody to take raw bytes.",
    )
    parser.set_defaults(run=run_stream)
    parser.add_argument(
        "--links", nargs="+", choices=LINKS, default=list(LINKS), metavar="LINK",
        help=f"which of this machine: {', '.join(LINKS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--r-worker", dest="r_worker_addresses", action="append", default=[], metavar="ADDRESS",
        help="an R-worker's address, tcp://HOST:PORT; repeatable; it serves jobs afterwards",
    )  # fmt: skip
    parser.add_argument(
        "--key", metavar="FILE", help="the cluster's key, for R-workers on other hosts"
    )
    parser.add_argument(
        "--disk", type=Path, metavar="DIR", help="where files are written (default: a temporary "
        "directory)",
    )  # fmt: skip
    parser.add_argument(
        "--mib", type=int, default=64, metavar="N", help="K and V at a time, in MiB (default: 64)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="that count (default: 5)"
    )
    parser.add_argument(
        "--least", type=float, default=0.8, metavar="X",
        help="share of the raw rate that each link is to reach (default: 0.8)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the rates as JSON")
    add_status_option(parser)
    add_log_level_option(parser)


def run_stream(args: argparse.Namespace) -> int:
    """Measure. Returns the exit code."""
    _check(args)
    with imports_for("fastdecode bench stream"):
        from fastdecode.measure.links.local_links import LocalLinks

    def show(rate: LinkRate) -> None:
        if not args.json:
            print(_line(rate), flush=True)

    num_sequences = args.mib // 4
    ways = LocalLinks(num_sequences, args.rounds, show)
    if args.r_worker_addresses:
        with measuring(args, STREAM, lambda: _progress(ways)):
            _measure_addresses(ways, args)
    elif launcher.launched_size() is not None:
        _measure_ranks(ways, args)
    else:
        with measuring(args, STREAM, lambda: _progress(ways)):
            _measure_here(ways, args)
    if args.json:
        rows = [{**asdict(rate), "bytes_per_s": rate.bytes_per_s} for rate in ways.rates]
        print(json.dumps({"least": args.least, "links": rows}, indent=2))
    slow = [rate.link for rate in ways.rates if (rate.share or 1.0) < args.least]
    if slow:
        tell(f"below {args.least:g} of the raw rate: {', '.join(slow)}")
    return EXIT_SLOW if slow else 0


def _progress(ways: LocalLinks) -> dict[str, Any]:
    """For the status file; how many links there will be isn't known."""
    return {"unit": "links", "done": len(ways.rates)}


def _check(args: argparse.Namespace) -> None:
    if not 4 <= args.mib <= MOST_MIB or args.mib % 4:
        raise ConfigError(f"--mib {args.mib} is not a multiple of 4, from 4 to {MOST_MIB}")
    whole_number("rounds", args.rounds, 1, 10_000)
    number_within("least", args.least, 0, 1)
    if args.disk is not None and not args.disk.is_dir():
        raise ConfigError(f"--disk {args.disk} is no directory")


def _measure_here(ways: LocalLinks, args: argparse.Namespace) -> None:
    for link in args.links:
        if link == "disk":
            with tempfile.TemporaryDirectory(dir=args.disk, prefix="fastdecode-") as directory:
                ways.disk(Path(directory))
        elif link == "zmq":
            with imports_for("the ZeroMQ transport"):
                ways.zmq()
        elif link == "threads":
            ways.threads()
        else:
            ways.memory()


def _measure_addresses(ways: LocalLinks, args: argparse.Namespace) -> None:
    """R-workers that somebody else has started, each with memory of its own."""
    Cluster(r_worker_addresses=args.r_worker_addresses, key=args.key)
    from fastdecode.engine.setup.workers import reach_addresses

    addresses = args.r_worker_addresses
    workers = reach_addresses(
        addresses,
        key_file=args.key,
        silence_s=Cluster.worker_silence_s,
        min_workers=len(addresses),
        reach_timeout_s=5.0,
    )
    everybody = range(len(addresses))
    try:
        ways.inspect(workers.hub.connections)
        for address, connection in zip(addresses, workers.hub.connections, strict=True):
            ways.to_worker(address, connection, None)
        ways.between("zmq", workers.hub.connections, addresses, None)
    finally:
        workers.close(everybody, 5.0)  # without a Shutdown: they wait for their job


def _measure_ranks(ways: LocalLinks, args: argparse.Namespace) -> None:
    """Every rank but the first is an R-worker, and doesn't return."""
    from fastdecode.measure.links.ranks import send_raw, take_raw

    job = joining.join()
    sizes = (args.mib // 4, args.rounds)
    if job.rank != mpi_job.S_RANK:
        from rworker.host import serve_rank

        take_raw(job, *sizes)
        serve_rank(job, kv_memory_gb=ways.kv_bytes / 1e9, num_threads=1)
    raw = send_raw(job, *sizes)
    from fastdecode.engine.setup.workers import reach_stage_ranks
    from fastdecode.wire.mpi.roles import StageRanks

    workers = reach_stage_ranks(0, StageRanks(1), silence_s=Cluster.worker_silence_s)
    try:
        connections = workers.hub.connections
        with measuring(args, STREAM, lambda: _progress(ways)):
            ways.to_worker("mpi", connections[0], raw)
            ways.between("mpi", connections, list(workers.addresses), raw)
    finally:
        workers.close([], 5.0)


def _line(rate: LinkRate) -> str:
    share = "" if rate.share is None else f", {rate.share:.2f} of the raw rate"
    return f"{rate.link}: {rate.bytes_per_s / 1e9:.2f} GB/s{share}"
