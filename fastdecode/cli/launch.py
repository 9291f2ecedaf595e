"""``fastdecode launch``: build the mpirun line for a list of hosts, show it,
and run it.

Exit codes: the S-worker's own where it can be had (on this host), else
mpirun's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdecode.cli.common import EXIT_WORKERS_LOST
from fastdecode.cli.errors import as_typed
from fastdecode.cli.options import (
    add_log_level_option,
    check_options,
    engine_flags,
    tell,
)
from fastdecode.cli.parser import refused_choice
from fastdecode.cli.vllm_words import as_here
from fastdecode.core.config.instances import PlacedInstance
from fastdecode.core.config.placement import read_placement
from fastdecode.core.config.s_part import MAX_PP, MAX_TP
from fastdecode.core.errors import ConfigError
from fastdecode.core.install import pip_command
from fastdecode.core.model.local_models import find_model
from fastdecode.core.os_errors import explained
from fastdecode.jobs.stopping import EXIT_INTERRUPTED, stop_signals
from fastdecode.wire.mpi import launcher_end
from fastdecode.wire.mpi.launcher import LAUNCH_LINE
from fastdecode.wire.mpirun_line import JobHost, JobLine, parse_hosts, vendor_of
from fastdecode.wire.placed_line import PlacedLine

COMMANDS = ("generate", "run-batch", "serve", "doctor", "calibrate")
_OF_INSTANCES = ("generate", "run-batch", "serve")
_LOCAL = ("localhost", "127.0.0.1")


def add_launch(commands: Any) -> None:
    """Add the subcommand to the parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "launch",
        help="run generate, run-batch, serve, doctor or calibrate over MPI on a list of hosts",
        description=(
            "Build the mpirun line, show it, and run it: fastdecode launch --hosts a:2,b:2 -- "
            "generate ...; or of instances: fastdecode launch --placement FILE -- generate ..."
        ),
    )
    parser.set_defaults(run=run_launch)
    _add_hosts(parser)
    parser.add_argument(
        "--mpirun", metavar="FILE",
        help="the launcher (default: beside this Python, else from PATH)",
    )  # fmt: skip
    parser.add_argument(
        "--mpirun-arg", action="append", default=[], metavar="ARG",
        help="a further word for mpirun; repeatable",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="show the line, and do nothing else")
    parser.add_argument(
        "command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help=", ".join(COMMANDS)
    )
    add_log_level_option(parser)


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hosts", metavar="A:2,B:2",
        help="hosts and their R-workers; one for each NUMA node is best (default with "
        "--placement: all on this host). Where the command needs none (--kv-placement gpu, "
        "--r-worker): hosts and their stages",
    )  # fmt: skip
    parser.add_argument(
        "--placement", type=Path, metavar="FILE",
        help="run these instances, as fastdecode plan goodput --emit FILE has written them, as one "
        "job; they take the R-workers of --hosts in order",
    )  # fmt: skip
    parser.add_argument(
        "--s-host", metavar="HOST", help="where the S-worker runs (default: the first of --hosts)"
    )
    parser.add_argument(
        "--interface", metavar="NET",
        help="MPI's network: an interface such as eth0, or 10.0.0.0/24",
    )  # fmt: skip
    parser.add_argument(
        "--r-threads", type=int, metavar="N",
        help="CPU threads of each R-worker (default: its share)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-memory-gb", type=float, metavar="GB",
        help="KV cache of each R-worker (default: its share)",
    )  # fmt: skip
    parser.add_argument(
        "--cache-disk", metavar="DIR",
        help="where each R-worker keeps a copy of KV blocks that may come again, on its own host",
    )  # fmt: skip
    parser.add_argument(
        "--cache-disk-gb", type=float, metavar="GB", help="how much of it each R-worker takes"
    )
    parser.add_argument("--no-numa", action="store_true", help="don't bind R-workers to NUMA nodes")


