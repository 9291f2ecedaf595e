"""``fastdecode launch``: build the mpirun line for a list of hosts, show it, and run it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fastdecode.cli.options import (
    EXIT_WORKERS_LOST,
    add_options,
    as_typed,
    check_engine_options,
    read_options,
    tell,
)
from fastdecode.core.config.groups import Cluster
from fastdecode.core.config.instances import PlacedInstance
from fastdecode.core.config.options import option, switch
from fastdecode.core.config.placement import read_placement
from fastdecode.core.errors import ConfigError, pip_command
from fastdecode.core.model.local_models import find_model
from fastdecode.core.os_errors import explained
from fastdecode.jobs.stopping import EXIT_INTERRUPTED, stop_signals
from fastdecode.wire.mpirun_line import JobHost, JobLine, Vendor, parse_hosts, vendor_of
from fastdecode.wire.ranks import LAUNCH_LINE

COMMANDS = ("generate", "run-batch", "serve", "doctor", "calibrate")
_OF_INSTANCES = ("generate", "run-batch", "serve")
_LOOK_S = 1.0
_ENDING_S = 20.0  # mpirun may take this long to end after the S-worker has reported
_TERMINATING_S = 5.0


@dataclass(frozen=True)
class LaunchOptions:
    hosts: str | None = option(
        None,
        "hosts and their R-workers; one for each NUMA node is best (default with "
        "--placement: all on this host). Where the command needs none (--kv-placement gpu, "
        "--r-worker): hosts and their stages",
        metavar="A:2,B:2",
    )
    placement: Path | None = option(
        None, "run the instances of plan goodput --emit; they take R-workers of --hosts in order"
    )
    s_host: str | None = option(
        None, "where the S-worker runs (default: the first of --hosts)", metavar="HOST"
    )
    interface: str | None = option(
        None, "MPI's network: an interface such as eth0, or 10.0.0.0/24", metavar="NET"
    )
    r_threads: int | None = option(
        None, "CPU threads of each R-worker (default: its share)", low=1, high=4096
    )
    kv_memory_gb: float | None = option(
        None, "KV cache of each R-worker (default: its share)", low=1e-6, high=1e6, unit="GB"
    )
    cache_disk: str | None = option(
        None, "where each R-worker keeps copies of KV blocks, on its own host", metavar="DIR"
    )
    cache_disk_gb: float | None = option(
        None, "how much of it each R-worker takes", low=1e-6, high=1e6, unit="GB"
    )
    no_numa: bool = switch("don't bind R-workers to NUMA nodes")
    mpirun: str | None = option(
        None, "the launcher (default: beside this Python, else from PATH)", metavar="FILE"
    )
    mpirun_arg: tuple[str, ...] = option((), "a further word for mpirun; repeatable", metavar="ARG")
    dry_run: bool = switch("show the line, and do nothing else")


def add_launch(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Build the mpirun line, show it, and run it: fastdecode launch --hosts a:2,b:2 -- "
        "generate ...; or of instances: fastdecode launch --placement FILE -- generate ..."
    )
    parser.set_defaults(run=run_launch)
    add_options(parser, LaunchOptions)
    parser.add_argument(
        "command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help=", ".join(COMMANDS)
    )


def run_launch(args: argparse.Namespace) -> int:
    options = read_options(args, LaunchOptions)
    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    if not command or command[0] not in COMMANDS:
        named = f"{command[0]} cannot be launched: " if command else ""
        raise ConfigError(f"{named}name a command behind --: one of {', '.join(COMMANDS)}")
    mpirun = find_mpirun(options.mpirun)
    hosts = None if options.hosts is None else parse_hosts(options.hosts)
    job = args.parse(command)
    instances = _instances(options, job)
    if instances:
        placed = ",".join(map(str, instances))
        command, job.instances = [*command, "--instances", placed], [placed]
    if hosts is None:
        if not instances:
            raise ConfigError("--hosts is missing: give the hosts and their R-workers: A:2,B:2")
        hosts = (JobHost("localhost", sum(each.num_places for each in instances)),)
    if job.command in _OF_INSTANCES and job.prompt_pp and not instances:
        instances, hosts = _prompts_apart(job, hosts)
    is_here = (options.s_host or hosts[0].name) in ("localhost", "127.0.0.1", socket.gethostname())
    reports = is_here and not options.dry_run and job.command != "calibrate"
    _check(job, files=reports)
    if reports:  # the S-worker reports to us, and the user's file gets our exit code
        args.exit_code_file = job.exit_code_file
    with tempfile.TemporaryDirectory(prefix="fd") as directory:
        report = Path(directory, "exit-code")
        command += ["--exit-code-file", str(report)] if reports else []
        line = _line(options, job, command, hosts, instances, mpirun)
        if options.dry_run:
            print(line.shown())
            return 0
        tell(line.shown())
        # Open MPI kills the ranks upon SIGINT or SIGTERM. This signal it forwards to them.
        stop_signal = signal.SIGUSR1 if line.vendor == "Open MPI" else signal.SIGTERM
        environ = {**os.environ, LAUNCH_LINE: json.dumps(args.argv)}
        code, was_stopped = _run(line.words(), stop_signal, environ, report)
        truth = _truthful(code, report if reports else None, was_stopped=was_stopped)
        if truth not in (0, EXIT_INTERRUPTED) and not report.exists():
            tell(
                f"fastdecode launch: mpirun ended with exit code {code}, and the S-worker reported "
                "no exit code: see the messages above, and check the names in --hosts"
            )
        return truth


def _instances(options: LaunchOptions, job: argparse.Namespace) -> tuple[PlacedInstance, ...]:
    """Return the instances of the placement. Empty if there is one engine."""
    if options.placement is None:
        return ()
    if job.command not in _OF_INSTANCES:
        why = f"{job.command} has no instances; {', '.join(_OF_INSTANCES)} have"
        raise ConfigError(f"--placement {options.placement}: {why}")
    return read_placement(options.placement, on_devices=job.kv_placement == "gpu")


def _prompts_apart(
    job: argparse.Namespace, hosts: tuple[JobHost, ...]
) -> tuple[tuple[PlacedInstance, ...], tuple[JobHost, ...]]:
    """Return the instances of ``--prompt-pp``, and the hosts with a place for each of its stages:
    on the hosts without R-workers in turn, or else on the first."""
    config = check_engine_options(job)
    prompt_pp, pp, tp = config.s_part.prompt_pp, config.s_part.pp, config.s_part.tp
    num_places = sum(host.num_r_workers for host in hosts)
    num_r_workers = 0 if config.r_part.is_on_device else prompt_pp + num_places
    placed = config.in_job(1 + tp * (prompt_pp + pp) + num_r_workers).instances.placed
    names = [host.name for host in hosts if not host.num_r_workers] or [hosts[0].name]
    of_prompts = [JobHost(names[i % len(names)], 1) for i in range(prompt_pp)]
    return placed, (*of_prompts, *(host for host in hosts if host.num_r_workers))


def _check(job: argparse.Namespace, *, files: bool) -> None:
    """Refuse a command that would end before its ranks have met. ``files`` is True if it runs on
    this host, so that its files can be checked."""
    if job.command not in _OF_INSTANCES:
        return
    try:
        check_engine_options(job)
    except ConfigError as error:
        raise ConfigError(as_typed(error, job.flags), code=error.code) from None
    if files and job.command != "serve" and not job.input.is_file():
        raise ConfigError(f"the input {job.input} is not a file that can be read")
    if files and not find_model(job.model).is_dir():
        raise ConfigError(f"the model {job.model} is not a directory")


def _line(
    options: LaunchOptions,
    job: argparse.Namespace,
    command: list[str],
    hosts: tuple[JobHost, ...],
    instances: tuple[PlacedInstance, ...],
    mpirun: str,
) -> JobLine:
    has_r_workers = bool(instances) or not (
        getattr(job, "kv_placement", "r") in ("gpu", "swap")
        or getattr(job, "r_worker_addresses", None)
        or getattr(job, "r_worker", None)
    )
    r_command = [*_fastdecode(), "r-worker", *([] if options.no_numa else ["--numa-node", "auto"])]
    for name in ("r_threads", "kv_memory_gb", "cache_disk", "cache_disk_gb"):
        flag, value = "--" + name.replace("_", "-"), getattr(options, name)
        if value is not None and not has_r_workers:
            raise ConfigError(
                f"{flag} before -- configures R-workers that launch starts, and with "
                "--kv-placement gpu or --r-worker it starts none. Remove it, or give the command "
                "its own"
            )
        r_command += [] if value is None else [flag.replace("--r-", "--"), str(value)]
    if instances:
        r_command += ["--instances", ",".join(map(str, instances))]
        if job.worker_silence_s != Cluster.worker_silence_s:
            r_command += ["--silence-s", str(job.worker_silence_s)]
    return JobLine(
        (*_fastdecode(), *command),
        tuple(r_command),
        hosts,
        vendor_of_mpirun(mpirun),
        mpirun,
        options.s_host,
        options.interface,
        options.mpirun_arg,
        as_root=os.geteuid() == 0,
        num_s_ranks=1 if instances else getattr(job, "tp", 1),
        num_stages=1 if instances else getattr(job, "pp", 1),
        has_r_workers=has_r_workers,
        instances=instances,
    )


def _run(
    words: list[str], stop_signal: signal.Signals, environ: dict[str, str], report: Path
) -> tuple[int, bool]:
    """Run mpirun to its end. Return its exit code, and True if it was asked to stop.

    It then gets ``stop_signal``, and time to end the ranks. Once the S-worker has noted its exit
    code at ``report``, it is ended if it stays.
    """
    started: list[subprocess.Popen[bytes]] = []
    stops: list[int] = []

    def stop(number: int, _: object) -> None:
        stops.append(number)
        for mpirun in started:
            mpirun.send_signal(stop_signal)

    # The handlers are set before there is anything to leave behind. mpirun has a session of its
    # own: a terminal's Ctrl-C is for this process, and would make mpirun kill the ranks.
    with stop_signals(stop), subprocess.Popen(words, start_new_session=True, env=environ) as mpirun:
        started.append(mpirun)
        if stops:
            mpirun.send_signal(stop_signal)
        for end, left_s in ((mpirun.terminate, _ENDING_S), (mpirun.kill, _TERMINATING_S)):
            while left_s > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return mpirun.wait(_LOOK_S), bool(stops)
                left_s -= _LOOK_S if report.exists() else 0.0
            end()
        return mpirun.wait(), bool(stops)


def _truthful(mpirun_code: int, report: Path | None, *, was_stopped: bool) -> int:
    """Return the exit code that the S-worker reported, or one derived from mpirun's.

    mpirun may fail when an R-worker was lost though every request was answered, and succeed when
    the S-worker died.
    """
    code = mpirun_code if mpirun_code >= 0 else 128 - mpirun_code
    if report is None:  # other codes than ours are a signal's, or of a launcher that failed
        return code if code in (*range(6), EXIT_INTERRUPTED) else EXIT_WORKERS_LOST
    try:
        return int(report.read_text())
    except (OSError, ValueError):
        if was_stopped and not 1 < code < 128:
            return EXIT_INTERRUPTED
        # A signal ended the S-worker, or mpirun, which then returns 1.
        return code if 1 < code <= 128 else EXIT_WORKERS_LOST


def find_mpirun(given: str | None = None) -> str:
    """Return this Python's mpirun, likely that of mpi4py. Raises ConfigError: If there is none."""
    beside = Path(sys.executable).with_name("mpirun")
    found = given or (str(beside) if beside.exists() else shutil.which("mpirun"))
    if found is None:
        remedy = f"{pip_command('mpi')} installs one. Or give --mpirun FILE"
        raise ConfigError(f"there is no mpirun: {remedy}")
    return found


def vendor_of_mpirun(mpirun: str) -> Vendor:
    """Run a launcher, and return its vendor. Raises ConfigError: If that fails or is unknown."""
    command = [mpirun, "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        raise ConfigError(f"can't run {mpirun}: {explained(error)}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{mpirun} --version does not end: name another --mpirun") from None
    return vendor_of(done.stdout + done.stderr)


def _fastdecode() -> list[str]:
    """Return the command that runs this program on every host, at the same place on all."""
    script = Path(sys.executable).with_name("fastdecode")
    return [str(script)] if script.exists() else [sys.executable, "-m", "fastdecode.cli.main"]
