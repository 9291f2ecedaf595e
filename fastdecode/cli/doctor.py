"""``fastdecode doctor``: is this host, and are these R-workers, fit to run a
job?

Exit codes: 0 nothing is wrong (there may be warnings); 1 something is; 2 usage.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.cli.options import add_exit_code_option, add_log_level_option
from fastdecode.core.config.groups import Cluster
from fastdecode.core.errors import ConfigError, FastDecodeError, MissingExtraError
from fastdecode.core.install import pip_command
from fastdecode.wire.mpi import job as mpi_job
from fastdecode.wire.mpi import joining, launcher

if TYPE_CHECKING:
    from fastdecode.measure.doctor import Finding, WorkerFacts

EXIT_FAILED = 1
_LITTLE_DISK_GB = 0.5
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
    ranks = parser.add_argument_group("in an MPI job, of every rank but the first")
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
    from fastdecode.core.host.facts import lacks_for_triton, this_host
    from fastdecode.measure.doctor import Finding, hash_of_model, judge

    findings: list[Finding] = []
    workers: list[WorkerFacts] = []
    try:
        _serve_if_r_rank(args)
        workers = _examine_all(args)
    except MissingExtraError as error:
        findings.append(Finding("FAIL", "transport", error.message, pip_command(error.extra)))
    except FastDecodeError as error:
        findings.append(Finding("FAIL", "transport", error.message))
    findings += _launcher()
    findings += _interfaces(len({w.report.host.host for w in workers if w.report is not None}))
    here = this_host()
    model_hash = None if args.model is None else hash_of_model(args.model)
    findings += judge(here, workers, model_hash, lacks_for_triton())
    if args.conversations is not None:
        findings.append(_conversations(args.conversations))
    if args.json:
        shown = {"findings": findings, "s_worker": here, "r_workers": workers}
        print(json.dumps(shown, indent=2, default=asdict))
    else:
        for finding in findings:
            print(f"{finding.level}  {finding.check}: {finding.text}")
            if finding.mend:
                print(f"      -> {finding.mend}")
        counts = {
            level: sum(x.level == level for x in findings) for level in ("PASS", "WARN", "FAIL")
        }
        print(", ".join(f"{count} {level}" for level, count in counts.items()))
    return EXIT_FAILED if any(x.level == "FAIL" for x in findings) else 0


def _conversations(directory: Path) -> Finding:
    """Whether there is room for conversations, and those that are there are whole."""
    from fastdecode.conversations.inspection import FILE, inspect
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
        return Finding("FAIL", check, f"{path} is damaged: {found.damage[0]}", mend)
    told = "none yet" if found is None else f"{found.conversations} in {found.num_bytes} bytes"
    text = f"{directory}: {told}; {free_gb:.1f} GB of disk free"
    if free_gb < _LITTLE_DISK_GB:
        return Finding("WARN", check, text, "make room: turns that can't be kept fail")
    return Finding("PASS", check, text)


def _serve_if_r_rank(args: argparse.Namespace) -> None:
    """In an MPI job every rank but the first is an R-worker, and doesn't return."""
    if launcher.launched_size() is None or args.r_worker_addresses:
        return
    job = joining.join()
    if job.rank != mpi_job.S_RANK:
        from rworker.host import serve_rank

        serve_rank(job, kv_memory_gb=args.kv_memory_gb, num_threads=args.r_threads)


def _examine_all(args: argparse.Namespace) -> list[WorkerFacts]:
    """Every R-worker there is: at the addresses given, or in this MPI job."""
    if args.r_worker_addresses:
        return _examine_addresses(args)
    if launcher.launched_size() is None:
        return []
    from fastdecode.engine.fleet.workers import reach_ranks
    from fastdecode.measure.doctor import examine

    workers = reach_ranks(silence_s=Cluster.worker_silence_s)
    found = [examine(connection) for connection in workers.hub.connections]
    workers.close([i for i, facts in enumerate(found) if facts.error], 5.0)
    return found


def _examine_addresses(args: argparse.Namespace) -> list[WorkerFacts]:
    Cluster(transport="zmq", r_worker_addresses=args.r_worker_addresses, key=args.key)
    from fastdecode.engine.fleet.workers import reach_addresses
    from fastdecode.measure.doctor import WorkerFacts, examine

    found = []
    for address in args.r_worker_addresses:
        try:
            workers = reach_addresses(
                [address],
                key_file=args.key,
                silence_s=Cluster.worker_silence_s,
                reach_timeout_s=5.0,
            )
        except ConfigError:
            raise
        except FastDecodeError as error:
            found.append(WorkerFacts(f"R-worker {address}", error=error.message))
            continue
        found.append(examine(workers.hub.connections[0]))
        workers.close([0], 5.0)  # without a Shutdown: it waits for its job
    return found


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
