"""Is the cost model right? Predicted against measured decode steps on this
machine.

    python benchmarks/sizing.py --out benchmarks/results/sizing.json

Writes a random Llama-shaped checkpoint, calibrates the S-part and the R-part as
``fastdecode calibrate`` does, predicts a decode step for each configuration of
batch, context, KV dtype and R-workers, runs it in the engine, and compares. All
of it is done in several rounds. Times are those that a tenth of the repeats
undercut, in the calmest round, measured and predicted alike: what other
processes take away is left out on both sides. The file holds every round, and
medians too.

R-workers are threads of the S-worker's process, with one lane: a step is S-part
plus R-part. The S-part and each R-worker have one thread, as many R-workers as
cores: with more, the S-part's threads would spin on cores that R-workers
compute on, which neither part's calibration knows of, and which no deployment
should do.

Three rounds take some five minutes. Exit code 1 if fewer than ``--least`` of the twelve steps
are within the tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from provenance import provenance
from random_llama import llama_config, write_checkpoint

from cost_model.predict import System
from cost_model.stages import LinkModel, RPartModel, SPartModel
from cost_model.steady import SteadyBatch, predict_steady
from cost_model.workload import TokenCosts, Workload
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.dtype import DType
from fastdecode.core.measurement import Point, RProfile, SProfile, Timing
from fastdecode.core.model.spec import ModelSpec
from fastdecode.engine.setup.launch import RunningEngine
from fastdecode.measure.calibrate import SEffort, calibrate_s, time_steady_steps
from rworker.measure import Effort, Host, measure_r_part

MODEL = llama_config(
    hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12,
    num_key_value_heads=4, vocab_size=8192,
)  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """One row of the comparison."""

    batch: int
    context_tokens: int
    kv_dtype: str
    r_workers: int


CONFIGURATIONS = (
    *(
        Configuration(b, c, "bfloat16", 1)
        for b, c in ((4, 256), (16, 256), (32, 256), (16, 768), (32, 768))
    ),
    *(Configuration(b, c, "bfloat16", 1) for b, c in ((4, 2048), (8, 2048))),
    *(Configuration(b, c, "float16", 1) for b, c in ((16, 768), (8, 1024))),
    Configuration(16, 1024, "float32", 1),
    *(Configuration(b, c, "bfloat16", 2) for b, c in ((16, 768), (32, 512))),
)
KINDS = tuple(dict.fromkeys((c.kv_dtype, c.r_workers) for c in CONFIGURATIONS))
S_EFFORT = SEffort(batches=(1, 4, 16, 32), prompts=(16, 64), repeats=31)
R_EFFORT = Effort(
    sequences=(1, 4, 16, 32), contexts=(64, 512, 2048), repeats=9, max_kv_bytes=500 << 20
)
NUM_STEPS = 32


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the table there, and Markdown beside it")
    parser.add_argument("--tolerance", type=float, default=0.15)
    parser.add_argument("--least", type=int, default=10, help="steps that are to be within it")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, load_before = time.time(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        spec = write_checkpoint(Path(name), MODEL, "llama-50m")
        rounds = [compare(spec, name) for _ in range(args.rounds)]
    rows = [
        calmest(configuration, [each[configuration] for each in rounds])
        for configuration in CONFIGURATIONS
    ]
    print(table(rows))
    errors = [abs(row["relative_error"]) for row in rows]
    print(f"off by {statistics.median(errors):.1%} in the middle, {max(errors):.1%} at worst")
    if args.out is not None:
        result = {
            **provenance(),
            "load_average": [load_before, os.getloadavg()[0]],
            "seconds": time.time() - started,
        }
        result |= {"rounds": args.rounds, "tolerance": args.tolerance, "rows": rows}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(markdown(rows))
    num_within = sum(error <= args.tolerance for error in errors)
    print(f"{num_within} of {len(errors)} within {args.tolerance:.0%}")
    return 0 if num_within >= args.least else 1


def compare(spec: ModelSpec, model: str) -> dict[Configuration, dict[str, float]]:
    """One round: calibrate, run every configuration, and compare."""
    result = {}
    s_profiles: dict[int, SProfile] = {}
    for kv_dtype, r_workers in KINDS:
        if r_workers not in s_profiles:
            # Every R-worker is a message more for the S-worker's thread.
            s_profiles[r_workers] = calm_s(
                calibrate_s(config_of(model, kv_dtype, r_workers), S_EFFORT, say)
            )
        r_profile = calm_r(calibrate_r(spec, kv_dtype, r_workers))
        costs = TokenCosts(spec, DType.BFLOAT16, kv_dtype)
        system = System(
            s=SPartModel.from_profile(s_profiles[r_workers], costs),
            r=RPartModel.from_profile(r_profile, costs),
            link=LinkModel.within_process(),
            num_nics=1,
            costs=costs,
            workload=Workload(0, 1),
        )
        running = RunningEngine(config_of(model, kv_dtype, r_workers))
        try:
            for c in CONFIGURATIONS:
                if (c.kv_dtype, c.r_workers) == (kv_dtype, r_workers):
                    result[c] = run(running, system, c)
        finally:
            running.close()
    return result


def run(running: RunningEngine, system: System, c: Configuration) -> dict[str, float]:
    """One configuration in the engine, beside what is predicted for it. Seconds."""
    steps = time_steady_steps(running, c.batch, c.context_tokens, NUM_STEPS)
    context, step_s = round(steps.mean_context_tokens), Timing(steps.step_s).calm_s
    predicted = predict_steady(system, SteadyBatch(c.batch, 1, c.r_workers, context))
    say(f"{c}: predicted {1e3 * predicted['step_s']:.2f} ms a step, took {1e3 * step_s:.2f} ms")
    return {
        "predicted_step_s": predicted["step_s"],
        "measured_step_s": step_s,
        "predicted_r_part_s": predicted["r_part_s"],
        "measured_r_part_s": Timing(steps.r_compute_s).calm_s,
        "median_step_s": statistics.median(steps.step_s),
    }


def calmest(configuration: Configuration, rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """A configuration's calmest round, quantity by quantity: what else runs on
    the machine only ever adds time."""
    row = {name: min(each[name] for each in rounds) for name in rounds[0]}
    error = row["predicted_step_s"] / row["measured_step_s"] - 1
    return {**asdict(configuration), **row, "relative_error": error, "rounds": list(rounds)}


def config_of(model: str, kv_dtype: str, r_workers: int) -> EngineConfig:
    return EngineConfig.of(
        model,
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        r_workers=r_workers,
        r_threads=1,
        kv_memory_gb=2.0 / r_workers,
        max_num_sequences=64,
        lanes=1,
        schedule="greedy",
        prefix_cache="off",
    )


def calibrate_r(spec: ModelSpec, kv_dtype: str, r_workers: int) -> RProfile:
    say(f"R-part in {kv_dtype}, {r_workers} R-worker(s)")
    host = Host(r_workers, 1)
    kv = spec.kv_spec(DType.parse(kv_dtype))
    return measure_r_part(host, kv, spec.attention, DType.BFLOAT16, 2 << 30, R_EFFORT)


def calm_s(profile: SProfile) -> SProfile:
    """The profile with each time as it is when little disturbs."""
    parts = {
        name: calm_points(getattr(profile, name)) for name in ("layer", "head", "step", "prefill")
    }
    return replace(profile, **parts)


def calm_points(points: Sequence[Point]) -> tuple[Point, ...]:
    return tuple(Point(point.size, Timing((point.timing.calm_s,))) for point in points)


def calm_r(profile: RProfile) -> RProfile:
    decode = [replace(point, timing=Timing((point.timing.calm_s,))) for point in profile.decode]
    return replace(profile, decode=tuple(decode))


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["batch  context  KV dtype  R-workers   predicted    measured   off by"]
    lines += [
        f"{r['batch']:>5}  {r['context_tokens']:>7}  {r['kv_dtype']:<8}  {r['r_workers']:>9}  "
        f"{1e3 * r['predicted_step_s']:>7.2f} ms  {1e3 * r['measured_step_s']:>7.2f} ms   "
        f"{r['relative_error']:+.1%}"
        for r in rows
    ]
    return "\n".join(lines)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table for a page."""
    head = (
        "| batch | context | KV dtype | R-workers | predicted | measured | off by | its R-part | "
        "measured |"
    )
    lines = [head, re.sub(r"[^|]+", "---", head)]
    lines += [
        f"| {r['batch']} | {r['context_tokens']:,} | {r['kv_dtype']} | {r['r_workers']} "
        f"| {1e3 * r['predicted_step_s']:.2f} ms | {1e3 * r['measured_step_s']:.2f} ms | "
        f"{r['relative_error']:+.1%} "
        f"| {1e3 * r['predicted_r_part_s']:.2f} ms | {1e3 * r['measured_r_part_s']:.2f} ms |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
