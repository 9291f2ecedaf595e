"""Options and exit codes that several subcommands of ``fastdecode`` share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastdecode.core.config import EngineConfig
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.core.sequence import SamplingParams

EXIT_SOME_FAILED = 3
EXIT_WORKERS_LOST = 4
EXIT_INTERRUPTED = 130


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    default = {f.name: f.default for f in fields(EngineConfig)}

    def add(flag: str, kind: Callable[[str], Any], text: str, metavar: str = "N") -> None:
        name = flag.removeprefix("--").replace("-", "_")
        shown = "" if default[name] is None else f" (default: {default[name]})"
        group.add_argument(flag, type=kind, default=default[name], metavar=metavar, help=text + shown)

    add("--dtype", str, "weights and activations: float32, bfloat16, float16; auto is the checkpoint's", "DTYPE")
    add("--kv-dtype", str, "KV cache: float32, bfloat16, float16, int8, int4; auto is like --dtype", "DTYPE")
    add("--device", str, "where the S-part runs: cpu, cuda, cuda:1, ...", "DEVICE")
    add("--cuda-graphs", str, "S-steps as CUDA graphs: on, off; auto: on CUDA, with --tp 1", "MODE")
    add("--tp", int, "S-workers that act as one, a part of every layer each: the first ranks of an MPI job")
    add("--kv-placement", str, "where the KV cache is: r (on R-workers) or gpu (on the device; no R-workers)", "WHERE")
    add("--prompt-attention", str, "prompts are attended by the S-worker (s) or R-workers (r); auto: s on a GPU", "WHO")
    add(
        "--transport",
        str,
        "R-workers are: inproc (in this process), mpi (the job's other ranks), zmq (at addresses)",
        "HOW",
    )
    group.add_argument(
        "--r-worker", dest="r_worker_addresses", action="append", default=[], metavar="ADDRESS",
        help="an R-worker's address, tcp://HOST:PORT, where fastdecode r-worker --bind runs; repeatable",
    )  # fmt: skip
    add("--key", str, "the cluster's key, for R-workers on other hosts", "FILE")
    add("--r-workers", int, "R-workers, in this process")
    add("--r-partition", str, "each R-worker has some sequences, or some KV heads of every sequence (heads)", "WHAT")
    add("--split-tokens", int, "keep longer sequences as parts of N tokens on several R-workers (default: one each)")
    add("--r-threads", int, "CPU threads of each R-worker; default: this machine's cores shared out")
    add("--kv-memory-gb", float, "KV cache of each R-worker; default: half of the free memory, shared out", "GB")
    add("--gpu-memory-fraction", float, "of a GPU's memory, what may be in use by us and others together", "F")
    add("--block-size", int, "tokens in a KV block")
    add("--max-model-len", int, "most tokens of prompt and completion; default: the model's limit")
    add("--max-num-sequences", int, "most sequences that run at once")
    add("--prefill-chunk", int, "most prompt tokens of one sequence in a step; longer prompts take several steps")
    add("--max-step-tokens", int, "most tokens of all sequences in a step")
    add("--lanes", lanes, "parts of the running batch that take turns on the S-worker; auto: as measured (default)")
    add(
        "--schedule",
        str,
        "stabilized, fixed-f, greedy, synchronized; auto: the first with lanes or a --load-limit",
        "MODE",
    )
    add("--load-limit", int, "most cached tokens over all running sequences, W; default: from measured step times", "W")
    add("--target-length", int, "tokens that a sequence typically generates, S; needed by fixed intervals", "S")
    add("--interval", int, "steps between micro-batches, of fixed intervals; default: S/16 or more", "F")
    add("--cold-start", str, "how stabilized fills an empty lane: headroom, ramp, fixed-f, none", "HOW")
    group.add_argument(
        "--learn-lengths",
        action=argparse.BooleanOptionalAction,
        default=default["learn_lengths"],
        help="project load by the lengths of finished requests, not by max_tokens (default: yes)",
    )
    add("--length-quantile", float, "reserve KV blocks by this quantile of lengths; default: for max_tokens", "Q")
    add("--worker-silence-s", float, "give up an R-worker (mpi, zmq) that gives no sign of life for so long", "S")
    add("--worker-timeout-s", float, "give up an R-worker that lives, but owes an answer for so long", "S")


def lanes(text: str) -> int | None:
    return None if text == "auto" else int(text)


def add_exit_code_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--exit-code-file",
        type=Path,
        metavar="FILE",
        help="also write the exit code there: mpirun's says little once a rank was lost",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ``SamplingParams`` that makes sense for every line of a file."""
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


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``EngineConfig`` as given, but the model."""
    return {f.name: getattr(args, f.name) for f in fields(EngineConfig) if f.name != "model"}


def sampling_given(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that were given; those left out aren't there."""
    return {f.name: getattr(args, f.name) for f in fields(SamplingParams) if hasattr(args, f.name)}


def sampling_defaults(args: argparse.Namespace) -> SamplingParams:
    """What lines that don't say it themselves are sampled with. Raises ConfigError naming a bad option."""
    try:
        return SamplingParams(**sampling_given(args))
    except RequestError as error:
        raise ConfigError(str(error)) from None


def tell(text: str) -> None:
    """A line for a person, on stderr."""
    print(text, file=sys.stderr, flush=True)
