"""``fastdecode doctor``: is this host, and are these R-workers, fit to run a
job?

Exit codes: 0 nothing is wrong (there may be warnings); 1 something is; 2 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fastdecode.cli.options import add_exit_code_option, add_log_level_option
from fastdecode.core.config.groups import Cluster
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, FastDecodeError, MissingExtraError
from fastdecode.core.install import pip_command
from fastdecode.wire.mpi import job as mpi_job
from fastdecode.wire.mpi import joining, launcher

if TYPE_CHECKING:
    from fastdecode.measure.doctor import Finding, WorkerFacts
    from fastdecode.measure.links.neighbours import NeighbourFacts
    from fastdecode.wire.measure import RConnection

EXIT_FAILED = 1
T = TypeVar("T")
_LITTLE_DISK_GB = 0.5
_REACH_TIMEOUT_S: Final = 5.0
# How Open MPI is told in the environment which network to use.
_TCP_INTERFACE = "OMPI_MCA_btl_tcp_if_include"


def add_doctor(commands: Any) -> None:
    """Add the subcommand to the parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check MPI, versions, cores, memory and network of this host and its R-workers",
        description="Check everything that a job needs. Alone: this host. In an MPI job: all of "
        "it. With --r-worker: those R-workers; they serve jobs afterwards.",
    )
    parser.set_defaults(run=run_doctor)
    parser.add_argument(
        "--model", metavar="DIR", help="the model to be run: R-workers must serve it"
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile what --model runs on this CPU, so that the first start need not",
    )
    parser.add_argument(
        "--r-worker", dest="r_worker_addresses", action="append", default=[], metavar="ADDRESS",
        help="an R-worker's address, tcp://HOST:PORT; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--key", metavar="FILE", help="the cluster's key, for R-workers on other hosts"
    )
    parser.add_argument(
        "--conversations", type=Path, metavar="DIR",
        help="where conversations are to be kept: whether they can be, and are whole",
    )  # fmt: skip
    parser.add_argument(
        "--cache-disk", type=Path, metavar="DIR",
        help="where R-workers here are to keep KV blocks: how quick its disk is",
    )  # fmt: skip
    parser.add_argument(
        "--features", action="store_true",
        help="print which features work together, and nothing else",
    )  # fmt: skip
    ranks = parser.add_argument_group(
        "R-worker ranks", "in an MPI job: of every rank but the first"
    )
    ranks.add_argument(
        "--kv-memory-gb", type=float, metavar="GB", help="KV cache; default: its share"
    )
    ranks.add_argument("--r-threads", type=int, metavar="N", help="CPU threads; default: its share")
    parser.add_argument(
        "--json", action="store_true", help="print the findings and the facts behind them as JSON"
    )
    add_log_level_option(parser, default="error")
    add_exit_code_option(parser)


def run_doctor(args: argparse.Namespace) -> int:
    """Ask, judge, print. Returns the exit code."""
    if args.features:
        from fastdecode.core.config.features import refusals_as_text

        print(refusals_as_text())
        return 0
    from fastdecode.core.host.cpus import cpu_quota
    from fastdecode.core.host.facts import lacks_for_triton, this_host
    from fastdecode.measure.doctor import Finding, ModelFacts, examine_all, judge

    findings, here = _Findings(is_quiet=args.json), this_host()
    workers: list[WorkerFacts] = []
    neighbours: list[NeighbourFacts] = []
    model = None if args.model is None else ModelFacts.read(args.model)
    if args.compile:
        findings.add(_compiled(args.model))
    with contextlib.ExitStack() as opened:
        reached = _Reached()
        try:
            _serve_if_r_rank(args)
            reached = _reach_all(args, opened, workers)
        except MissingExtraError as error:
            findings.add(Finding("FAIL", "transport", error.message, pip_command(error.extra)))
        except FastDecodeError as error:
            findings.add(Finding("FAIL", "transport", error.message))
        findings.add(*_launcher())
        examined = _noting(examine_all(reached.asked), workers)
        ways = _noting(_ways(reached, workers), neighbours)
        lacks = lacks_for_triton()
        for finding in judge(here, examined, model, lacks, ways, os.environ, cpu_quota()):
            findings.add(finding)
        places = {one.peer: place for place, one in enumerate(reached.asked)}
    workers.sort(key=lambda facts: places[facts.peer])
    findings.add(*_interfaces(len({w.report.host.host for w in workers if w.report is not None})))
    if args.conversations is not None:
        findings.add(_conversations(args.conversations))
    if args.cache_disk is not None:
        findings.add(_cache_disk(args.cache_disk))
    if args.json:
        facts = {"s_worker": here, "r_workers": workers, "neighbours": neighbours}
        print(json.dumps({"findings": findings.all, **facts}, indent=2, default=asdict))
    else:
        print(findings.counts())
    return EXIT_FAILED if any(x.level == "FAIL" for x in findings.all) else 0


