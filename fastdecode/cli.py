"""The ``fastdecode`` command. Each subcommand imports what it needs when it runs, so that none pays for another's.

Exit codes: 0 done; 1 an unexpected failure; 2 usage, options or model directory; 3 some requests failed, the others
are done; 4 workers were lost; 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastdecode import __version__
from fastdecode.cli_bench import add_bench
from fastdecode.cli_calibrate import add_calibrate
from fastdecode.cli_doctor import add_doctor
from fastdecode.cli_errors import as_typed
from fastdecode.cli_launch import add_launch
from fastdecode.cli_options import (
    EXIT_INTERRUPTED,
    EXIT_SOME_FAILED,
    EXIT_WORKERS_LOST,
    add_engine_options,
    add_exit_code_option,
    add_sampling_options,
    engine_options,
    sampling_defaults,
    tell,
)
from fastdecode.cli_r_worker import add_r_worker, serve_if_r_rank
from fastdecode.cli_run_batch import add_run_batch
from fastdecode.cli_simulate import add_simulate
from fastdecode.cli_size import add_size
from fastdecode.core.errors import FastDecodeError, MissingExtraError, RequestError
from fastdecode.wire import mpi_job


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit code; in an MPI job, leaves the job with it and doesn't return."""
    args = _parser().parse_args(argv)
    exit_code_file: Path | None = getattr(args, "exit_code_file", None)
    if exit_code_file is not None:
        mpi_job.before_leaving_stuck(partial(_note, path=exit_code_file))
    code = _run(args, argv)
    if exit_code_file is not None:
        _note(code, exit_code_file)
    if "mpi4py.MPI" in sys.modules and mpi_job.launched_size() is not None:
        # Ranks that hang would keep the launcher waiting for ever: have it end them.
        mpi_job.leave(code, end_job=code == EXIT_WORKERS_LOST or getattr(args, "has_hung_workers", False))
    return code


def _note(code: int, path: Path) -> None:
    """Leave the exit code where a launcher can't change it."""
    try:
        path.write_text(f"{code}\n")
    except OSError as error:
        print(f"--exit-code-file {path}: {error.strerror}", file=sys.stderr)


def _run(args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    args.started_s = time.perf_counter()
    args.argv = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=args.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except FastDecodeError as error:
        print(f"fastdecode {args.command}: {as_typed(str(error), vars(args))}", file=sys.stderr)
        return 2 if isinstance(error, RequestError) else error.exit_code
    except KeyboardInterrupt:
        print(f"fastdecode {args.command}: interrupted; what was done is in the output", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our stdout went away; that is their good right.
        sys.stderr.close()
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastdecode",
        description="Decode large batches on few GPUs: weights on S-workers, KV cache and attention on R-workers.",
    )
    parser.add_argument("--version", action="version", version=f"fastdecode {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    add_run_batch(commands)
    add_size(commands)
    add_calibrate(commands)
    add_bench(commands)
    add_simulate(commands)
    add_r_worker(commands)
    add_launch(commands)
    add_doctor(commands)
    return parser


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="complete every prompt of a JSON Lines file",
        description="Complete every prompt of a JSON Lines file. Input lines: "
        '{"id": ..., "prompt": "..."} or {"id": ..., "prompt_token_ids": [...]}, with sampling parameters beside.',
    )
    parser.set_defaults(run=_generate)
    files = parser.add_argument_group("files")
    files.add_argument("--model", required=True, metavar="DIR", help="Hugging Face model directory")
    files.add_argument("--input", "-i", required=True, type=Path, metavar="FILE", help="requests, JSON Lines")
    files.add_argument(
        "--output",
        "-o",
        required=True,
        type=Path,
        metavar="FILE",
        help="completions, JSON Lines; replaced if it exists",
    )
    files.add_argument("--summary", type=Path, metavar="FILE", help="write timings and totals there, JSON")
    files.add_argument("--trace", type=Path, metavar="FILE", help="write what ran when, as Chrome trace events")
    files.add_argument("--show", action="store_true", help="also print the completions")
    add_engine_options(parser)
    add_sampling_options(parser)
    add_exit_code_option(parser)
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))


def _generate(args: argparse.Namespace) -> int:
    serve_if_r_rank(args, engine_options(args))
    defaults = sampling_defaults(args)
    try:
        from fastdecode.engine import batch
        from fastdecode.engine.llm import LLM
        from fastdecode.engine.progress import Progress
        from fastdecode.engine.summary import render, summarise
        from fastdecode.engine.trace import open_trace
    except ModuleNotFoundError as error:
        if error.name in ("torch", "safetensors", "tokenizers"):
            raise MissingExtraError(str(error.name), "sworker", "fastdecode generate (an S-worker)") from None
        raise
    batch.check_paths(args.input, output=args.output, summary=args.summary, trace=args.trace)
    num_requests = batch.count_lines(args.input)
    with (
        open_trace(args.trace) as trace,
        LLM(args.model, progress=tell, trace=trace, **engine_options(args)) as llm,
        Progress(total=num_requests) as bar,
    ):

        def on_output(prompt: str | None, line: dict[str, Any]) -> None:
            bar.done(llm.stats.num_output_tokens, failed="error" in line)
            if args.show:
                bar.print(_shown(prompt, line))

        result = batch.run_batch(llm, args.input, args.output, defaults, on_output)
        args.has_hung_workers = llm.has_hung_r_workers
        summary = summarise(
            llm, started_s=args.started_s, num_requests=result.num_requests, num_failed=result.num_failed
        )
    if args.summary is not None:
        batch.write_json(args.summary, summary)
    print(render(summary), file=sys.stderr)
    if result.lost is not None:
        print(f"fastdecode generate: workers were lost: {result.lost}", file=sys.stderr)
        return EXIT_WORKERS_LOST
    if result.num_failed:
        text = f"{result.num_failed} of {result.num_requests} requests failed; see the error lines in {args.output}"
        print(f"fastdecode generate: {text}", file=sys.stderr)
        return EXIT_SOME_FAILED
    return 0


def _shown(prompt: str | None, line: dict[str, Any]) -> str:
    """A completion as a person wants to see it: the end of the prompt, then what the model made of it."""
    head = f"\n[{line['id']}]"
    if "error" in line:
        return f"{head} error {line['error']['code']}: {line['error']['message']}"
    lead = "" if prompt is None else prompt if len(prompt) <= 400 else "... " + prompt[-400:]
    parts = line.get("completions", [line])
    texts = [part["text"] or f"(no text: tokens {part['token_ids']})" for part in parts]
    return "\n".join([head + " " + lead, *(f"  => {text.strip()}" for text in texts)])


if __name__ == "__main__":
    sys.exit(main())
