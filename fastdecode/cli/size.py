"""``fastdecode size``: which batch and how many CPU sockets keep a GPU busy. Needs no torch."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from cost_model.hardware import Cpu, Gpu, Hardware, described_cpu, is_described
from cost_model.plans.question import Goal, Prices, Setup
from cost_model.shapes import known_models, read_model
from cost_model.stages import MAX_IO_THREADS, TRANSPORTS
from cost_model.workload import Workload
from fastdecode.cli.options import EXIT_NO, add_options, given, read_options, tell
from fastdecode.cli.parser import add_model
from fastdecode.core.config.options import REQUIRED, option, switch
from fastdecode.core.config.s_part import MAX_PP
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.measurement import NetProfile, RProfile, SProfile, read_profile
from fastdecode.core.os_errors import explained

T = TypeVar("T")
LONG_OUTPUT = 8192  # output tokens from which ``--seq-len`` may be meant as a context


def _tokens(text: str) -> int:
    """Read ``4096`` or ``4k``."""
    number = text.strip().lower()
    try:
        return int(number.removesuffix("k")) * (1024 if number.endswith("k") else 1)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of tokens, such as 4096 or 4k") from None


@dataclass(frozen=True)
class Sequences:
    dtype: str = option(
        "auto", "weights and activations; auto (default) is a measured --gpu's, else the "
        "checkpoint's", metavar="D",
    )  # fmt: skip
    kv_dtype: str = option(
        "auto", "KV cache: float32, float16, bfloat16, int8, int4; auto (default) is a measured "
        "--cpu's, else --dtype", metavar="D",
    )  # fmt: skip
    weights: str = option(
        "decoded", "quantised weights: decoded to --dtype while they are loaded, as FastDecode "
        "does (default); kept: what a plan would be if they stayed quantised in memory",
        choices=("decoded", "kept"),
    )  # fmt: skip
    seq_len: int | None = option(
        None, "output tokens a sequence, without a prompt; 4k is 4096", read=_tokens, metavar="S"
    )
    prompt_len: int | None = option(None, "prompt tokens a sequence", read=_tokens)
    output_len: int | None = option(None, "output tokens a sequence", read=_tokens)


@dataclass(frozen=True, kw_only=True)
class Parts:
    gpu: str = option(
        REQUIRED, "name, or profile.json of `calibrate s`; none: the S-worker runs on a socket of "
        "--cpu; all: each known GPU, in one table", metavar="G",
    )  # fmt: skip
    cpu: str = option(
        REQUIRED, "name, profile.json of `calibrate r`, or a description such as '12xDDR5-4800, "
        "64 cores, 2.4 GHz, avx512'; all: each known CPU, in one table", metavar="C",
    )  # fmt: skip
    nic: str = option("100GbE", "name, or profile.json of `calibrate net`")
    hardware: Path | None = option(None, "TOML with GPUs, CPUs and NICs of your own")
    pp: int = option(
        1, "pipeline stages, each with GPUs and R-workers of its own", low=1, high=MAX_PP
    )
    own: bool = switch(
        "show every way to use --gpus GPUs and --max-sockets sockets, in one table; "
        "with --gpu none some of the sockets are S-workers"
    )
    transport: str = option(
        "mpi", "mpi (default); zmq-encrypted, zmq-plain: ZeroMQ between hosts, with a key or "
        "--key none, whose I/O threads may be what limits a plan", choices=tuple(TRANSPORTS),
        metavar="HOW",
    )  # fmt: skip
    io_threads: int = option(
        4, "with ZeroMQ: a quarter of the cores of the S-worker's host", low=1, high=MAX_IO_THREADS
    )
    prices: Path | None = option(None, "prices an hour, TOML or JSON")


@dataclass(frozen=True)
class Output:
    sort: str | None = option(
        None, "best line of each part, and order, of a table (--gpu all, --cpu all, --own): most "
        "tokens/s (default), least money or least energy a token",
        choices=("tokens", "cost", "energy"),
    )  # fmt: skip
    json: bool = switch("print the plan as JSON")
    explain: bool = switch("show the numbers behind every line, with their sources")
    plot: Path | None = option(None, "draw throughput and TPOT over sockets (png, svg, pdf)")
    emit: Path | None = option(
        None, "write launch files for the plan: hostfile, mpirun, sbatch", metavar="DIR"
    )


class _List(argparse.Action):
    """Makes the command print all names instead of a plan."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        parser.require_nothing()
        namespace.run = _print_names


def _print_names(args: argparse.Namespace) -> int:
    from cost_model.printing import json_text

    hardware = Hardware.load(args.hardware)
    names = {
        "models": list(known_models()),
        "gpus": list(hardware.gpus),
        "cpus": list(hardware.cpus),
        "nics": list(hardware.nics),
    }
    titles = ("Models", "GPUs", "CPUs", "NICs")
    try:
        if args.json:
            print(json_text({"format": "fastdecode.names", "version": 1, **names}))
        else:
            for title, found in zip(titles, names.values(), strict=True):
                print(f"{title} ({len(found)})", *found, sep="\n  ")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has what it wants, such as head
        sys.stderr.close()
    return 0