class _Findings:
    """Prints each as it comes, unless ``is_quiet``."""

    def __init__(self, *, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self.all: list[Finding] = []

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            self.all.append(finding)
            if not self._is_quiet:
                print(f"{finding.level}  {finding.check}: {finding.text}", flush=True)
                if finding.mend:
                    print(f"      -> {finding.mend}", flush=True)

    def counts(self) -> str:
        """How many there are of each level, for people."""
        levels = ("PASS", "WARN", "FAIL")
        return ", ".join(f"{sum(x.level == level for x in self.all)} {level}" for level in levels)


def _noting(facts: Iterable[T], noted: list[T]) -> Iterator[T]:
    for fact in facts:
        noted.append(fact)
        yield fact


def _conversations(directory: Path) -> Finding:
    """Whether there is room for conversations, and those that are there are whole."""
    from fastdecode.conversations.store import FILE, inspect
    from fastdecode.measure.doctor import Finding

    check, path = "conversations", directory / FILE
    try:
        free_gb = shutil.disk_usage(directory).free / 1e9
        found = inspect(path) if path.exists() else None
    except (OSError, ConfigError) as error:
        mend = "make the directory, or name another one (--conversations)"
        return Finding("FAIL", check, f"{directory}: {error}", mend)
    if found is not None and found.damage:
        mend = "restore it from a copy, or clear it (fastdecode cache --clear)"
        return Finding("FAIL", check, f"{path} is damaged: {found.damage}", mend)
    told = "none yet" if found is None else f"{found.conversations} in {found.num_bytes} bytes"
    text = f"{directory}: {told}; {free_gb:.1f} GB of disk free"
    if free_gb < _LITTLE_DISK_GB:
        return Finding("WARN", check, text, "make room: turns that can't be kept fail")
    return Finding("PASS", check, text)


def _compiled(directory: str | None) -> Finding:
    """Compile the kernels that an engine with default options compiles at its start.

    Raises:
        ConfigError: If there is no model.
    """
    if directory is None:
        raise ConfigError("--compile needs --model DIR, whose shapes kernels are compiled for")
    from fastdecode.core.model.checkpoint import open_checkpoint
    from fastdecode.measure.doctor import Finding
    from rworker.attention import AttentionExecutor
    from rworker.compiling import prepared
    from rworker.stream.chunks import layout_of

    spec = open_checkpoint(directory).spec()
    dtype, began_s = spec.choose_dtype("auto"), time.monotonic()
    layout = layout_of(spec.kv_spec(dtype))
    heads = sorted({each.num_q_heads for each in spec.attention})
    activations = dtype
    if importlib.util.find_spec("torch") is not None:
        activations = _compiled_for_s_worker(dtype)
    AttentionExecutor(num_threads=2).prepare(prepared(layout, heads, activations))
    text = f"compiled for {dtype.value} in {time.monotonic() - began_s:.0f} s"
    return Finding("PASS", "kernels", text)


def _compiled_for_s_worker(dtype: DType) -> DType:
    """Compile the loops of an S-worker on a CPU. Return the dtype of its activations."""
    import torch

    from fastdecode.engine.setup.resolve import computed_in
    from sworker.kernels import narrow, row_loops

    activations = computed_in(dtype, torch.device("cpu"))
    if activations is not DType.FLOAT16:
        row_loops.compiled(is_wide=activations is DType.FLOAT32)
    if activations is not dtype and narrow.is_possible():
        from sworker.kernels import narrow_loops

        narrow_loops.compiled(is_half=dtype is DType.FLOAT16)
    return activations


def _cache_disk(directory: Path) -> Finding:
    """Whether KV blocks can be kept there, and how quickly they come back."""
    from fastdecode.measure.doctor import Finding
    from rworker.tiers.inspection import inspect_blocks, measure_disk

    check = "cache disk"
    if not directory.exists() and directory.parent.is_dir():
        mend = "make it, if the path is right; generate and serve do, too"
        return Finding("WARN", check, f"{directory}: there is no such directory", mend)
    try:
        speed = measure_disk(directory)
        free_gb = shutil.disk_usage(directory).free / 1e9
        files = inspect_blocks(directory, verify=False)
    except (OSError, ConfigError) as error:
        mend = "name a directory of your own on a disk with room (--cache-disk)"
        return Finding("FAIL", check, f"{directory}: {error}", mend)
    text = (
        f"{directory}: written at {speed.write_gb_s:.2f} GB/s, read at {speed.read_gb_s:.2f}; "
        f"{len(files)} files of KV blocks, {free_gb:.1f} GB free"
    )
    damaged = [file.path for file in files if file.damage]
    if damaged:
        return Finding(
            "WARN",
            check,
            f"{text}; {damaged[0]} is damaged",
            "an R-worker will refuse it: remove the file",
        )
    if not speed.is_direct:
        mend = "choose another file system: memory of the host is used, and measured, instead"
        return Finding("WARN", check, f"{text}; there are no direct reads", mend)
    return Finding("PASS", check, text)


def _serve_if_r_rank(args: argparse.Namespace) -> None:
    """In an MPI job every rank but the first is an R-worker, and doesn't return."""
    if launcher.launched_size() is None or args.r_worker_addresses:
        return
    job = joining.join()
    if job.rank != mpi_job.S_RANK:
        from rworker.host import serve_rank

        serve_rank(job, kv_memory_gb=args.kv_memory_gb, num_threads=args.r_threads)


@dataclass(frozen=True)
class _Reached:
    """R-workers that can be asked; in place of each that can't, why."""

    asked: Sequence[RConnection | WorkerFacts] = ()
    addresses: Sequence[str] = ()
    """What R-workers call each other."""


def _reach_all(
    args: argparse.Namespace, opened: contextlib.ExitStack, found: Sequence[WorkerFacts]
) -> _Reached:
    """Every R-worker there is, at the addresses given or in this MPI job.

    Args:
        opened: closes the connections.
        found: what is known of them by then.
    """
    if args.r_worker_addresses:
        return _reach_addresses(args, opened)
    if launcher.launched_size() is None:
        return _Reached()
    from fastdecode.engine.setup.workers import reach_stage_ranks
    from fastdecode.wire.mpi.roles import StageRanks

    workers = reach_stage_ranks(0, StageRanks(1), silence_s=Cluster.worker_silence_s)
    connections = workers.hub.connections

    def close() -> None:
        wrong = {facts.peer for facts in found if facts.error}
        workers.close([i for i, one in enumerate(connections) if one.peer in wrong], 5.0)

    opened.callback(close)
    return _Reached(connections, workers.addresses)


def _reach_addresses(args: argparse.Namespace, opened: contextlib.ExitStack) -> _Reached:
    addresses = args.r_worker_addresses
    Cluster(
        r_worker_addresses=addresses,
        key=args.key,
    )
    from fastdecode.engine.setup.workers import reach_addresses
    from fastdecode.measure.doctor import WorkerFacts

    workers = reach_addresses(
        addresses,
        key_file=args.key,
        silence_s=Cluster.worker_silence_s,
        min_workers=0,
        reach_timeout_s=_REACH_TIMEOUT_S,
    )
    # Without a Shutdown: they wait for their job.
    opened.callback(workers.close, range(len(addresses)), 5.0)
    asked = [
        WorkerFacts(f"R-worker {addresses[i]}", error=workers.absent[i].message)
        if i in workers.absent
        else connection
        for i, connection in enumerate(workers.hub.connections)
    ]
    return _Reached(asked, addresses)


def _ways(reached: _Reached, found: Sequence[WorkerFacts]) -> Iterator[NeighbourFacts]:
    """The ways between those R-workers with which nothing was found wrong."""
    from fastdecode.measure.doctor import WorkerFacts
    from fastdecode.measure.links.neighbours import examine_neighbours

    reports = {facts.peer: facts.report for facts in found if not facts.error}
    well = [
        (connection, address, report.kv_bytes)
        for connection, address in zip(reached.asked, reached.addresses, strict=True)
        if not isinstance(connection, WorkerFacts)
        and (report := reports.get(connection.peer)) is not None
    ]
    names, kv_bytes = [address for _, address, _ in well], [num_bytes for _, _, num_bytes in well]
    yield from examine_neighbours([connection for connection, _, _ in well], names, kv_bytes)


def _launcher() -> list[Finding]:
    """Whether the mpirun that would be found belongs to the MPI library that mpi4py loads."""
    from fastdecode.measure.doctor import Finding
    from fastdecode.wire.mpirun_line import vendor_of

    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    library = _mpi_library()
    if library is None or mpirun is None:
        missing = "mpi4py with an MPI library" if library is None else "mpirun"
        mend = f"for jobs over MPI: {pip_command('mpi')}"
        return [
            Finding(
                "WARN",
                "mpi",
                f"there is no {missing} here: only threads and ZeroMQ can be used",
                mend,
            )
        ]
    try:
        version = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
        vendor = vendor_of(version.stdout + version.stderr)
    except (OSError, subprocess.TimeoutExpired, ConfigError) as error:
        return [Finding("WARN", "mpi", f"{mpirun}: {error}", "use the launcher of the MPI library")]
    if vendor.lower() not in library.lower():
        mend = "use that library's mpirun, or install mpi4py for this launcher's MPI"
        return [Finding("FAIL", "mpi", f"{mpirun} is {vendor}'s, but mpi4py loads {library}", mend)]
    return [Finding("PASS", "mpi", f"{library}, and {mpirun} belongs to it")]


def _mpi_library() -> str | None:
    """As another process sees it: loading MPI changes a process, and may end it."""
    script = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
        "print(MPI.Get_library_version())"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].split(",")[0].strip("\0 ") if done.returncode == 0 else None


def _interfaces(num_hosts: int) -> list[Finding]:
    from fastdecode.core.host.facts import this_host
    from fastdecode.measure.doctor import Finding

    outward = [x for x in this_host().interfaces if not x.endswith(" 127.0.0.1")]
    chosen = os.environ.get(_TCP_INTERFACE, "")
    text = f"this host has {', '.join(outward) or 'only loopback'}" + (
        f"; MPI is to use {chosen}" if chosen else ""
    )
    if num_hosts > 1 and len(outward) > 1 and not chosen and launcher.launched_size() is not None:
        mend = "--mca btl_tcp_if_include NET, or fastdecode launch --interface NET"
        return [Finding("WARN", "interface", f"{text}; MPI may choose any", mend)]
    return [Finding("PASS", "interface", text)]
