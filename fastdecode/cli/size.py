"""``fastdecode size``: which batch and how many CPU sockets keep a GPU busy.
Needs no torch and no GPU.

Exit codes: 0 a plan; 1 no plan satisfies what was asked (the nearest one is
printed); 2 usage.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.cli.options import EXIT_INFEASIBLE, add_log_level_option, tell
from fastdecode.cli.parser import add_model
from fastdecode.core.config.options import duration
from fastdecode.core.errors import ConfigError
from fastdecode.core.os_errors import explained

if TYPE_CHECKING:
    from cost_model.hardware import Gpu, Hardware
    from cost_model.plans.question import CpuSource, Goal, GpuSource, NicSource, Prices, Setup
    from cost_model.plans.size import Sizing
    from cost_model.transport import Transport


LONG_OUTPUT = 8192
"""Output tokens from which ``--seq-len`` may be meant as a context."""


class _List(argparse.Action):
    """Has the command print all names in place of a plan."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        parser.require_nothing()
        namespace.run = _print_names


def _print_names(args: argparse.Namespace) -> int:
    from cost_model.hardware import Hardware
    from cost_model.printing import json_text
    from cost_model.shapes import known_models

    hardware = Hardware.load(args.hardware)
    names = {
        "models": list(known_models()),
        "gpus": list(hardware.gpus),
        "cpus": list(hardware.cpus),
        "nics": list(hardware.nics),
    }
    titles = zip(("Models", "GPUs", "CPUs", "NICs"), names.values(), strict=True)
    try:
        if args.json:
            print(json_text({"format": "fastdecode.names", "version": 1, **names}))
        else:
            for title, found in titles:
                print("\n".join([f"{title} ({len(found)})", *(f"  {name}" for name in found)]))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has what it wants, such as head
        sys.stderr.close()
    return 0


def _warn_of_length(args: argparse.Namespace) -> None:
    if args.seq_len is not None and args.seq_len >= LONG_OUTPUT:
        tell(
            f"fastdecode size: --seq-len {args.seq_len} means {args.seq_len:,} output tokens "
            "without a prompt. For a context of that length, give the prompt apart: --prompt-len "
            f"{args.seq_len - 512} --output-len 512"
        )