def add_size(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Which batch and how many CPU sockets keep a GPU busy, what limits it, and "
        "whether it is worth it. From datasheets, or from profiles that `fastdecode calibrate` "
        "measured."
    )
    parser.set_defaults(run=run_size)
    named = 'a name such as "Llama-2 7B" or org/name, a config.json, or a model directory'
    add_model(parser, named)
    text = "print the names of all models, GPUs, CPUs and NICs (with --json as JSON), and exit"
    parser.add_argument("--list", action=_List, nargs=0, help=text)
    what = parser.add_argument_group("what to run")
    add_options(what, Sequences)
    add_options(what, Workload, leave_out=("prompt_tokens", "output_tokens"))
    parts = parser.add_argument_group("on what")
    add_options(parts, Parts)
    add_options(parts, Setup)
    add_options(parser, Goal, "what to hold")
    add_options(parser, Output, "output")


def run_size(args: argparse.Namespace) -> int:
    from cost_model.plans.report import as_json, as_text
    from cost_model.plans.size import size
    from cost_model.plans.stages import slowest_stage, stages_json, stages_text
    from cost_model.printing import json_text

    if args.plot is not None:
        from fastdecode.measure.plot import check_plot, save_plot  # here: NumPy is slow to load

        check_plot(args.plot)
    parts = read_options(args, Parts)
    hardware = Hardware.load(parts.hardware)
    prices = None if parts.prices is None else Prices.read(parts.prices)
    if args.emit is not None and parts.transport != "mpi":
        line = f"an mpirun line, which --transport {parts.transport} does not use"
        raise ConfigError(f"--emit writes {line}. Remove one of them")
    if parts.own or "all" in (parts.gpu, parts.cpu):
        return _print_choices(args, parts, hardware, prices)
    if args.sort is not None:
        remedy = "Add --gpu all, --cpu all or --own, or remove it"
        raise ConfigError(f"--sort {args.sort} orders a table, and this is one plan. {remedy}")
    whole, goal = read_setup(args, parts, hardware, _workload(args)), read_options(args, Goal)
    num_stages = parts.pp
    for name in ("emit", "plot", "prices", "requests", "users"):
        if num_stages > 1 and getattr(args, name) is not None:
            why = f"is not supported with --pp {num_stages} yet: it is for one stage"
            raise ConfigError(f"--{name} {why}. Remove one of them")
    sizing = slowest_stage(
        whole, goal, num_stages, lambda setup, asked: size(setup, asked, hardware, prices)
    )
    if args.json:
        staged = {} if num_stages == 1 else {"stages": stages_json(whole, num_stages, sizing)}
        print(json_text({**as_json(sizing), **staged}))
    else:
        if num_stages > 1:
            print(*stages_text(whole, num_stages, sizing), sep="\n", end="\n\n")
        print(as_text(sizing, explain=args.explain))
    if args.plot is not None:
        save_plot(sizing, args.plot)
    if args.emit is not None:
        _emit(sizing, args.emit, args.model)
    return 0 if sizing.feasible else EXIT_NO


def _print_choices(
    args: argparse.Namespace, parts: Parts, hardware: Hardware, prices: Prices | None
) -> int:
    from cost_model.plans.choices import arrange, choices_text, choose, sort_choices
    from cost_model.plans.size import size
    from cost_model.printing import json_text

    if parts.gpu == parts.cpu or (parts.own and "all" in (parts.gpu, parts.cpu)):
        raise ConfigError("all is for --gpu or for --cpu, and not with --own. Name the others")
    for name in ("emit", "plot", "requests", "users", "explain"):
        if getattr(args, name):
            raise ConfigError(f"--{name} is for one plan, and this is a table. Remove one of them")
    if parts.pp != 1:
        raise ConfigError(f"--pp {parts.pp} is for one plan, and this is a table. Remove it")
    by = args.sort or "tokens"
    if by == "cost" and prices is None:
        raise ConfigError(Given("sort", by), " needs prices. Give ", Given("prices"))
    goal, workload = read_options(args, Goal), _workload(args)

    def plan(setup: Setup, asked: Goal) -> Any:
        return size(setup, asked, hardware)

    if parts.own:
        gpus = args.num_gpus if parts.gpu == "none" else 1  # which refuses more of them
        setup = read_setup(args, parts, hardware, workload, gpus)
        ways = arrange(setup, args.num_gpus, goal, plan, prices, by)
        sockets = f"{args.max_sockets} x {parts.cpu}"
        what = f"{args.num_gpus} x {parts.gpu} and {sockets}"
        if setup.is_without_gpu:
            what = f"{sockets}, those of S-workers counted"
    else:
        kind = "gpu" if parts.gpu == "all" else "cpu"
        names = hardware.gpus if kind == "gpu" else hardware.cpus

        def setup_of(name: str) -> Setup:
            named = replace(parts, gpu=name) if kind == "gpu" else replace(parts, cpu=name)
            return read_setup(args, named, hardware, workload)

        ways = choose(((name, setup_of(name)) for name in names), goal, plan, prices, by)
        what = f"each {kind.upper()}"
    ways = replace(ways, found=sort_choices(ways.found, by))
    if args.json:
        tree = {"choices": ways.found, "left_out": ways.left_out}
        print(json_text({"format": "fastdecode.choices", "version": 1, **tree}))
    else:
        print(choices_text(ways, f"{args.model} on {what}, by {by}", prices))
    return 0 if ways.found else EXIT_NO


