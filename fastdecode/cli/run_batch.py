"""``fastdecode run-batch``: a file of OpenAI batch lines in, a file of answers
out; it survives being killed.

Exit codes: 0 every line was answered; 2 usage, or lines that were refused
before anything ran; 3 some lines failed, the others are done; 4 workers were
lost, and lines are left; 130 interrupted. After 4 and 130 (and after any crash)
the same command with ``--resume`` goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.cli.options import (
    EXIT_SOME_FAILED,
    EXIT_WORKERS_LOST,
    add_engine_options,
    add_exit_code_option,
    add_input_option,
    add_log_level_option,
    add_report_options,
    add_sampling_options,
    check_options,
    engine_options,
    leave_summary,
    load_engine,
    model_defaults,
    sampling_given,
    tell,
)
from fastdecode.cli.parser import add_model
from fastdecode.cli.r_worker import serve_if_r_rank
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import imports_for
from fastdecode.core.files import STANDARD, check_paths
from fastdecode.core.host.interrupts import interrupt
from fastdecode.core.progress import Bar, Progress
from fastdecode.jobs.shard import WHOLE, Shard
from fastdecode.jobs.stopping import EXIT_INTERRUPTED, Stopping, stop_signals
from fastdecode.server.options import CONTENT_FORMAT_HELP, REASONING_PARSER_HELP, TOOL_PARSER_HELP
from fastdecode.text.chat_format import AUTO, REASONING_PARSERS, TOOL_PARSERS
from fastdecode.text.chats import CONTENT_FORMATS
from fastdecode.wire.mpi import leaving
from fastdecode.wire.mpi.launcher import LAUNCH_LINE

if TYPE_CHECKING:
    from fastdecode.jobs.job import BatchJob, JobResult
    from fastdecode.jobs.opening import JobOptions

COMMAND = "fastdecode run-batch"


def add_run_batch(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "run-batch",
        help="answer a file of OpenAI batch lines; can be interrupted and resumed",
        description="Answer every line of a file, OpenAI batch lines or those of `generate`. "
        "Answers are appended as they finish. Whatever ends the job, the same command with "
        "--resume goes on where it stopped.",
    )
    parser.set_defaults(run=run_run_batch)
    add_model(parser)
    _add_files(parser)
    _add_job(parser)
    add_engine_options(parser)
    add_sampling_options(parser, has_chats=True)
    add_exit_code_option(parser)
    add_log_level_option(parser)


def _add_files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files")
    add_input_option(group)
    group.add_argument(
        "--output", "-o", required=True, type=Path, metavar="FILE", help="answers, JSON Lines"
    )
    add_report_options(group)
    group.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="use this template, not the model's own"
    )
    for flag, choices, text in (
        ("--chat-template-content-format", CONTENT_FORMATS, CONTENT_FORMAT_HELP),
        ("--tool-parser", TOOL_PARSERS, TOOL_PARSER_HELP),
        ("--reasoning-parser", REASONING_PARSERS, REASONING_PARSER_HELP),
    ):
        group.add_argument(flag, choices=choices, default=AUTO, help=f"{text} (default: auto)")


def _add_job(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("job")
    begin = group.add_mutually_exclusive_group()
    begin.add_argument(
        "--resume", action="store_true", help="go on with the run that began the output, if any"
    )
    begin.add_argument("--overwrite", action="store_true", help="throw an existing output away")
    group.add_argument(
        "--retry-errors", action="store_true", help="with --resume: also run again what had failed"
    )
    group.add_argument(
        "--on-error", choices=("refuse", "skip"), default="refuse",
        help="bad lines in the input: refuse to start and list them, or answer each with an error "
        "(default: refuse)",
    )  # fmt: skip
    group.add_argument(
        "--shard", default=str(WHOLE), metavar="I/N",
        help="answer lines I, I+N, ... of the file only: for N jobs, whose outputs "
        "`fastdecode merge` joins",
    )  # fmt: skip
    group.add_argument(
        "--served-model-name", action="append", default=[], metavar="NAME",
        help='what a line\'s "model" may say; repeatable '
        "(default: DIR as given, and its last part)",
    )  # fmt: skip
    group.add_argument(
        "--run-seed", type=int, metavar="N",
        help="from it and its id comes a line's seed (default: drawn, and kept)",
    )  # fmt: skip
    group.add_argument(
        "--sync-lines", type=int, default=100, metavar="N",
        help="fsync every N answers (default: 100)",
    )  # fmt: skip
    group.add_argument(
        "--sync-s", type=float, default=5.0, metavar="S", help="and every S seconds (default: 5)"
    )
    group.add_argument(
        "--grace-s", type=float, default=60.0, metavar="S",
        help="when interrupted, give the lines that run so long to finish (default: 60)",
    )  # fmt: skip


@stop_signals(interrupt)  # until the job looks for them between steps
def run_run_batch(args: argparse.Namespace) -> int:
    """Run or resume one job. Returns the exit code."""
    check_options(args)
    serve_if_r_rank(args, engine_options(args))
    with imports_for(f"{COMMAND} (an S-worker)"):
        load_engine(args)
        from fastdecode.cli.job_run import run_job
        from fastdecode.jobs.opening import open_job
        from fastdecode.measure.summary import render
    check_paths(
        args.input, output=args.output, summary=args.summary, trace=args.trace, status=args.status
    )
    config = EngineConfig.of(args.model, **engine_options(args))
    with Bar(sys.stderr, "checking") as bar:
        opened = open_job(_job_options(args), config, tell, bar.update)
    with opened as job:
        if job.num_pending == 0:
            tell(f"{COMMAND}: nothing is left to do")
            return _report(job, job.result(), args)
        leaving.before_leaving_stuck(lambda _: tell(f"to go on: {resume_command(args.argv)}"))
        result, summary = run_job(
            job, args, Stopping(args.grace_s), Progress(sys.stderr), session=job.session
        )
    code = leave_summary(COMMAND, args.summary, summary)
    tell(render(summary))
    return _report(job, result, args) or code


def _job_options(args: argparse.Namespace) -> JobOptions:
    from fastdecode.jobs.opening import JobOptions

    return JobOptions(
        input=args.input,
        output=args.output,
        sampling=sampling_given(args),
        model_defaults=model_defaults(args),
        begin="resume" if args.resume else "overwrite" if args.overwrite else "new",
        retry_errors=args.retry_errors,
        skip_bad_lines=args.on_error == "skip",
        served_model_names=tuple(args.served_model_name),
        chat_template=args.chat_template,
        content_format=args.chat_template_content_format,
        tool_parser=args.tool_parser,
        reasoning_parser=args.reasoning_parser,
        run_seed=args.run_seed,
        sync_lines=args.sync_lines,
        sync_s=args.sync_s,
        shard=Shard.of(args.shard),
    )


def _report(job: BatchJob, result: JobResult, args: argparse.Namespace) -> int:
    """Say how it went and, if lines are left, how to go on. Returns the exit code."""
    failed = f", {result.num_failed} of them with an error" if result.num_failed else ""
    tell(
        f"{COMMAND}: {result.num_done} of {result.num_lines} lines are answered in "
        f"{args.output}{failed}"
    )
    if result.lost is not None:
        tell(f"{COMMAND}: workers were lost: {result.lost}")
    if result.num_done < result.num_lines:
        same = ", with the same lines on standard input" if args.input == STANDARD else ""
        tell(f"to go on{same}: {resume_command(args.argv)}")
    else:
        _advise(result, args)
    if result.interrupted:
        return EXIT_INTERRUPTED
    if result.lost is not None:
        return EXIT_WORKERS_LOST
    return EXIT_SOME_FAILED if result.num_failed else 0


def _advise(result: JobResult, args: argparse.Namespace) -> None:
    """What to do about lines that failed, once all are answered."""
    if result.num_run and result.num_run_failed == result.num_run:
        tell(f"{COMMAND}: first error: {result.first_error}")
    if result.num_bad:
        tell(
            f"{result.num_bad} line(s) of {args.input} are bad and fail in every run: correct "
            "them in a file of their own, and run that with another --output"
        )
    if result.num_failed > result.num_bad:
        others = "the other failed lines" if result.num_bad else "the failed lines"
        tell(f"to run {others} again: {resume_command(args.argv)} --retry-errors")


def resume_command(argv: list[str], environ: Mapping[str, str] = os.environ) -> str:
    """The command line that goes on with a job that was started with these arguments,
    or by ``fastdecode launch``, which has added to them."""
    typed: list[str] = json.loads(environ.get(LAUNCH_LINE, "null")) or argv
    kept = [word for word in typed if word not in ("--overwrite", "--resume", "--retry-errors")]
    return shlex.join(["fastdecode", *kept, "--resume"])