def run_launch(args: argparse.Namespace) -> int:
    """Show the line and run it. Returns the exit code."""
    command = args.command_line[1:] if args.command_line[:1] == ["--"] else args.command_line
    _check_command(command)
    command = as_here(command, engine_flags())
    with tempfile.TemporaryDirectory(prefix="fd") as directory:
        report = Path(directory, "exit-code")
        line = _line(args, command, report)
        whole = list(line.s_command[len(_fastdecode()) :])
        is_here = str(report) in line.s_command
        if is_here:  # the S-worker reports to us, and the user's file gets our exit code
            args.exit_code_file = getattr(args.parse(command), "exit_code_file", None)
        _check(args.parse(whole), files=is_here)
        if args.dry_run:
            print(line.shown())
            return 0
        tell(line.shown())
        # Open MPI kills the ranks when it gets SIGINT or SIGTERM; this it passes on to them.
        stop_signal = signal.SIGUSR1 if line.vendor == "Open MPI" else signal.SIGTERM
        environ = {**os.environ, LAUNCH_LINE: json.dumps(args.argv)}
        code, was_stopped = _run(line.words(), stop_signal, environ)
        truth = _truthful(code, report if is_here else None, was_stopped=was_stopped)
        if truth not in (0, EXIT_INTERRUPTED) and not (is_here and report.exists()):
            tell(_why_none_reported(code, [host.name for host in line.hosts]))
        return truth


def _check_command(command: list[str]) -> None:
    """Raises ConfigError: there is no command behind --, or none that can be launched."""
    if not command:
        raise ConfigError(f"name a command behind --: one of {', '.join(COMMANDS)}")
    if command[0] not in COMMANDS:
        raise ConfigError(refused_choice("the command", command[0], COMMANDS))


def _why_none_reported(mpirun_code: int, hosts: Sequence[str]) -> str:
    """A job ended badly, and its S-worker could not say why."""
    unknown = [host for host in hosts if not _is_resolved(host)]
    said = (
        f"fastdecode launch: mpirun ended with exit code {mpirun_code}, and the S-worker reported "
        "no exit code: see the messages above"
    )
    if unknown:
        said += (
            f". This host cannot resolve {', '.join(unknown)}: check --hosts, or name them by "
            "IP address"
        )
    return said