def read_setup(
    args: argparse.Namespace,
    parts: Parts,
    hardware: Hardware,
    workload: Workload,
    num_gpus: int | None = None,
) -> Setup:
    """Return the model and the hardware that the options name. ``num_gpus`` replaces the option."""
    spec = read_model(args.model)
    cpu: Cpu | RProfile
    gpu: Gpu | SProfile
    if is_described(parts.cpu):
        cpu = described_cpu(parts.cpu, hardware)
    else:
        cpu = _profile(parts.cpu, "cpu", RProfile, "r") or hardware.cpu(parts.cpu)
    options = given(args, Setup)
    options["num_gpus"] = num_gpus or args.num_gpus
    if parts.gpu == "none":
        gpu = _without_gpu(cpu, options)
    else:
        gpu = _profile(parts.gpu, "gpu", SProfile, "s") or hardware.gpu(parts.gpu)
    asked = gpu.dtype if args.dtype == "auto" and isinstance(gpu, SProfile) else args.dtype
    dtype = spec.choose_dtype(asked)
    kv_dtype = cpu.kv_dtype if isinstance(cpu, RProfile) else dtype.value
    if args.kv_dtype != "auto":
        kv_dtype = DType.parse(args.kv_dtype, option="kv_dtype", of_kv=True).value
    nic = _profile(parts.nic, "nic", NetProfile, "net") or hardware.nic(parts.nic)
    what = (spec, dtype, kv_dtype, gpu, cpu, nic, workload)
    return Setup(
        *what,
        transport=replace(TRANSPORTS[parts.transport], num_threads=parts.io_threads),
        keeps_quantised=args.weights == "kept",
        is_without_gpu=parts.gpu == "none",
        **options,
    )


def _without_gpu(cpu: Cpu | RProfile, options: dict[str, Any]) -> Gpu:
    if not isinstance(cpu, Cpu):
        raise ConfigError(
            "--gpu none with a measured --cpu: a socket's matrix products are in another profile. "
            "Measure them with: fastdecode calibrate s --device cpu --out s.json, and give --gpu "
            "s.json"
        )
    num_gpus, dram_gb = options["num_gpus"], options["dram_gb"]
    if num_gpus != 1:
        words = ": there is no GPU with --gpu none. Remove one of them"
        raise ConfigError(Given("num_gpus", num_gpus), words)
    return cpu.as_gpu(None if dram_gb is None else int(dram_gb * 1e9))


def _workload(args: argparse.Namespace) -> Workload:
    lengths = (args.prompt_len or 0, args.output_len)
    if args.seq_len is not None:
        if args.prompt_len is not None or args.output_len is not None:
            raise ConfigError("give --seq-len, or --prompt-len and --output-len, not both")
        lengths = (0, args.seq_len)
    elif args.output_len is None:
        either = "Give --seq-len, or --prompt-len and --output-len"
        raise ConfigError(f"the sequence lengths are missing. {either}")
    if args.seq_len is not None and args.seq_len >= LONG_OUTPUT:
        tell(
            f"fastdecode size: --seq-len {args.seq_len} means {args.seq_len:,} output tokens "
            "without a prompt. For a context of that length, give the prompt apart: --prompt-len "
            f"{args.seq_len - 512} --output-len 512"
        )
    args.flags["prompt_tokens"] = "--prompt-len"
    args.flags["output_tokens"] = "--output-len" if args.seq_len is None else "--seq-len"
    return Workload(*lengths, args.start_interval_steps, args.prefix_hit)


def _profile(name: str, option: str, kind: type[T], letter: str) -> T | None:
    """Return the profile at this path. None if ``name`` is not a path."""
    path = Path(name)
    is_path = path.suffix == ".json" or path.is_file()
    return profile_at(path, option, kind, letter) if is_path else None


def profile_at(path: Path, option: str, kind: type[T], letter: str) -> T:
    """Raises ConfigError: If the file holds no profile of this kind."""
    profile = read_profile(path)
    if not isinstance(profile, kind):
        words = f"it needs one of: fastdecode calibrate {letter} --out FILE"
        raise ConfigError(Given(option, str(path)), f" is a profile of another kind; {words}")
    return profile


def _emit(sizing: Any, directory: Path, model: str) -> None:
    from cost_model.plans.launch import launch_files

    if sizing.plan is None:
        raise ConfigError("--emit: there is no plan to launch")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in launch_files(sizing, model).items():
            (directory / name).write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"--emit {directory}: can't write there: {explained(error)}") from None
