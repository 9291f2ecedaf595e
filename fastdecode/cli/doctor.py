"""``fastdecode doctor``: check whether this host, and R-workers, are fit to run a job."""

from __future__ import annotations

import argparse
import contextlib
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
from typing import Any, Final, TypeVar

from msgspec import Struct, structs

from fastdecode.cli.launch import find_mpirun, vendor_of_mpirun
from fastdecode.cli.options import (
    EXIT_NO,
    add_exit_code_option,
    add_options,
    as_typed,
    read_options,
)
from fastdecode.conversations.store import FILE, inspect
from fastdecode.core.config.groups import Cluster
from fastdecode.core.config.options import option, switch
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, FastDecodeError, MissingExtraError, pip_command
from fastdecode.core.holders import HolderId
from fastdecode.core.host.cpus import cpu_quota
from fastdecode.core.host.facts import HostFacts, lacks_for_triton, this_host
from fastdecode.measure.doctor import (
    Finding,
    ModelFacts,
    WorkerFacts,
    examine_all,
    fail,
    judge,
    ok,
    warn,
)
from fastdecode.measure.link import NeighbourFacts, RConnection, examine_neighbours
from fastdecode.wire.mpi.job import join
from fastdecode.wire.ranks import S_RANK, StageRanks, launched_size

T = TypeVar("T")
_LEVELS = ("PASS", "WARN", "FAIL")
_LITTLE_DISK_GB = 0.5
_REACH_TIMEOUT_S: Final = 6.0  # after 5, ZeroMQ reports a peer that connects and does not answer
_TCP_INTERFACE = "OMPI_MCA_btl_tcp_if_include"  # Open MPI's variable for its network


@dataclass(frozen=True)
class DoctorOptions:
    model: str | None = option(None, "model of the job: R-workers must serve it", metavar="DIR")
    compile: bool = switch("compile what --model runs on this CPU, before the first start")
    r_worker_addresses: tuple[str, ...] = option(
        (), "R-worker at tcp://HOST:PORT; repeatable", flag="--r-worker", metavar="ADDRESS"
    )
    key: str | None = option(None, "the cluster's key, for R-workers elsewhere", metavar="FILE")
    conversations: Path | None = option(
        None, "directory of conversations: check its room, and their integrity", metavar="DIR"
    )
    cache_disk: Path | None = option(
        None, "directory for KV blocks of R-workers here: measure its disk", metavar="DIR"
    )
    features: bool = switch("print which features work together, and nothing else")
    json: bool = switch("print the findings and the facts behind them as JSON")


@dataclass(frozen=True)
class RankOptions:
    """Options of every rank of an MPI job but the first."""

    kv_memory_gb: float | None = option(None, "KV cache; default: its share", unit="GB")
    r_threads: int | None = option(None, "CPU threads; default: its share")


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check everything that a job needs. Alone: this host. In an MPI job: all of "
        "it. With --r-worker: those R-workers; they serve jobs afterwards."
    )
    parser.set_defaults(run=run_doctor)
    add_options(parser, DoctorOptions)
    ranks = "in an MPI job, for every rank but the first"
    add_options(parser, RankOptions, "R-worker ranks", ranks)
    add_exit_code_option(parser)


def run_doctor(args: argparse.Namespace) -> int:
    options = read_options(args, DoctorOptions)
    if options.features:
        from fastdecode.core.config.features import refusals_as_text

        print(refusals_as_text())
        return 0
    findings: list[Finding] = []
    hosts: list[HostFacts] = []
    workers: list[WorkerFacts] = []
    neighbours: list[NeighbourFacts] = []
    for found in _examine(options, args, hosts, workers, neighbours):
        findings.append(found)
        if not options.json:
            print(f"{found.level}  {found.check}: {found.text}", flush=True)
            if found.mend:
                print(f"      -> {found.mend}", flush=True)
    if options.json:
        facts = {"s_worker": hosts[0], "r_workers": workers, "neighbours": neighbours}
        print(json.dumps({"findings": findings, **facts}, indent=2, default=_fields))
    else:
        counts = [(sum(x.level == level for x in findings), level) for level in _LEVELS]
        print(", ".join(f"{count} {level}" for count, level in counts))
    return EXIT_NO if any(x.level == "FAIL" for x in findings) else 0


