"""The ``fastdecode`` command. It imports only the module of the command that runs.

Exit codes: 0 done; 1 an unexpected failure; 2 usage, options or model directory; 3 some requests
failed, the others are done; 4 workers were lost; 5 a server's HTTP process was; 130 interrupted.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from fastdecode import __version__
from fastdecode.cli.options import add_log_level_option, as_typed, tell
from fastdecode.cli.parser import Parser, is_said_by_other_rank
from fastdecode.core.errors import CapacityError, ConfigError, FastDecodeError, RequestError
from fastdecode.core.files import open_output, write_whole
from fastdecode.core.os_errors import explained
from fastdecode.jobs.stopping import EXIT_INTERRUPTED
from fastdecode.wire.mpi import job as mpi_job
from fastdecode.wire.ranks import launched_size, stop_on_request

_NEW_OBJECTS: Final = 10_000  # between two garbage collections


class Command(NamedTuple):
    """One command. Its module's function ``add_<name>`` adds its options to a parser."""

    module: str
    help: str
    log_level: str | None = "warning"
    """Default of its ``--log-level``. None if each of its own subcommands has one."""


COMMANDS: Final[Mapping[str, Command]] = MappingProxyType({
    "generate": Command("jobs", "complete every prompt of a JSON Lines file"),
    "run-batch": Command(
        "jobs", "answer a file of OpenAI batch lines; can be interrupted and resumed"
    ),
    "merge": Command("jobs", "join the answers of a job's shards, in the order of the input"),
    "serve": Command("serve", "answer OpenAI's API over HTTP"),
    "bench-serve": Command("bench", "measure a server of OpenAI's API under a load"),
    "size": Command("size", "plan: which batch and how many CPU sockets keep a GPU busy"),
    "plan": Command("plan", "plan: machines for prompts and for tokens, and whether it pays", None),
    "calibrate": Command(
        "calibrate", "measure this machine, to plan with `fastdecode size`", None
    ),
    "bench": Command(
        "bench", "run a plan, or its scaled-down twin here: predicted against measured"
    ),
    "simulate": Command("simulate", "compare schedules on a trace, without hardware"),
    "r-worker": Command("workers", "serve as an R-worker, in an MPI job or at an address"),
    "instance": Command(
        "workers", "run one engine as an instance: it prefills or decodes for another process"
    ),
    "launch": Command(
        "launch", "run generate, run-batch, serve, doctor or calibrate over MPI on a list of hosts"
    ),
    "top": Command("top", "watch a running command or server", "error"),
    "plot": Command("top", "draw a run from its trace", "error"),
    "cache": Command(
        "cache",
        "show, verify or clear the conversations or KV blocks that are kept in a directory",
        "error",
    ),
    "doctor": Command(
        "doctor",
        "check MPI, versions, cores, memory and network of this host and its R-workers",
        "error",
    ),
})  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Return the exit code. In an MPI job, leave the job with it instead."""
    _keep_standard_files()
    _collect_seldom()
    stop_on_request()
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["help"]:  # as other programs have it
        argv = [*argv[1:2], "--help"]
    try:
        args = _parse(argv)
    except SystemExit as stopped:  # after an error, or help
        if launched_size() is not None and mpi_job.joined_at_last(wanted=True):
            mpi_job.leave(stopped.code if isinstance(stopped.code, int) else 2)
        raise
    if getattr(args, "exit_code_file", None) is not None:
        mpi_job.before_ending(partial(_note, path=args.exit_code_file))
    code = _run(args, argv)
    if getattr(args, "exit_code_file", None) is not None:  # launch takes its command's
        _note(code, args.exit_code_file)
    if launched_size() is not None and mpi_job.joined_at_last(wanted=code != 0):
        # The launcher ends ranks that hang, or it would wait for them.
        mpi_job.leave(code, hung=getattr(args, "has_hung_workers", False))
    return code


def _keep_standard_files() -> None:
    """Open stdin, stdout and stderr if they are closed (``2>&-``).

    Otherwise the next file to be opened gets what libraries write there.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)  # or our children's would be closed
    os.close(fd)
    for name, mode in (("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (as long as the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for what the terminal can't show


def _collect_seldom() -> None:
    """Collect garbage seldom, and not at the end.

    Modules and compilers make a million objects, hardly any of them garbage.
    """
    gc.set_threshold(_NEW_OBJECTS)
    atexit.unregister(gc.freeze)  # of an earlier command of this process
    atexit.register(gc.freeze)


def _note(code: int, path: Path) -> None:
    """Write the exit code where a launcher can't change it."""
    try:
        fd = open_output(path, "exit code")
        try:
            write_whole(fd, f"{code}\n".encode())
        finally:
            os.close(fd)
    except (OSError, ConfigError) as error:
        why = explained(error) if isinstance(error, OSError) else error
        tell(f"--exit-code-file {path}: {why}")


def _run(args: argparse.Namespace, argv: list[str]) -> int:
    args.started_s, args.argv = time.perf_counter(), argv
    logging.basicConfig(
        level=args.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except FastDecodeError as error:
        is_everywhere = isinstance(error, ConfigError) and error.is_of_command_line
        if not (is_everywhere and is_said_by_other_rank()):
            tell(f"fastdecode {args.command}: {as_typed(error, args.flags)}")
        # The command has done nothing: 3 is for a request among others.
        return 2 if isinstance(error, (RequestError, CapacityError)) else error.exit_code
    except KeyboardInterrupt:
        tell(f"fastdecode {args.command}: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has closed it.
        sys.stderr.close()
        return 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    args = _parser(argv).parse_args(argv)
    args.parse = _parse
    return args


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the options of the command that ``argv`` names, and the names of the
    others."""
    parser = Parser(
        prog="fastdecode",
        description=(
            "Decode large batches on few GPUs: weights on S-workers, KV cache and attention on "
            "R-workers."
        ),
    )
    parser.add_argument(
        "--version", action="version", version=f"fastdecode {__version__}", help="show the version",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.help)
        if name == asked:
            module = import_module(f"fastdecode.cli.{command.module}")
            getattr(module, "add_" + name.replace("-", "_"))(added)
            if command.log_level is not None:
                add_log_level_option(added, command.log_level)
    return parser


if __name__ == "__main__":
    sys.exit(main())