def add_size(commands: Any) -> None:
    """Add the subcommand to the parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "size",
        help="plan: which batch and how many CPU sockets keep a GPU busy",
        description="Which batch and how many CPU sockets keep a GPU busy, what limits it, and "
        "whether it is worth it. From datasheets, or from profiles that `fastdecode calibrate` "
        "measured.",
    )
    parser.set_defaults(run=run_size)
    add_model(
        parser, 'a name such as "Llama-2 7B" or org/name, a config.json, or a model directory'
    )
    parser.add_argument(
        "--list",
        action=_List,
        nargs=0,
        help="print the names of all models, GPUs, CPUs and NICs (with --json as JSON), and exit",
    )
    _add_workload(parser)
    _add_hardware(parser)
    _add_network(parser)
    _add_goal(parser)
    _add_output(parser)
    add_log_level_option(parser)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what to run")
    what.add_argument(
        "--dtype",
        default="auto",
        help="weights and activations; auto is a measured --gpu's, else the checkpoint's",
    )
    what.add_argument(
        "--weights",
        choices=("decoded", "kept"),
        default="decoded",
        help="quantised weights: decoded to --dtype while they are loaded, as FastDecode does "
        "(default); kept: what a plan would be if they stayed quantised in memory",
    )
    what.add_argument(
        "--kv-dtype",
        default="auto",
        help="KV cache: float32, float16, bfloat16, int8, int4; auto is a measured --cpu's, else "
        "--dtype",
    )
    what.add_argument(
        "--seq-len",
        type=_tokens,
        metavar="S",
        help="output tokens a sequence, without a prompt; 4k is 4096",
    )
    what.add_argument("--prompt-len", type=_tokens, metavar="N", help="prompt tokens a sequence")
    what.add_argument("--output-len", type=_tokens, metavar="N", help="output tokens a sequence")
    what.add_argument(
        "--prefix-hit",
        type=float,
        default=0.0,
        metavar="X",
        help="part of a prompt that the prefix cache holds (default: 0)",
    )
    what.add_argument(
        "--requests",
        type=_requests,
        metavar="N",
        help="how long, how much energy and money for so many",
    )
    what.add_argument(
        "--users",
        type=int,
        metavar="N",
        help="people who wait for an answer, read it, and ask again; says how many sequences run "
        "at once, in place of --batch",
    )
    what.add_argument(
        "--think-time",
        type=duration,
        default=0.0,
        metavar="S",
        help="seconds from an answer to the user's next request, or like 30s (default: 0)",
    )
    what.add_argument(
        "--start-interval",
        type=int,
        default=1,
        metavar="F",
        help="steps between starts (default: 1)",
    )


def _tokens(text: str) -> int:
    """Read a number of tokens: ``4096``, ``4k``."""
    number = text.strip().lower()
    try:
        return int(number.removesuffix("k")) * (1024 if number.endswith("k") else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens, such as 4096 or 4k"
        ) from None


def _requests(text: str) -> int:
    """A number of requests, in float notation too: ``1000000``, ``1e6``."""
    from cost_model.plans.question import MAX_REQUESTS

    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value.is_integer() and value <= MAX_REQUESTS):
        raise argparse.ArgumentTypeError(
            f"{text} is not a whole number from 1 to {MAX_REQUESTS}, such as 1000000 or 1e6"
        )
    return int(value)


def _add_output(parser: argparse.ArgumentParser) -> None:
    out = parser.add_argument_group("output")
    out.add_argument(
        "--sort",
        choices=("tokens", "cost", "energy"),
        help="best line of each part, and order, of a table (--gpu all, --cpu all, --own): most "
        "tokens/s (default), least money or least energy a token",
    )
    out.add_argument("--json", action="store_true", help="print the plan as JSON")
    out.add_argument(
        "--explain",
        action="store_true",
        help="show the numbers behind every line, with their sources",
    )
    out.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw throughput and TPOT over sockets (png, svg, pdf)",
    )
    out.add_argument(
        "--emit",
        type=Path,
        metavar="DIR",
        help="write launch files for the plan: hostfile, mpirun, sbatch",
    )


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on what")
    group.add_argument(
        "--gpu",
        required=True,
        metavar="G",
        help="name, or profile.json of `calibrate s`; none: the S-worker runs on a socket of "
        "--cpu; all: each known GPU, in one table",
    )
    group.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="GPUs that share every layer (default: 1)"
    )
    group.add_argument(
        "--pp",
        type=int,
        default=1,
        metavar="N",
        help="pipeline stages, each with so many GPUs and R-workers of its own (default: 1)",
    )
    group.add_argument(
        "--cpu",
        required=True,
        metavar="C",
        help="name, profile.json of `calibrate r`, or a description such as '12xDDR5-4800, 64 "
        "cores, 2.4 GHz, avx512'; all: each known CPU, in one table",
    )
    group.add_argument(
        "--own",
        action="store_true",
        help="what do I get? Every way to use --gpus GPUs and --max-sockets sockets, in one table; "
        "with --gpu none some of the sockets are S-workers",
    )
    add_hardware_file(group)
    group.add_argument(
        "--dram-gb", type=float, metavar="GB", help="memory a socket; default: the data file's"
    )


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("over which network")
    group.add_argument(
        "--nic", default="100GbE", metavar="N", help="name, or profile.json (default: 100GbE)"
    )
    group.add_argument(
        "--nics", type=int, default=1, metavar="N", help="ports of the S-worker (default: 1)"
    )
    group.add_argument(
        "--transport",
        choices=("mpi", "zmq-encrypted", "zmq-authenticated"),
        default="mpi",
        metavar="HOW",
        help="mpi (default); zmq-encrypted, zmq-authenticated: ZeroMQ between hosts, with such a "
        "key, whose I/O threads may be what limits a plan",
    )
    group.add_argument(
        "--io-threads",
        type=int,
        default=4,
        metavar="N",
        help="with ZeroMQ: a quarter of the cores of the S-worker's host (default: 4)",
    )


def add_hardware_file(group: Any) -> None:
    """``--hardware``, of every command that takes parts by name."""
    group.add_argument(
        "--hardware", type=Path, metavar="FILE", help="TOML with GPUs, CPUs and NICs of your own"
    )


def _add_goal(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to hold")
    group.add_argument(
        "--latency",
        type=duration,
        metavar="S",
        help="most seconds for a whole sequence, or like 30s, 800ms",
    )
    group.add_argument(
        "--tpot", type=duration, metavar="S", help="most seconds a token, or like 40ms"
    )
    group.add_argument(
        "--survive",
        type=int,
        default=0,
        metavar="K",
        help="R-workers that may be lost (default: 0)",
    )
    group.add_argument(
        "--replicas",
        type=int,
        default=0,
        metavar="N",
        help="copies of every R-worker's KV cache that another keeps, 0 or 1 (default: 0)",
    )
    group.add_argument(
        "--headroom", type=float, default=0.10, metavar="X", help="spare time of R (default: 0.10)"
    )
    group.add_argument("--max-sockets", type=int, metavar="P", help="sockets at hand")
    group.add_argument("--batch", type=int, metavar="B", help="sequences at once; default: chosen")
    group.add_argument("--lanes", type=int, metavar="K", help="lanes in flight; default: chosen")
    group.add_argument(
        "--min-gain",
        type=float,
        metavar="X",
        help="no batch gives this part more tokens/s than the chosen one (default: 0.10; with "
        "--max-sockets 0.01)",
    )
    group.add_argument("--prices", type=Path, metavar="FILE", help="prices an hour, TOML or JSON")


def run_size(args: argparse.Namespace) -> int:
    """Answer one question. Returns the exit code."""
    from cost_model.hardware import Hardware
    from cost_model.plans.question import Prices
    from cost_model.plans.report import as_json, as_text
    from cost_model.plans.size import size
    from cost_model.plans.stages import slowest_stage, stages_json, stages_text
    from cost_model.plot import check_plot, save_plot
    from cost_model.printing import json_text

    if args.plot is not None:
        check_plot(args.plot)
    hardware = Hardware.load(args.hardware)
    prices = None if args.prices is None else Prices.read(args.prices)
    if args.emit is not None and args.transport != "mpi":
        raise ConfigError(
            f"--emit writes an mpirun line, which --transport {args.transport} does not use. "
            "Remove one of them"
        )
    _warn_of_length(args)
    if args.own or "all" in (args.gpu, args.cpu):
        return _print_choices(args, hardware, prices)
    if args.sort is not None:
        raise ConfigError(
            f"--sort {args.sort} orders a table, and this is one plan. Add --gpu all, --cpu all or "
            "--own, or remove it"
        )
    whole, goal, num_stages = read_setup(args, hardware), read_goal(args), _num_stages(args)
    sizing = slowest_stage(
        whole, goal, num_stages, lambda setup, asked: size(setup, asked, hardware, prices)
    )
    if args.json:
        staged = {} if num_stages == 1 else {"stages": stages_json(whole, num_stages, sizing)}
        print(json_text({**as_json(sizing), **staged}))
    else:
        if num_stages > 1:
            print(stages_text(whole, num_stages, sizing), end="\n\n")
        print(as_text(sizing, explain=args.explain))
    if args.plot is not None:
        save_plot(sizing, args.plot)
    if args.emit is not None:
        _emit(sizing, args.emit, args.model)
    return 0 if sizing.feasible else EXIT_INFEASIBLE


def _print_choices(args: argparse.Namespace, hardware: Hardware, prices: Prices | None) -> int:
    """One table instead of one plan. Returns the exit code."""
    from cost_model.plans.choices import (
        arrange,
        check_sort,
        choices_text,
        choose,
        sort_choices,
    )
    from cost_model.plans.size import size
    from cost_model.printing import json_text

    if args.gpu == args.cpu or (args.own and "all" in (args.gpu, args.cpu)):
        raise ConfigError("all is for --gpu or for --cpu, and not with --own. Name the others")
    for option in ("emit", "plot", "requests", "users", "explain"):
        if getattr(args, option):
            raise ConfigError(
                f"--{option} is for one plan, and this is a table. Remove one of them"
            )
    if args.pp != 1:
        raise ConfigError(f"--pp {args.pp} is for one plan, and this is a table. Remove it")
    by = args.sort or "tokens"
    check_sort(by, prices)
    goal = read_goal(args)

    def plan(setup: Setup, asked: Goal) -> Sizing:
        return size(setup, asked, hardware)

    given = vars(args)
    if args.own:
        gpus = args.gpus if args.gpu == "none" else 1  # which refuses more of them
        setup = read_setup(argparse.Namespace(**{**given, "gpus": gpus}), hardware)
        ways = arrange(setup, args.gpus, goal, plan, prices, by)
        sockets = f"{args.max_sockets} x {args.cpu}"
        what = f"{args.gpus} x {args.gpu} and {sockets}"
        if setup.is_without_gpu:
            what = f"{sockets}, those of S-workers counted"
    else:
        option = "gpu" if args.gpu == "all" else "cpu"
        names = hardware.gpus if option == "gpu" else hardware.cpus
        setups = (
            (name, read_setup(argparse.Namespace(**{**given, option: name}), hardware))
            for name in names
        )
        ways = choose(setups, goal, plan, prices, by)
        what = f"each {option.upper()}"
    ways = replace(ways, found=sort_choices(ways.found, by))
    if args.json:
        tree = {"choices": ways.found, "left_out": ways.left_out}
        print(json_text({"format": "fastdecode.choices", "version": 1, **tree}))
    else:
        print(choices_text(ways, f"{args.model} on {what}, by {by}", prices))
    return 0 if ways.found else EXIT_INFEASIBLE


def _num_stages(args: argparse.Namespace) -> int:
    """
    Raises:
        ConfigError: it is out of range, or an option doesn't support stages.
    """
    from cost_model.numbers import whole_number
    from fastdecode.core.config.s_part import MAX_PP

    num_stages = whole_number("pp", args.pp, 1, MAX_PP)
    for option, given in (
        ("--emit", args.emit),
        ("--plot", args.plot),
        ("--prices", args.prices),
        ("--requests", args.requests),
        ("--users", args.users),
    ):
        if num_stages > 1 and given is not None:
            raise ConfigError(
                f"{option} is not supported with --pp {num_stages} yet: it is for one stage. "
                "Remove one of them"
            )
    return num_stages


def read_setup(args: argparse.Namespace, hardware: Hardware) -> Setup:
    """The model, the hardware and the workload that the options name.

    Raises:
        ConfigError: an option makes no sense; names it and what it may be.
    """
    from cost_model.plans.question import Setup
    from cost_model.shapes import read_model
    from cost_model.workload import parse_kv_dtype
    from fastdecode.core.measurement import RProfile, SProfile

    spec = read_model(args.model)
    cpu = _cpu(args.cpu, hardware)
    memory_bytes = None if args.dram_gb is None else _dram_bytes(args.dram_gb)
    gpu, is_without_gpu = _gpu(args.gpu, hardware), False
    if gpu is None:
        gpu, is_without_gpu = _s_worker_cpu(args, cpu, memory_bytes), True
    measured = gpu.dtype if isinstance(gpu, SProfile) else "auto"
    dtype = spec.choose_dtype(measured if args.dtype == "auto" else args.dtype)
    kv_dtype = cpu.kv_dtype if isinstance(cpu, RProfile) else dtype.value
    return Setup(
        spec=spec,
        dtype=dtype,
        kv_dtype=kv_dtype if args.kv_dtype == "auto" else parse_kv_dtype(args.kv_dtype),
        gpu=gpu,
        cpu=cpu,
        nic=_nic(args.nic, hardware),
        workload=_workload(args),
        num_gpus=args.gpus,
        num_nics=args.nics,
        transport=_transport(args),
        memory_bytes_per_socket=memory_bytes,
        keeps_quantised=args.weights == "kept",
        is_without_gpu=is_without_gpu,
    )


def read_part_of_setup(args: argparse.Namespace, prompt_len: int, output_len: int) -> Setup:
    """For commands that have only some of the options of ``size``: the others have their
    defaults. Raises ConfigError as ``read_setup``."""
    from cost_model.hardware import Hardware

    defaults = {
        "cpu": "EPYC 7452", "nic": "100GbE", "nics": 1, "gpus": 1, "dram_gb": None,
        "transport": "mpi", "io_threads": 1, "weights": "decoded", "start_interval": 1,
        "prefix_hit": 0.0,
    }  # fmt: skip
    lengths = {"seq_len": None, "prompt_len": prompt_len, "output_len": output_len}
    given = argparse.Namespace(**{**defaults, **vars(args), **lengths})
    return read_setup(given, Hardware.load(args.hardware))


def read_goal(args: argparse.Namespace) -> Goal:
    """The promises that the options name. Raises ConfigError where they make no sense."""
    from cost_model.plans.question import Goal

    return Goal(
        latency_s=args.latency,
        tpot_s=args.tpot,
        headroom=args.headroom,
        survive=args.survive,
        replicas=args.replicas,
        batch=args.batch,
        users=args.users,
        think_s=args.think_time,
        lanes=args.lanes,
        max_sockets=args.max_sockets,
        requests=args.requests,
        min_gain=args.min_gain,
    )


def _transport(args: argparse.Namespace) -> Transport:
    from cost_model.numbers import whole_number
    from cost_model.transport import MAX_IO_THREADS, TRANSPORTS

    whole_number("io_threads", args.io_threads, 1, MAX_IO_THREADS)
    return replace(TRANSPORTS[args.transport], num_threads=args.io_threads)


def _workload(args: argparse.Namespace) -> Any:
    from cost_model.workload import Workload

    if args.seq_len is not None:
        if args.prompt_len is not None or args.output_len is not None:
            raise ConfigError("give --seq-len, or --prompt-len and --output-len, not both")
        return Workload(0, args.seq_len, args.start_interval, args.prefix_hit)
    if args.output_len is None:
        raise ConfigError(
            "how long are the sequences? Give --seq-len, or --prompt-len and --output-len"
        )
    return Workload(args.prompt_len or 0, args.output_len, args.start_interval, args.prefix_hit)


def _dram_bytes(dram_gb: float) -> int:
    from cost_model.numbers import number_within

    return int(number_within("dram_gb", dram_gb, 0.25, 65536, "number of GB") * 1e9)


def _s_worker_cpu(args: argparse.Namespace, cpu: CpuSource, memory_bytes: int | None) -> Gpu:
    """The socket that the S-worker runs on. Raises ConfigError if its peaks are not known."""
    from cost_model.hardware import Cpu

    if not isinstance(cpu, Cpu):
        raise ConfigError(
            "--gpu none with a measured --cpu: a socket's matrix products are in another profile. "
            "Measure them with: fastdecode calibrate s --device cpu --out s.json, and give --gpu "
            "s.json"
        )
    if args.gpus != 1:
        raise ConfigError(
            f"--gpus {args.gpus}: there is no GPU with --gpu none. Remove one of them"
        )
    return cpu.as_gpu(memory_bytes)


def _gpu(name: str, hardware: Hardware) -> GpuSource | None:
    """Returns None if the S-worker is to run without a GPU."""
    from fastdecode.core.measurement import SProfile

    if name == "none":
        return None
    profile = _profile(name, "--gpu", SProfile, "s")
    return hardware.gpu(name) if profile is None else profile


def _cpu(name: str, hardware: Hardware) -> CpuSource:
    from cost_model.described_cpu import described_cpu, is_described
    from fastdecode.core.measurement import RProfile

    if is_described(name):
        return described_cpu(name, hardware)
    profile = _profile(name, "--cpu", RProfile, "r")
    return hardware.cpu(name) if profile is None else profile


def _nic(name: str, hardware: Hardware) -> NicSource:
    from fastdecode.core.measurement import NetProfile

    profile = _profile(name, "--nic", NetProfile, "net")
    return hardware.nic(name) if profile is None else profile


def _profile(name: str, option: str, kind: type[Any], letter: str) -> Any:
    """The profile at this path; None if ``name`` is no path."""
    from fastdecode.core.measurement import read_profile

    path = Path(name)
    if path.suffix != ".json" and not path.is_file():
        return None
    profile = read_profile(path)
    if not isinstance(profile, kind):
        raise ConfigError(
            f"{option} {name} is a profile of another kind; it needs one of: fastdecode calibrate "
            f"{letter} --out FILE"
        )
    return profile


def _emit(sizing: Sizing, directory: Path, model: str) -> None:
    from cost_model.plans.launch import launch_files

    if sizing.plan is None:
        raise ConfigError("--emit: there is no plan to launch")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in launch_files(sizing, model).items():
            (directory / name).write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"--emit {directory}: can't write there: {explained(error)}") from None