def _examine(
    options: DoctorOptions,
    args: argparse.Namespace,
    hosts: list[HostFacts],
    workers: list[WorkerFacts],
    neighbours: list[NeighbourFacts],
) -> Iterator[Finding]:
    """Yield each finding once it is known. Fill ``hosts`` (this one), ``workers``, ``neighbours``.

    In the ranks of an MPI job but the first, serve as an R-worker and do not return.
    """
    rank = read_options(args, RankOptions)
    model = None if options.model is None else ModelFacts.read(options.model)
    if options.compile:
        yield _compiled(options.model)
    with contextlib.ExitStack() as opened:
        asked: Sequence[tuple[RConnection | WorkerFacts, str]] = ()
        try:
            if launched_size() is not None and not options.r_worker_addresses:
                job = join()
                if job.rank != S_RANK:
                    from rworker.host import serve_rank

                    serve_rank(job, kv_memory_gb=rank.kv_memory_gb, num_threads=rank.r_threads)
            asked = _reach_all(options, opened, workers)
        except MissingExtraError as error:
            yield fail("transport", error.message, pip_command(error.extra))
        except FastDecodeError as error:
            yield fail("transport", as_typed(error, args.flags))
        hosts.append(here := this_host())  # once MPI's library is loaded
        yield _launcher()
        examined = _noting(examine_all([one for one, _ in asked]), workers)
        ways = _noting(_ways(asked, workers), neighbours)
        yield from judge(here, examined, model, lacks_for_triton(), ways, os.environ, cpu_quota())
        places = {one.peer: place for place, (one, _) in enumerate(asked)}
    workers.sort(key=lambda facts: places[facts.peer])
    yield _interfaces(here, len({x.report.host.host for x in workers if x.report is not None}))
    if options.conversations is not None:
        yield _conversations(options.conversations)
    if options.cache_disk is not None:
        yield _cache_disk(options.cache_disk)


def _fields(value: Any) -> dict[str, Any]:
    return structs.asdict(value) if isinstance(value, Struct) else asdict(value)


def _noting(facts: Iterable[T], noted: list[T]) -> Iterator[T]:
    for fact in facts:
        noted.append(fact)
        yield fact


def _conversations(directory: Path) -> Finding:
    """Check that there is room for conversations, and that kept ones are whole."""
    check, path = "conversations", directory / FILE
    try:
        free_gb = shutil.disk_usage(directory).free / 1e9
        found = inspect(path) if path.exists() else None
    except (OSError, ConfigError) as error:
        mend = "make the directory, or name another one (--conversations)"
        return fail(check, f"{directory}: {getattr(error, 'strerror', None) or error}", mend)
    if found is not None and found.damage:
        mend = "restore it from a copy, or clear it (fastdecode cache --clear)"
        return fail(check, f"{path} is damaged: {found.damage}", mend)
    kept = "none yet" if found is None else f"{found.conversations} in {found.num_bytes} bytes"
    if found is not None and found.is_held:
        kept = "not verified, since a process uses them"
    text = f"{directory}: {kept}; {free_gb:.1f} GB of disk free"
    if free_gb < _LITTLE_DISK_GB:
        return warn(check, text, "make room: turns that can't be kept fail")
    return ok(check, text)


def _compiled(directory: str | None) -> Finding:
    """Compile the kernels that an engine with default options compiles at its start."""
    if directory is None:
        raise ConfigError("--compile needs --model DIR, whose shapes kernels are compiled for")
    from fastdecode.core.model.checkpoint import open_checkpoint
    from rworker.attention import AttentionExecutor
    from rworker.instructions import Prepare
    from rworker.stream.chunks import layout_of

    spec = open_checkpoint(directory).spec()
    dtype, began_s = spec.choose_dtype("auto"), time.monotonic()
    activations = dtype
    if importlib.util.find_spec("torch") is not None:  # the loops of an S-worker on a CPU
        import torch

        from fastdecode.engine.setup.resolve import computed_in
        from sworker.kernels import narrow, row_loops

        activations = computed_in(dtype, torch.device("cpu"))
        if activations is not DType.FLOAT16:
            row_loops.compiled(is_wide=activations is DType.FLOAT32)
        if activations is not dtype and narrow.is_possible():
            from sworker.kernels import narrow_loops

            narrow_loops.compiled(is_half=dtype is DType.FLOAT16)
    layout = layout_of(spec.kv_spec(dtype))
    prepare = Prepare(HolderId(0), layout, 1, tuple(spec.attention), activations)
    AttentionExecutor(num_threads=2).prepare(prepare)
    return ok("kernels", f"compiled for {dtype.value} in {time.monotonic() - began_s:.0f} s")


