"""``fastdecode generate``, ``run-batch`` and ``merge``: files of lines in, files of answers out.

``generate`` answers in the file's order. ``run-batch --resume`` continues a job after its exit
codes 4 and 130, and after any crash. ``merge`` joins the outputs of a job's shards."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.cli.options import (
    EXIT_SOME_FAILED,
    EXIT_UNEXPECTED,
    EXIT_WORKERS_LOST,
    add_engine_options,
    add_exit_code_option,
    add_options,
    add_sampling_options,
    add_status_option,
    check_engine_options,
    engine_options,
    given,
    load_engine,
    model_defaults,
    sampling_given,
    tell,
)
from fastdecode.cli.parser import add_model
from fastdecode.conversations.conversations import Keeping
from fastdecode.conversations.turns import why_no_reuse
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.options import REQUIRED, declared, option, switch
from fastdecode.core.errors import ConfigError, imports_for
from fastdecode.core.files import STANDARD, check_paths, check_readable, check_writable, write_json
from fastdecode.core.host.processes import interrupt
from fastdecode.core.model.checkpoint import check_model
from fastdecode.core.model.local_models import find_model
from fastdecode.core.progress import Bar, Progress
from fastdecode.engine.rank_roles import serve_other_rank
from fastdecode.jobs.options import INPUT_HELP, JobFiles, JobOptions
from fastdecode.jobs.stopping import EXIT_INTERRUPTED, Stopping, asked_by_signals, stop_signals
from fastdecode.text.chat_format import ChatOptions
from fastdecode.wire.mpi.job import before_ending
from fastdecode.wire.ranks import LAUNCH_LINE

if TYPE_CHECKING:
    from fastdecode.jobs.job import BatchJob, JobResult


@dataclass(frozen=True)
class GenerateFiles:
    input: Path = option(REQUIRED, INPUT_HELP, short="-i")
    output: Path = option(
        REQUIRED, "completions; replaced if it exists; FILE.gz: compressed; -: stdout", short="-o"
    )
    show: bool = switch("also print the completions")


@dataclass(frozen=True)
class ReportFiles:
    summary: Path | None = option(None, "write timings and totals there, JSON")
    trace: Path | None = option(None, "write what ran when, as Chrome trace events")


@dataclass(frozen=True)
class MergeOptions:
    outputs: tuple[Path, ...] = option(REQUIRED, "of run-batch", flag="outputs", metavar="OUTPUT")
    output: Path = option(
        REQUIRED, "all answers; replaced if it exists; FILE.gz: compressed; -: stdout", short="-o"
    )
    partial: bool = switch("merge even if lines or shards are missing")


def add_generate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        'Complete every prompt of a JSON Lines file. Input lines: {"id": ..., "prompt": "..."} or '
        '{"id": ..., "prompt_token_ids": [...]}, with any sampling parameter.'
    )
    parser.set_defaults(run=run_generate)
    add_model(parser)
    files = parser.add_argument_group("files")
    for group in (GenerateFiles, ReportFiles):
        add_options(files, group)
    add_status_option(files)
    add_engine_options(parser)
    add_options(parser, Keeping, "conversations")
    add_sampling_options(parser)
    add_exit_code_option(parser)


def add_run_batch(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answer every line of a file, OpenAI batch lines or those of `generate`. Answers are "
        "appended as they finish. Whatever ends the job, the same command with --resume "
        "continues it."
    )
    parser.set_defaults(run=run_run_batch)
    add_model(parser)
    files = parser.add_argument_group("files")
    for group in (JobFiles, ReportFiles):
        add_options(files, group)
    add_status_option(files)
    add_options(files, ChatOptions)
    drawn = [each.name for group in (JobFiles, ChatOptions) for each in declared(group)]
    add_options(parser, JobOptions, "job", leave_out=drawn)
    add_engine_options(parser)
    add_sampling_options(parser, has_chats=True)
    add_exit_code_option(parser)


def add_merge(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Join the outputs of `fastdecode run-batch --shard 1/N` to `N/N` into one file, in the "
        "order of the input. One output of a whole job is put into that order."
    )
    parser.set_defaults(run=run_merge)
    add_options(parser, MergeOptions)


@stop_signals(interrupt)  # until the job looks for them between steps
def run_generate(args: argparse.Namespace) -> int:
    if args.show and args.output == STANDARD:
        raise ConfigError("--show prints to standard output, as --output - does: give one of them")
    config = _prepare(args)
    from fastdecode.jobs.opening import open_ordered_job

    if not config.instances.addresses:
        check_model(args.model)
    if args.conversations is not None and (why := why_no_reuse(config)):
        tell(f"warning: every turn computes its whole conversation again: {why}")
    options = JobOptions(
        input=args.input, output=args.output, on_error="skip",
        sampling=sampling_given(args), model_defaults=model_defaults(args),
    )  # fmt: skip
    progress = Progress(sys.stderr)

    def show(prompt: str | None, line: dict[str, Any]) -> None:
        progress.print(_shown(prompt, line))

    with Bar(sys.stderr, "checking") as bar:
        job = open_ordered_job(
            options, find_model(args.model), tell, show if args.show else None, bar.update
        )
    with job:
        result, code = _run(job, args, Stopping(0), progress, **given(args, Keeping))
    if result.interrupted:
        tell(
            f"fastdecode generate: interrupted; {result.num_done} of {result.num_lines} answers "
            f"are in {args.output}. It cannot be resumed: for long jobs use fastdecode run-batch"
        )
    elif result.lost is None and result.num_run_failed:
        tell(
            f"fastdecode generate: {result.num_run_failed} of {result.num_run} requests failed; "
            f"see the error lines in {args.output}. First: {result.first_error}"
        )
    return _exit_code(result) or code


@stop_signals(interrupt)  # until the job looks for them between steps
def run_run_batch(args: argparse.Namespace) -> int:
    config = _prepare(args)
    from fastdecode.jobs.opening import open_job

    sampling = {"sampling": sampling_given(args), "model_defaults": model_defaults(args)}
    options = JobOptions(**(given(args, JobOptions) | sampling))
    with Bar(sys.stderr, "checking") as bar:
        job = open_job(options, config, tell, bar.update)
    code = 0
    with job:
        result = job.result()
        if job.num_pending == 0:
            tell("fastdecode run-batch: nothing is left to do")
        else:
            before_ending(lambda _: tell(f"to continue: {resume_command(args.argv)}"))
            stop = Stopping(options.grace_s)
            result, code = _run(job, args, stop, Progress(sys.stderr), session=job.session)
    failed = f", {result.num_failed} of them with an error" if result.num_failed else ""
    tell(
        f"fastdecode run-batch: {result.num_done} of {result.num_lines} lines are answered in "
        f"{args.output}{failed}"
    )
    if result.num_done < result.num_lines:
        same = ", with the same lines on standard input" if args.input == STANDARD else ""
        tell(f"to continue{same}: {resume_command(args.argv)}")
    else:
        _advise(result, args)
    return _exit_code(result) or code


def run_merge(args: argparse.Namespace) -> int:
    from fastdecode.jobs.merging import merge

    for path in args.outputs:
        check_readable(path)
    if args.output != STANDARD:
        check_writable(args.output, "output")
    with Bar(sys.stderr, "merging") as bar:
        found = merge(args.outputs, args.output, bar.update, partial=args.partial)
    missing = f", {found.num_missing} lines are missing" if found.num_missing else ""
    missing += f", {found.missing_shards} shard(s) are missing" if found.missing_shards else ""
    failed = f", {found.num_failed} of them with an error" if found.num_failed else ""
    tell(f"fastdecode merge: {found.num_answers} answers are in {args.output}{failed}{missing}")
    return EXIT_SOME_FAILED if found.num_failed or missing else 0


def _prepare(args: argparse.Namespace) -> EngineConfig:
    """Check options and files, and import the engine. R-workers of an MPI job serve, and do not
    return."""
    config = check_engine_options(args)
    serve_other_rank(config, tell)
    with imports_for(f"fastdecode {args.command} (an S-worker)"):
        load_engine(args)
        import fastdecode.engine.llm
        import fastdecode.jobs.opening  # noqa: F401
    check_paths(
        args.input, output=args.output, summary=args.summary, trace=args.trace, status=args.status
    )
    return config


def _run(
    job: BatchJob, args: argparse.Namespace, stopping: Stopping, progress: Progress, **options: Any
) -> tuple[JobResult, int]:
    """Run a job by an engine that is made for it, and show a summary. Return the result, and 1 if
    the summary can't be written, otherwise 0."""
    from fastdecode.engine.llm import LLM
    from fastdecode.measure.chrome_trace import open_trace
    from fastdecode.measure.status_file import engine_status, status_file
    from fastdecode.measure.summary import render, summarise

    options = {**engine_options(args), **options}
    options["generation_config"] = "ignore"  # requests bring its defaults
    with (
        open_trace(args.trace) as trace,
        LLM(args.model, progress=tell, trace=trace, **options) as llm,
        progress,
        status_file(
            args.status,
            args.command,
            engine_status(args.model, llm.service, lambda: llm.stats, lambda: progress.state),
            tell,
        ),
        asked_by_signals(stopping, f"fastdecode {args.command}"),
    ):
        result = job.run(llm, stopping, progress)
        args.has_hung_workers = llm.snapshot().engine.has_hung_r_workers
        summary = summarise(llm, args.started_s, result.num_run, result.num_run_failed)
    code = 0
    try:
        if args.summary is not None:
            write_json(args.summary, summary, "summary")
    except ConfigError as error:
        tell(f"fastdecode {args.command}: {error}; the answers are whole")
        code = EXIT_UNEXPECTED
    tell(render(summary))
    if result.lost is not None:
        tell(f"fastdecode {args.command}: workers were lost: {result.lost}")
    return result, code


