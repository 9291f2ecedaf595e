"""The ``fastdecode`` command. Each subcommand imports what it needs when it runs, so that none pays for another's.

Exit codes: 0 done; 1 an unexpected failure; 2 usage, options or model directory; 3 some requests failed, the others
are done; 4 workers were lost; 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastdecode import __version__
from fastdecode.cli_size import add_size
from fastdecode.core.config import EngineConfig
from fastdecode.core.errors import ConfigError, FastDecodeError, MissingExtraError, RequestError
from fastdecode.core.sequence import SamplingParams

EXIT_SOME_FAILED = 3
EXIT_WORKERS_LOST = 4
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except FastDecodeError as error:
        print(f"fastdecode {args.command}: {error}", file=sys.stderr)
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
    add_size(commands)
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
    files.add_argument("--show", action="store_true", help="also print the completions")
    _add_engine_options(parser)
    _add_sampling_options(parser)
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    default = {f.name: f.default for f in fields(EngineConfig)}

    def add(flag: str, kind: Callable[[str], Any], text: str, metavar: str = "N") -> None:
        name = flag.removeprefix("--").replace("-", "_")
        shown = "" if default[name] is None else f" (default: {default[name]})"
        group.add_argument(flag, type=kind, default=default[name], metavar=metavar, help=text + shown)

    add("--dtype", str, "weights and activations: float32, bfloat16, float16; auto is the checkpoint's", "DTYPE")
    add("--kv-dtype", str, "KV cache: float32, bfloat16, float16; auto is like --dtype", "DTYPE")
    add("--device", str, "where the S-part runs: cpu, cuda, cuda:1, ...", "DEVICE")
    add("--r-workers", int, "R-workers, as threads of this process")
    add("--r-threads", int, "CPU threads of each R-worker; default: this machine's cores shared out")
    add("--kv-memory-gb", float, "KV cache of each R-worker; default: half of the free memory, shared out", "GB")
    add("--block-size", int, "tokens in a KV block")
    add("--max-model-len", int, "most tokens of prompt and completion; default: the model's limit")
    add("--max-num-sequences", int, "most sequences that run at once")
    add("--prefill-chunk", int, "most prompt tokens of one sequence in a step; longer prompts take several steps")
    add("--max-step-tokens", int, "most tokens of all sequences in a step")
    add("--lanes", int, "parts of the running batch that take turns on the S-worker; default: 1 on a CPU, 2 on a GPU")
    add("--worker-timeout-s", float, "wait so long for an R-worker before giving it up", "S")


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "defaults for lines that don't say it themselves")
    default = SamplingParams()

    def add(flag: str, kind: Callable[[str], Any], text: str, metavar: str = "X") -> None:
        name = flag.removeprefix("--").replace("-", "_")
        group.add_argument(
            flag,
            type=kind,
            default=argparse.SUPPRESS,
            metavar=metavar,
            help=f"{text} (default: {getattr(default, name)})",
        )

    add("--temperature", float, "0 is greedy")
    add("--top-k", int, "keep the k likeliest tokens; 0 keeps all", "K")
    add("--top-p", float, "keep the likeliest tokens up to this probability")
    add("--min-p", float, "keep tokens this likely, relative to the likeliest")
    add("--repetition-penalty", float, "on tokens of prompt and output")
    add("--presence-penalty", float, "on tokens of the output")
    add("--frequency-penalty", float, "on tokens of the output, each time")
    add("--seed", int, "same seed, same tokens, whatever else is in the batch", "N")
    add("--max-tokens", int, "most tokens to generate", "N")
    add("--min-tokens", int, "fewest tokens to generate", "N")
    add("--logprobs", int, "also give logprobs, and those of the K likeliest", "K")
    add("--n", int, "completions of each prompt", "N")
    group.add_argument(
        "--stop", action="append", default=argparse.SUPPRESS, metavar="TEXT", help="stop before this text; repeatable"
    )
    group.add_argument(
        "--stop-token-ids", action="append", type=int, default=argparse.SUPPRESS, metavar="ID",
        help="stop at this token; repeatable",
    )  # fmt: skip
    group.add_argument("--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="go on after EOS")


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return {f.name: getattr(args, f.name) for f in fields(EngineConfig) if f.name != "model"}


def _sampling_defaults(args: argparse.Namespace) -> SamplingParams:
    given = {f.name: getattr(args, f.name) for f in fields(SamplingParams) if hasattr(args, f.name)}
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise ConfigError(str(error)) from None


def _generate(args: argparse.Namespace) -> int:
    defaults = _sampling_defaults(args)
    try:
        from fastdecode.engine import batch
        from fastdecode.engine.llm import LLM
        from fastdecode.engine.progress import Progress
        from fastdecode.engine.summary import render, summarise
    except ModuleNotFoundError as error:
        if error.name in ("torch", "safetensors", "tokenizers"):
            raise MissingExtraError(str(error.name), "sworker", "fastdecode generate (an S-worker)") from None
        raise
    batch.check_paths(args.input, args.output)
    if args.summary is not None:
        batch.check_writable(args.summary, "summary")
    num_requests = batch.count_lines(args.input)
    with LLM(args.model, progress=_tell, **_engine_options(args)) as llm, Progress(total=num_requests) as bar:

        def on_output(prompt: str | None, line: dict[str, Any]) -> None:
            bar.done(llm.stats.num_output_tokens, failed="error" in line)
            if args.show:
                bar.print(_shown(prompt, line))

        result = batch.run_batch(llm, args.input, args.output, defaults, on_output)
        summary = summarise(llm, result)
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


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
