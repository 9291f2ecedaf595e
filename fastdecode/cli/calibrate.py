"""``fastdecode calibrate``: measure this machine, for ``fastdecode size`` to plan with."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_model.printing import seconds_text
from fastdecode.cli.options import (
    add_log_level_option,
    add_options,
    add_status_option,
    measuring,
    read_options,
    tell,
)
from fastdecode.cli.parser import add_model
from fastdecode.core.config.options import REQUIRED, option
from fastdecode.core.errors import imports_for

if TYPE_CHECKING:
    from fastdecode.measure.link import RConnection

MAX_SIZES = 64
LINK_BLOCK_SIZE = 16
"""Tokens in a KV block while a link is measured: many short sequences fit into little memory."""
_NAMED = "model directory, config.json, or a name that `size` knows"


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of whole numbers: 1,8,64") from None
    if not 1 <= len(sizes) <= MAX_SIZES or sizes[0] < 1 or sizes[-1] > 1 << 20:
        raise ValueError(f"{text!r} must be 1 to {MAX_SIZES} whole numbers from 1 to {1 << 20}")
    return sizes


def _several(default: str) -> Any:
    return option((), default, read=_sizes, metavar="N,N,...")


@dataclass(frozen=True)
class _Measurement:
    out: Path = option(REQUIRED, "the profile, JSON")
    dtype: str = option(
        "auto", "weights and activations; auto is the checkpoint's", metavar="DTYPE"
    )
    repeats: int = option(9, "measurements of each size", low=1, high=10_000)


@dataclass(frozen=True)
class _PartOfHost(_Measurement):
    kv_dtype: str = option("auto", "KV cache; auto is --dtype", metavar="DTYPE")
    block_size: int = option(64, "tokens in a KV block", low=16, high=256)
    r_workers: int = option(1, "R-workers of this host", low=1, high=4096)
    r_threads: int | None = option(
        None, "threads of each; default: the cores shared out", low=1, high=4096
    )
    kv_memory_gb: float | None = option(
        None, "KV cache of each R-worker in a job", low=1e-3, high=1e6, unit="GB"
    )


@dataclass(frozen=True)
class SMeasurement(_PartOfHost):
    device: str = option("cpu", "cpu, cuda, cuda:1, ..., auto", metavar="DEVICE")
    batches: tuple[int, ...] = _several("batch sizes (default: 1,2,4,...,256)")
    prompts: tuple[int, ...] = _several("prompt lengths (default: 16,64,256,1024)")


@dataclass(frozen=True)
class RMeasurement(_PartOfHost):
    sequences: tuple[int, ...] = _several("sequences on each R-worker (default: 1,4,16,64)")
    contexts: tuple[int, ...] = _several("tokens of a sequence (default: 64,256,1024,4096)")
    max_memory_gb: float = option(2.0, "memory of the K and V", low=1e-3, high=65536, unit="GB")


@dataclass(frozen=True)
class NetMeasurement(_Measurement):
    batches: tuple[int, ...] = _several("sequences of a batch (default: 1,16,64,256,1024)")
    r_worker: str | None = option(
        None, "tcp://HOST:PORT of an R-worker that waits for a job", metavar="ADDRESS"
    )
    key: str | None = option(None, "the cluster's key, if it is on another host", metavar="FILE")


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure the S-part on a device (s), the R-part on a host (r), or the network "
        "between an S-worker and an R-worker (net), into a profile for `size`."
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    s_text = "T(B) of the S-part over batch sizes, and prompts over their lengths"
    r_text = "time of a cached token over sequences and contexts, and the read ceiling"
    net_text = "round trip, bandwidth and cost of a message to an R-worker"
    net_model = f"{_NAMED}: its head shape is sent"
    for name, text, model, group, run in (
        ("s", s_text, "Hugging Face model directory", SMeasurement, run_calibrate_s),
        ("r", r_text, _NAMED, RMeasurement, run_calibrate_r),
        ("net", net_text, net_model, NetMeasurement, run_calibrate_net),
    ):
        kind = kinds.add_parser(name, help=text)
        if name == "net":
            kind.description = (
                "Measure the way to an R-worker over ZeroMQ (--r-worker), or to the first one of "
                "an MPI job: mpirun -n 1 fastdecode calibrate net ... : -n 1 fastdecode r-worker"
            )
        kind.set_defaults(run=run)
        add_model(kind, model)
        add_options(kind, group)
        add_status_option(kind)
        add_log_level_option(kind)


def run_calibrate_s(args: argparse.Namespace) -> int:
    from fastdecode.core.config.engine import EngineConfig
    from fastdecode.core.measurement import ENOUGH

    asked = read_options(args, SMeasurement)
    config = EngineConfig.of(
        args.model,
        dtype=asked.dtype,
        device=asked.device,
        **{each.name: getattr(asked, each.name) for each in fields(_PartOfHost)[3:]},
    )
    with imports_for("fastdecode calibrate s (an S-worker)"):
        from fastdecode.measure.calibrate import SEffort, calibrate_s
    effort = SEffort(
        asked.batches or SEffort.batches, asked.prompts or SEffort.prompts, asked.repeats
    )
    with measuring(args, "calibrate s", out=asked.out) as say:
        profile = calibrate_s(config, effort, say)
    lines = [
        f"T({x.size}) = {seconds_text(x.timing.median_s)} a layer (spread {x.timing.spread:.1%})"
        for x in profile.layer
    ]
    lines.append(
        f"{ENOUGH:.0%} of the most prompt tokens a second are run {profile.batch_tokens} at a "
        f"time: --max-step-tokens {profile.batch_tokens} more than --max-num-sequences"
    )
    return _finish(asked.out, profile, lines, "gpu")


def run_calibrate_r(args: argparse.Namespace) -> int:
    from cost_model.fit import fit_decode
    from cost_model.shapes import read_model
    from fastdecode.core.dtype import DType
    from fastdecode.core.host.cpus import available_cores
    from fastdecode.core.host.machine import default_kv_bytes
    from rworker.measure import Effort, Host, measure_r_part

    asked, spec = read_options(args, RMeasurement), read_model(args.model)
    kv_dtype = dtype = spec.choose_dtype(asked.dtype)
    if asked.kv_dtype != "auto":
        kv_dtype = DType.parse(asked.kv_dtype, option="kv_dtype", of_kv=True, or_auto=True)
    host = Host(asked.r_workers, asked.r_threads or max(1, available_cores() // asked.r_workers))
    effort = Effort(
        sequences=asked.sequences or Effort.sequences,
        contexts=asked.contexts or Effort.contexts,
        repeats=asked.repeats,
        max_kv_bytes=int(asked.max_memory_gb * 1e9) // asked.r_workers,
    )
    kv = spec.kv_spec(kv_dtype, asked.block_size)
    memory_bytes = default_kv_bytes(asked.r_workers)
    if asked.kv_memory_gb is not None:
        memory_bytes = int(asked.kv_memory_gb * 1e9)
    with measuring(args, "calibrate r", out=asked.out) as say:
        say(
            f"R-part: {host.num_workers} R-worker(s) of {host.num_threads} thread(s), KV cache in "
            f"{kv_dtype}"
        )
        profile = measure_r_part(host, kv, spec.attention, dtype, memory_bytes, effort)
    fit = fit_decode(profile.decode)
    ceiling = sorted(profile.read_bytes_per_s)[len(profile.read_bytes_per_s) // 2]
    rate = kv.token_bytes / kv.num_layers / fit.token_s if fit.token_s > 0 else float("inf")
    lines = [
        f"R = {seconds_text(fit.token_s)} a cached token and layer ({rate / 1e9:.3g} GB/s of a "
        f"read ceiling of {ceiling / 1e9:.3g}), {seconds_text(fit.sequence_s)} a sequence, "
        f"{seconds_text(fit.call_s)} a call; fit error {fit.relative_error:.1%}",
    ]
    return _finish(asked.out, profile, lines, "cpu", bytes_per_s=rate)


def run_calibrate_net(args: argparse.Namespace) -> int:
    from cost_model.shapes import read_model
    from cost_model.stages import LinkModel
    from fastdecode.core.host.machine import this_machine
    from fastdecode.core.measurement import NetProfile
    from fastdecode.measure.link import measure_link

    asked, spec = read_options(args, NetMeasurement), read_model(args.model)
    dtype = spec.choose_dtype(asked.dtype)
    kv, batches = spec.kv_spec(dtype, LINK_BLOCK_SIZE), asked.batches or (1, 16, 64, 256, 1024)
    with (
        _r_worker(asked) as (connection, transport),
        measuring(args, "calibrate net", out=asked.out),
    ):
        times = measure_link(
            connection, kv, spec.attention[0], dtype, batches, repeats=asked.repeats
        )
    machine = this_machine("network", ("numpy", "mpi4py", "fastdecode"))
    profile = NetProfile(machine, transport, times.transfer, times.round_trip, times.message)
    link = LinkModel.from_profile(profile)
    line = (
        f"round trip {seconds_text(link.round_trip_s)}, {link.bytes_per_s / 1e9:.3g} GB/s each "
        f"way, a message costs the S-worker's thread {seconds_text(link.message_s)}"
    )
    return _finish(asked.out, profile, [line], "nic")


@contextlib.contextmanager
def _r_worker(asked: NetMeasurement) -> Iterator[tuple[RConnection, str]]:
    """Yield a connection and its transport's name. Then an R-worker at an address waits for its
    job, and that of an MPI job ends."""
    from fastdecode.core.config.groups import Cluster
    from fastdecode.engine.setup import workers

    if asked.r_worker is None:
        from fastdecode.wire.mpi.job import join
        from fastdecode.wire.ranks import StageRanks

        reached = workers.reach_stage_ranks(0, StageRanks(1))
        transport = f"MPI ({join().library})"
    else:
        Cluster(r_worker_addresses=(asked.r_worker,), key=asked.key)
        transport = "ZeroMQ" if asked.key in (None, "none") else "ZeroMQ, encrypted"
        reached = workers.reach_addresses(
            [asked.r_worker],
            key_file=asked.key,
            silence_s=Cluster.worker_silence_s,
            ends_them=False,
        )
    try:
        yield reached.hub.connections[0], transport
    finally:
        reached.close((), 5.0)


def _finish(out: Path, profile: Any, lines: Sequence[str], part: str, **known: float) -> int:
    """Write a profile, and print doubts about it, ``lines``, and how to use it. Return 0."""
    from fastdecode.core.measurement import doubts, write_profile

    found = doubts(profile, **known)
    for doubt in found:
        tell(f"warning: {doubt}")
    if found:
        tell(
            "warning: the machine was busy, or too little was measured: measure again on an idle "
            "machine, with more --repeats, before you plan with this profile"
        )
    write_profile(out, profile)
    for line in lines:
        tell(f"  {line}")
    tell(f"wrote {out}; use it with: fastdecode size --{part} {out}")
    return 0
