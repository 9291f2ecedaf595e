"""``fastdecode calibrate``: measure this machine, for ``fastdecode size`` to
plan with.

``s`` measures the S-part of a model on a device and needs torch; ``r`` measures
the R-part of its head shape on this host, ``net`` the way to an R-worker, of an
MPI job or at an address, and back; these do not.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_model.numbers import number_within, whole_number
from cost_model.quantities import seconds_text
from fastdecode.cli.measuring import measuring
from fastdecode.cli.options import add_log_level_option, add_status_option, tell
from fastdecode.cli.parser import add_model
from fastdecode.core.errors import imports_for

if TYPE_CHECKING:
    from fastdecode.core.measurement import RProfile
    from fastdecode.wire.measure import RConnection

MAX_SIZES = 64
MAX_REPEATS = 10_000
LINK_BLOCK_SIZE = 16
"""Tokens in a KV block while a link is measured: a sequence has few, so that
many fit into little memory."""


def add_calibrate(commands: Any) -> None:
    """Add the subcommand to the parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "calibrate",
        help="measure this machine, to plan with `fastdecode size`",
        description="Measure the S-part on a device (s), the R-part on a host (r), or the network "
        "between an S-worker and an R-worker (net), into a profile for `size`.",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    _add_s(kinds)
    _add_r(kinds)
    _add_net(kinds)


def _add_s(kinds: Any) -> None:
    parser = kinds.add_parser(
        "s", help="T(B) of the S-part over batch sizes, and prompts over their lengths"
    )
    parser.set_defaults(run=run_calibrate_s)
    _add_shared(parser, "Hugging Face model directory")
    parser.add_argument(
        "--device", default="cpu", help="cpu, cuda, cuda:1, ..., auto (default: cpu)"
    )
    parser.add_argument(
        "--batches", type=_sizes, metavar="N,N,...", help="batch sizes (default: 1,2,4,...,256)"
    )
    parser.add_argument(
        "--prompts", type=_sizes, metavar="N,N,...", help="prompt lengths (default: 16,64,256,1024)"
    )


def _add_r(kinds: Any) -> None:
    parser = kinds.add_parser(
        "r", help="time of a cached token over sequences and contexts, and the read ceiling"
    )
    parser.set_defaults(run=run_calibrate_r)
    _add_shared(parser, "model directory, config.json, or a name that `size` knows")
    parser.add_argument(
        "--sequences", type=_sizes, metavar="N,N,...", help="on each R-worker (default: 1,4,16,64)"
    )
    parser.add_argument(
        "--contexts", type=_sizes, metavar="N,N,...", help="tokens (default: 64,256,1024,4096)"
    )
    parser.add_argument(
        "--max-memory-gb", type=float, default=2.0, metavar="GB",
        help="while measuring (default: 2)",
    )  # fmt: skip


def _add_net(kinds: Any) -> None:
    parser = kinds.add_parser(
        "net",
        help="round trip, bandwidth and cost of a message to an R-worker",
        description="Measure the way to an R-worker over ZeroMQ (--r-worker), or to the first one "
        "of an MPI job: mpirun -n 1 fastdecode calibrate net ... : -n 1 fastdecode r-worker",
    )
    parser.set_defaults(run=run_calibrate_net)
    _add_common(
        parser, "model directory, config.json, or a name that `size` knows: its head shape is sent"
    )
    parser.add_argument(
        "--batches", type=_sizes, metavar="N,N,...", help="sequences (default: 1,16,64,256,1024)"
    )
    parser.add_argument(
        "--r-worker", metavar="ADDRESS", help="tcp://HOST:PORT of an R-worker that waits for a job"
    )
    parser.add_argument("--key", metavar="FILE", help="the cluster's key, if it is on another host")


def _add_shared(parser: argparse.ArgumentParser, model: str) -> None:
    _add_common(parser, model)
    parser.add_argument("--kv-dtype", default="auto", help="KV cache; auto is --dtype")
    parser.add_argument(
        "--block-size", type=int, default=64, metavar="N", help="tokens in a KV block (default: 64)"
    )
    parser.add_argument(
        "--r-workers", type=int, default=1, metavar="N", help="R-workers of this host (default: 1)"
    )
    parser.add_argument(
        "--r-threads", type=int, metavar="N", help="threads of each; default: the cores shared out"
    )
    parser.add_argument(
        "--kv-memory-gb", type=float, metavar="GB", help="KV cache of each R-worker in earnest"
    )