def _exit_code(result: JobResult) -> int:
    if result.interrupted:
        return EXIT_INTERRUPTED
    if result.lost is not None:
        return EXIT_WORKERS_LOST
    return EXIT_SOME_FAILED if result.num_failed else 0


def _shown(prompt: str | None, line: dict[str, Any]) -> str:
    """Return a completion as a person wants to see it, behind the end of its prompt."""
    head = f"\n[{line['id']}]"
    if "error" in line:
        return f"{head} error {line['error']['code']}: {line['error']['message']}"
    lead = "" if prompt is None else prompt if len(prompt) <= 400 else "... " + prompt[-400:]
    parts = line.get("completions", [line])
    texts = [part["text"] or f"(no text: tokens {part['token_ids']})" for part in parts]
    return "\n".join([head + " " + lead, *(f"  => {text.strip()}" for text in texts)])


def _advise(result: JobResult, args: argparse.Namespace) -> None:
    """Print what to do about lines that failed, once all are answered."""
    if result.num_run and result.num_run_failed == result.num_run:
        tell(f"fastdecode run-batch: first error: {result.first_error}")
    if result.num_bad:
        tell(
            f"{result.num_bad} line(s) of {args.input} are bad and fail in every run: correct "
            "them in a file of their own, and run that with another --output"
        )
    if result.num_failed > result.num_bad:
        others = "the other failed lines" if result.num_bad else "the failed lines"
        tell(f"to run {others} again: {resume_command(args.argv)} --retry-errors")


def resume_command(argv: list[str], environ: Mapping[str, str] = os.environ) -> str:
    """Return the command line that continues a job of these arguments, or of ``launch``, which has
    added to them."""
    typed: list[str] = json.loads(environ.get(LAUNCH_LINE, "null")) or argv
    kept = [word for word in typed if word not in ("--overwrite", "--resume", "--retry-errors")]
    return shlex.join(["fastdecode", *kept, "--resume"])