def _is_resolved(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _check(args: argparse.Namespace, *, files: bool) -> None:
    """Refuse a command that would end before its ranks have met.

    Args:
        files: whether it runs on this host.
    """
    if args.command in ("generate", "run-batch", "serve"):
        try:
            check_options(args)
        except ConfigError as error:
            raise ConfigError(as_typed(error, vars(args)), code=error.code) from None
        if files and args.command != "serve" and not args.input.is_file():
            raise ConfigError(f"the input {args.input} is not a file that can be read")
        if files and not find_model(args.model).is_dir():
            raise ConfigError(f"the model {args.model} is not a directory")


def _run(
    words: list[str], stop_signal: signal.Signals, environ: dict[str, str]
) -> tuple[int, bool]:
    """Run mpirun to its end. Returns its exit code, and whether it was told to stop.

    Args:
        words: its command line.
        stop_signal: what it gets when this process is told to stop. It isn't
            killed: to see the ranks off takes a while.
        environ: its environment.
    """
    started: list[subprocess.Popen[bytes]] = []
    stops: list[int] = []

    def stop(number: int, _: object) -> None:
        stops.append(number)
        for mpirun in started:
            mpirun.send_signal(stop_signal)

    # Before there is anything that they would leave behind. In a session of its
    # own: a terminal's Ctrl-C is for us, and would have mpirun kill the ranks.
    with stop_signals(stop), subprocess.Popen(words, start_new_session=True, env=environ) as mpirun:
        started.append(mpirun)
        if stops:
            mpirun.send_signal(stop_signal)
        return launcher_end.wait_for(mpirun), bool(stops)


def _truthful(mpirun_code: int, report: Path | None, *, was_stopped: bool) -> int:
    """The S-worker's word counts: mpirun may fail when an R-worker was lost,
    though every request was answered, and not fail when the S-worker died. It
    says none where it was stopped before it could."""
    code = mpirun_code if mpirun_code >= 0 else 128 - mpirun_code
    if report is None:
        return code
    try:
        return int(report.read_text())
    except (OSError, ValueError):
        if was_stopped and not 1 < code < 128:
            return EXIT_INTERRUPTED
        if code > 128:  # a signal ended the S-worker or mpirun
            return EXIT_WORKERS_LOST
        return code or 1


def _line(args: argparse.Namespace, command: list[str], report: Path) -> JobLine:
    instances = _instances(args, command)
    hosts = _hosts(args, instances)
    shape = _shape(command)
    mpirun = _mpirun(args.mpirun)
    ranks = _instance_ranks(instances)
    s_command = [*_fastdecode(), *command, *ranks]
    s_host = args.s_host or hosts[0].name
    can_tell = command[0] != "calibrate" and s_host in (*_LOCAL, socket.gethostname())
    if can_tell and not args.dry_run:
        s_command += ["--exit-code-file", str(report)]
    has_r_workers = shape.kv_placement not in ("gpu", "swap") and not shape.r_worker
    if instances:
        silence = shape.worker_silence_s
        r_command = [*_r_command(args, has_r_workers=True), *ranks]
        r_command += [] if silence is None else ["--silence-s", silence]
        return PlacedLine(
            tuple(s_command),
            tuple(r_command),
            hosts,
            vendor=vendor_of(_version(mpirun)),
            mpirun=mpirun,
            s_host=args.s_host,
            interface=args.interface,
            extra=tuple(args.mpirun_arg),
            as_root=os.geteuid() == 0,
            instances=instances,
        )
    return JobLine(
        tuple(s_command),
        _r_command(args, has_r_workers=has_r_workers),
        hosts,
        vendor=vendor_of(_version(mpirun)),
        mpirun=mpirun,
        s_host=args.s_host,
        interface=args.interface,
        extra=tuple(args.mpirun_arg),
        as_root=os.geteuid() == 0,
        num_s_ranks=_number(shape.tp, 1, MAX_TP),
        num_stages=_number(shape.pp, 1, MAX_PP),
        num_prompt_stages=_number(shape.prompt_pp, 0, MAX_PP),
        has_r_workers=has_r_workers,
    )


def _r_command(args: argparse.Namespace, *, has_r_workers: bool) -> tuple[str, ...]:
    """
    Raises:
        ConfigError: there are no R-workers for what is given of them.
    """
    command = [*_fastdecode(), "r-worker"]
    command += [] if args.no_numa else ["--numa-node", "auto"]
    for option, value in (
        ("--threads", args.r_threads),
        ("--kv-memory-gb", args.kv_memory_gb),
        ("--cache-disk", args.cache_disk),
        ("--cache-disk-gb", args.cache_disk_gb),
    ):
        if value is not None and not has_r_workers:
            given = "--r-threads" if option == "--threads" else f"{option} before --"
            raise ConfigError(
                f"{given} is of R-workers that are launched, and with --kv-placement gpu or "
                "--r-worker there are none: leave it out, or give the command its own"
            )
        command += [] if value is None else [option, str(value)]
    return tuple(command)


def _shape(command: list[str]) -> argparse.Namespace:
    """What a command says of its ranks, which generate and run-batch check."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--tp", "--pp", "--prompt-pp", "--kv-placement"):
        parser.add_argument(option, default="")
    parser.add_argument("--worker-silence-s")
    parser.add_argument("--r-worker", action="append")
    return parser.parse_known_args(command)[0]


def _instances(args: argparse.Namespace, command: list[str]) -> tuple[PlacedInstance, ...]:
    """Those of the placement; none: there is one engine."""
    if args.placement is None:
        return ()
    if command[0] not in _OF_INSTANCES:
        raise ConfigError(
            f"--placement {args.placement}: {command[0]} has no instances; "
            f"{', '.join(_OF_INSTANCES)} have"
        )
    return read_placement(args.placement, on_devices=_shape(command).kv_placement == "gpu")


def _instance_ranks(instances: tuple[PlacedInstance, ...]) -> list[str]:
    return ["--instances", ",".join(map(str, instances))] if instances else []


def _hosts(args: argparse.Namespace, instances: tuple[PlacedInstance, ...]) -> tuple[JobHost, ...]:
    if args.hosts is not None:
        return parse_hosts(args.hosts)
    if not instances:
        raise ConfigError("say on which --hosts, and how many R-workers each of them gets: A:2,B:2")
    return (JobHost("localhost", sum(each.num_places for each in instances)),)


def _number(told: str, usual: int, most: int) -> int:
    """The N of ``--tp N``, ``--pp N`` and the like."""
    return int(told) if told.isdecimal() and usual <= int(told) <= most else usual


def _mpirun(given: str | None) -> str:
    """The launcher of the MPI that mpi4py will load, as far as one can tell:
    that beside this Python."""
    beside = Path(sys.executable).with_name("mpirun")
    found = given or (str(beside) if beside.exists() else shutil.which("mpirun"))
    if found is None:
        raise ConfigError(
            f"there is no mpirun: {pip_command('mpi')} brings one, or say --mpirun FILE"
        )
    return found


def _version(mpirun: str) -> str:
    try:
        done = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except OSError as error:
        raise ConfigError(f"can't run {mpirun}: {explained(error)}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{mpirun} --version does not end: name another --mpirun") from None
    return done.stdout + done.stderr


def _fastdecode() -> list[str]:
    """How to run this program on every host: installed at the same place on all of them."""
    script = Path(sys.executable).with_name("fastdecode")
    return [str(script)] if script.exists() else [sys.executable, "-m", "fastdecode.cli.main"]
