"""``fastdecode generate``: every prompt of a JSON Lines file, in the file's order."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.cli.options import (
    EXIT_SOME_FAILED,
    EXIT_WORKERS_LOST,
    add_engine_options,
    add_exit_code_option,
    add_input_option,
    add_log_level_option,
    add_options,
    add_report_options,
    add_sampling_options,
    check_options,
    engine_options,
    given,
    leave_summary,
    load_engine,
    model_defaults,
    sampling_given,
    tell,
)
from fastdecode.cli.parser import add_model
from fastdecode.cli.r_worker import serve_if_r_rank
from fastdecode.conversations.conversations import Keeping
from fastdecode.conversations.turns import why_no_reuse
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, imports_for
from fastdecode.core.files import STANDARD, check_paths
from fastdecode.core.host.interrupts import interrupt
from fastdecode.core.model.checkpoint import check_model
from fastdecode.core.model.local_models import find_model
from fastdecode.core.progress import Bar, Progress
from fastdecode.jobs.stopping import EXIT_INTERRUPTED, Stopping, stop_signals

if TYPE_CHECKING:
    from fastdecode.jobs.job import JobResult

COMMAND = "fastdecode generate"


def add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="complete every prompt of a JSON Lines file",
        description="Complete every prompt of a JSON Lines file. Input lines: "
        '{"id": ..., "prompt": "..."} or {"id": ..., "prompt_token_ids": [...]}, '
        "with any sampling parameter.",
    )
    parser.set_defaults(run=_generate)
    add_model(parser)
    files = parser.add_argument_group("files")
    add_input_option(files)
    files.add_argument(
        "--output", "-o", required=True, type=Path, metavar="FILE",
        help="completions, JSON Lines; replaced if it exists; FILE.gz: compressed; "
        "-: standard output",
    )  # fmt: skip
    add_report_options(files)
    files.add_argument("--show", action="store_true", help="also print the completions")
    add_engine_options(parser)
    add_options(parser.add_argument_group("conversations"), Keeping)
    add_sampling_options(parser)
    add_exit_code_option(parser)
    add_log_level_option(parser)


@stop_signals(interrupt)  # until the job looks for them between steps
def _generate(args: argparse.Namespace) -> int:
    check_options(args)
    if args.show and args.output == STANDARD:
        raise ConfigError("--show prints to standard output, as --output - does: give one of them")
    serve_if_r_rank(args, engine_options(args))
    with imports_for("fastdecode generate (an S-worker)"):
        load_engine(args)
        from fastdecode.cli.job_run import run_job
        from fastdecode.jobs.opening import JobOptions, open_ordered_job
        from fastdecode.measure.summary import render
    check_paths(
        args.input, output=args.output, summary=args.summary, trace=args.trace, status=args.status
    )
    config = EngineConfig.of(args.model, **engine_options(args))
    if not config.instances.addresses:
        check_model(args.model)
    if args.conversations is not None and (why := why_no_reuse(config)):
        tell(f"warning: every turn computes its whole conversation again: {why}")
    options = JobOptions(
        args.input, args.output, sampling_given(args), model_defaults(args), skip_bad_lines=True
    )
    progress = Progress(sys.stderr)

    def show(prompt: str | None, line: dict[str, Any]) -> None:
        progress.print(_shown(prompt, line))

    with Bar(sys.stderr, "checking") as bar:
        opened = open_ordered_job(
            options, find_model(args.model), tell, show if args.show else None, bar.update
        )
    with opened as job:
        result, summary = run_job(job, args, Stopping(grace_s=0), progress, **given(args, Keeping))
    code = leave_summary(COMMAND, args.summary, summary)
    tell(render(summary))
    return _ended(result, args.output) or code


def _ended(result: JobResult, output: Path) -> int:
    """Says what is missing, if anything. Returns the exit code."""
    if result.interrupted:
        num_done = f"{result.num_done} of {result.num_lines}"
        tell(
            f"{COMMAND}: interrupted; {num_done} answers are in {output}. It cannot be resumed: "
            "for long jobs use fastdecode run-batch"
        )
        return EXIT_INTERRUPTED
    if result.lost is not None:
        tell(f"{COMMAND}: workers were lost: {result.lost}")
        return EXIT_WORKERS_LOST
    if result.num_run_failed:
        failed = f"{result.num_run_failed} of {result.num_run} requests failed"
        tell(f"{COMMAND}: {failed}; see the error lines in {output}. First: {result.first_error}")
        return EXIT_SOME_FAILED
    return 0


def _shown(prompt: str | None, line: dict[str, Any]) -> str:
    """A completion as a person wants to see it: the end of the prompt, then
    what the model made of it."""
    head = f"\n[{line['id']}]"
    if "error" in line:
        return f"{head} error {line['error']['code']}: {line['error']['message']}"
    lead = "" if prompt is None else prompt if len(prompt) <= 400 else "... " + prompt[-400:]
    parts = line.get("completions", [line])
    texts = [part["text"] or f"(no text: tokens {part['token_ids']})" for part in parts]
    return "\n".join([head + " " + lead, *(f"  => {text.strip()}" for text in texts)])