def _add_common(parser: argparse.ArgumentParser, model: str) -> None:
    add_model(parser, model)
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the profile, JSON")
    parser.add_argument(
        "--dtype", default="auto", help="weights and activations; auto is the checkpoint's"
    )
    parser.add_argument(
        "--repeats", type=int, default=9, metavar="N", help="of each size (default: 9)"
    )
    add_status_option(parser)
    add_log_level_option(parser)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers: 1,8,64"
        ) from None
    if not 1 <= len(sizes) <= MAX_SIZES or sizes[0] < 1 or sizes[-1] > 1 << 20:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be 1 to {MAX_SIZES} whole numbers from 1 to {1 << 20}"
        )
    return sizes


def run_calibrate_s(args: argparse.Namespace) -> int:
    """Measure the S-part. Returns the exit code."""
    from fastdecode.core.config.engine import EngineConfig
    from fastdecode.core.doubts import doubts
    from fastdecode.core.measurement import ENOUGH, write_profile

    whole_number("repeats", args.repeats, 1, MAX_REPEATS)
    config = EngineConfig.of(
        args.model,
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        device=args.device,
        r_workers=args.r_workers,
        r_threads=args.r_threads,
        kv_memory_gb=args.kv_memory_gb,
        block_size=args.block_size,
    )
    with imports_for("fastdecode calibrate s (an S-worker)"):
        from fastdecode.measure.calibrate import SEffort, calibrate_s
    effort = SEffort(args.batches or SEffort.batches, args.prompts or SEffort.prompts, args.repeats)
    with measuring(args, "calibrate s", out=args.out) as say:
        profile = calibrate_s(config, effort, say)
    _warn(doubts(profile))
    write_profile(args.out, profile)
    for point in profile.layer:
        timing = point.timing
        tell(
            f"  T({point.size}) = {seconds_text(timing.median_s)} a layer (spread "
            f"{timing.spread:.1%})"
        )
    tell(
        f"  {ENOUGH:.0%} of the most prompt tokens a second are run {profile.batch_tokens} at a "
        f"time: --max-step-tokens {profile.batch_tokens} more than --max-num-sequences"
    )
    tell(f"wrote {args.out}; use it with: fastdecode size --gpu {args.out}")
    return 0