def _cache_disk(directory: Path) -> Finding:
    """Check that KV blocks can be kept there, and measure how fast they return."""
    from rworker.tiers.inspection import inspect_blocks, measure_disk

    check = "cache disk"
    if not directory.exists() and directory.parent.is_dir():
        mend = "make it, if the path is right; generate and serve do, too"
        return warn(check, f"{directory}: there is no such directory", mend)
    try:
        speed = measure_disk(directory)
        free_gb = shutil.disk_usage(directory).free / 1e9
        files = inspect_blocks(directory, verify=False)
    except (OSError, ConfigError) as error:
        mend = "name a directory of your own on a disk with room (--cache-disk)"
        return fail(check, f"{directory}: {getattr(error, 'strerror', None) or error}", mend)
    text = (
        f"{directory}: written at {speed.write_gb_s:.2f} GB/s, read at {speed.read_gb_s:.2f}; "
        f"{len(files)} files of KV blocks, {free_gb:.1f} GB free"
    )
    if damaged := [file.path for file in files if file.damage]:
        mend = "an R-worker will refuse it: remove the file"
        return warn(check, f"{text}; {damaged[0]} is damaged", mend)
    if not speed.is_direct:
        mend = "choose another file system: memory of the host is used, and measured, instead"
        return warn(check, f"{text}; there are no direct reads", mend)
    return ok(check, text)


def _reach_all(
    options: DoctorOptions, opened: contextlib.ExitStack, examined: Sequence[WorkerFacts]
) -> Sequence[tuple[RConnection | WorkerFacts, str]]:
    """Connect to every R-worker, given or in this MPI job, until ``opened`` closes. Return its
    connection, or its error, and its address for the others."""
    addresses = options.r_worker_addresses
    if not addresses and launched_size() is None:
        return ()
    from fastdecode.engine.setup.workers import reach_addresses, reach_stage_ranks

    if not addresses:
        workers = reach_stage_ranks(0, StageRanks(1))
        connections = workers.hub.connections

        def close() -> None:
            wrong = {facts.peer for facts in examined if facts.error}
            workers.close([i for i, one in enumerate(connections) if one.peer in wrong], 5.0)

        opened.callback(close)
        return list(zip(connections, workers.addresses, strict=True))
    Cluster(r_worker_addresses=addresses, key=options.key)
    workers = reach_addresses(
        addresses,
        key_file=options.key,
        silence_s=Cluster.worker_silence_s,
        min_workers=0,
        reach_timeout_s=_REACH_TIMEOUT_S,
        retries=False,
    )
    # Without a Shutdown: they wait for their job.
    opened.callback(workers.close, range(len(addresses)), 5.0)
    found: list[RConnection | WorkerFacts] = list(workers.hub.connections)
    for i, error in workers.absent.items():
        found[i] = WorkerFacts(f"R-worker {addresses[i]}", error=error.message, code=error.code)
    return list(zip(found, addresses, strict=True))


def _ways(
    asked: Sequence[tuple[RConnection | WorkerFacts, str]], examined: Sequence[WorkerFacts]
) -> Iterator[NeighbourFacts]:
    """Measure the links between the R-workers that passed so far."""
    reports = {facts.peer: facts.report for facts in examined if facts.report and not facts.error}
    ring = [
        (one, address, reports[one.peer].kv_bytes)
        for one, address in asked
        if one.peer in reports and not isinstance(one, WorkerFacts)
    ]
    yield from examine_neighbours(ring)


def _launcher() -> Finding:
    """Check that mpirun belongs to the MPI library that mpi4py loads."""
    # In another process: loading MPI changes a process, and may end it.
    script = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
        "print(MPI.Get_library_version())"
    )
    command, library, mpirun = [sys.executable, "-c", script], "", ""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ConfigError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        library = done.stdout.split("\n")[0].split(",")[0].strip("\0 ")
        mpirun = find_mpirun()
    if not mpirun:
        missing = "mpirun" if library else "mpi4py with an MPI library"
        text = f"there is no {missing} here: only threads and ZeroMQ can be used"
        return warn("mpi", text, f"for jobs over MPI: {pip_command('mpi')}")
    try:
        vendor = vendor_of_mpirun(mpirun)
    except ConfigError as error:
        return warn("mpi", f"{mpirun}: {error}", "use the launcher of the MPI library")
    if vendor.lower() not in library.lower():
        mend = "use that library's mpirun, or install mpi4py for this launcher's MPI"
        return fail("mpi", f"{mpirun} is {vendor}'s, but mpi4py loads {library}", mend)
    return ok("mpi", f"{library}, and {mpirun} belongs to it")


def _interfaces(here: HostFacts, num_hosts: int) -> Finding:
    outward = [x for x in here.interfaces if not x.endswith(" 127.0.0.1")]
    chosen = os.environ.get(_TCP_INTERFACE, "")
    text = f"this host has {', '.join(outward) or 'only loopback'}"
    text += f"; MPI is to use {chosen}" if chosen else ""
    if num_hosts > 1 and len(outward) > 1 and not chosen and launched_size() is not None:
        mend = "--mca btl_tcp_if_include NET, or fastdecode launch --interface NET"
        return warn("interface", f"{text}; MPI may choose any", mend)
    return ok("interface", text)