def run_calibrate_r(args: argparse.Namespace) -> int:
    """Measure the R-part. Returns the exit code."""
    from cost_model.fit import fit_decode
    from cost_model.shapes import read_model
    from fastdecode.core.doubts import doubts
    from fastdecode.core.dtype import DType
    from fastdecode.core.host.cpus import available_cores
    from fastdecode.core.measurement import write_profile
    from rworker.measure import Effort, Host, measure_r_part

    whole_number("repeats", args.repeats, 1, MAX_REPEATS)
    whole_number("r_workers", args.r_workers, 1, 4096)
    whole_number("r_threads", args.r_threads or 1, 1, 4096)
    number_within("max_memory_gb", args.max_memory_gb, 1e-3, 65536, "number of GB")
    spec = read_model(args.model)
    dtype = spec.choose_dtype(args.dtype)
    kv_dtype = (
        dtype
        if args.kv_dtype == "auto"
        else DType.parse(args.kv_dtype, option="kv_dtype", of_kv=True, or_auto=True)
    )
    host = Host(args.r_workers, args.r_threads or max(1, available_cores() // args.r_workers))
    effort = Effort(
        sequences=args.sequences or Effort.sequences,
        contexts=args.contexts or Effort.contexts,
        repeats=args.repeats,
        max_kv_bytes=int(args.max_memory_gb * 1e9) // args.r_workers,
    )
    kv = spec.kv_spec(kv_dtype, args.block_size)
    with measuring(args, "calibrate r", out=args.out) as say:
        say(
            f"R-part: {host.num_workers} R-worker(s) of {host.num_threads} thread(s), KV cache in "
            f"{kv_dtype}"
        )
        profile = measure_r_part(host, kv, spec.attention, dtype, _memory_bytes(args), effort)
    fit = fit_decode(profile.decode)
    ceiling = sorted(profile.read_bytes_per_s)[len(profile.read_bytes_per_s) // 2]
    rate = kv.token_bytes / kv.num_layers / fit.token_s if fit.token_s > 0 else float("inf")
    _warn(doubts(profile, bytes_per_s=rate))
    write_profile(args.out, profile)
    tell(
        f"  R = {seconds_text(fit.token_s)} a cached token and layer ({rate / 1e9:.3g} GB/s of a "
        f"read ceiling of {ceiling / 1e9:.3g}), {seconds_text(fit.sequence_s)} a sequence, "
        f"{seconds_text(fit.call_s)} a call; fit error {fit.relative_error:.1%}"
    )
    _tell_attention_rate(profile, fit.token_s)
    tell(f"wrote {args.out}; use it with: fastdecode size --cpu {args.out}")
    return 0


def _tell_attention_rate(profile: RProfile, token_s: float) -> None:
    """Print what attention computes, beside the part of the peak that ``size`` counts."""
    from cost_model.hardware import Hardware
    from rworker.measure import attention_isa

    isa, group = attention_isa(), profile.num_q_heads // profile.num_kv_heads
    alike = (cpu for cpu in Hardware.load().cpus.values() if isa.startswith(cpu.isa))
    cpu = next(alike, None)
    if cpu is None or token_s <= 0:
        return
    rate = 4 * profile.num_q_heads * profile.head_dim / token_s / 1e9
    share = cpu.attention_peak(profile.kv_dtype, group).value
    tell(
        f"  {rate:.3g} GFLOP/s of attention; by name, size counts at most {share:.0%} of the FMA "
        f"peak at base clock ({cpu.isa}, {profile.kv_dtype}, {group} query heads a KV head)"
    )


def run_calibrate_net(args: argparse.Namespace) -> int:
    """Measure the way to an R-worker. Returns the exit code."""
    from cost_model.shapes import read_model
    from cost_model.stages import LinkModel
    from fastdecode.core.doubts import doubts
    from fastdecode.core.host.machine import this_machine
    from fastdecode.core.measurement import NetProfile, write_profile
    from fastdecode.wire.measure import measure_link

    whole_number("repeats", args.repeats, 1, MAX_REPEATS)
    spec = read_model(args.model)
    dtype = spec.choose_dtype(args.dtype)
    kv, batches = spec.kv_spec(dtype, LINK_BLOCK_SIZE), args.batches or (1, 16, 64, 256, 1024)
    with _r_worker(args) as (connection, transport), measuring(args, "calibrate net", out=args.out):
        times = measure_link(
            connection, kv, spec.attention[0], dtype, batches, repeats=args.repeats
        )
    machine = this_machine("network", ("numpy", "mpi4py", "fastdecode"))
    profile = NetProfile(machine, transport, times.transfer, times.round_trip, times.message)
    _warn(doubts(profile))
    write_profile(args.out, profile)
    link = LinkModel.from_profile(profile)
    tell(
        f"  round trip {seconds_text(link.round_trip_s)}, {link.bytes_per_s / 1e9:.3g} GB/s each "
        f"way, a message costs the S-worker's thread {seconds_text(link.message_s)}"
    )
    tell(f"wrote {args.out}; use it with: fastdecode size --nic {args.out}")
    return 0


@contextlib.contextmanager
def _r_worker(args: argparse.Namespace) -> Iterator[tuple[RConnection, str]]:
    """The R-worker at the address, which then waits for its job, or the first of this MPI
    job, which then ends; and the transport's name."""
    from fastdecode.core.config.groups import Cluster
    from fastdecode.engine.setup import workers

    silence_s = Cluster.worker_silence_s
    if args.r_worker is None:
        from fastdecode.wire.mpi import joining
        from fastdecode.wire.mpi.roles import StageRanks

        reached = workers.reach_stage_ranks(0, StageRanks(1), silence_s=silence_s)
        transport = f"MPI ({joining.join().library})"
    else:
        Cluster(r_worker_addresses=(args.r_worker,), key=args.key)
        transport = "ZeroMQ" if args.key is None else "ZeroMQ, encrypted"
        reached = workers.reach_addresses(
            [args.r_worker], key_file=args.key, silence_s=silence_s, ends_them=False
        )
    try:
        yield reached.hub.connections[0], transport
    finally:
        reached.close((), 5.0)


def _warn(found: Sequence[str]) -> None:
    """Before a profile is written that nobody should plan with."""
    for each in found:
        tell(f"warning: {each}")
    if found:
        tell(
            "warning: the machine was busy, or too little was measured: measure again on an idle "
            "machine, with more --repeats, before you plan with this profile"
        )


def _memory_bytes(args: argparse.Namespace) -> int:
    """Of each R-worker's KV cache: as given, or what R-workers take by default."""
    from fastdecode.core.host.machine import default_kv_bytes

    if args.kv_memory_gb is None:
        return default_kv_bytes(args.r_workers)
    return int(number_within("kv_memory_gb", args.kv_memory_gb, 1e-3, 1e6, "number of GB") * 1e9)
