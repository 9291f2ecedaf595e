"""Is the cost model right? Predicted against measured decode steps on this machine.

    python benchmarks/sizing.py --out benchmarks/results/sizing.json

Writes a random Llama-shaped checkpoint, calibrates the S-part and the R-part as ``fastdecode calibrate`` does, predicts
a decode step for each configuration of batch, context, KV dtype and R-workers, runs it in the engine, and compares.
All of it is done in several rounds, each compared within itself, since what else the machine does changes meanwhile;
the median round counts. Times are those that a tenth of the repeats undercut, measured and predicted alike, so that
what other processes take away is left out on both sides; medians are in the file too. R-workers are threads of the
S-worker's process and share its cores, so there is one lane: a step is S-part plus R-part.

Exit code 1 if a step is off by more than the tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

from cost_model.predict import System
from cost_model.stages import Link, RPart, SPart
from cost_model.steady import SteadyBatch, predict_steady
from cost_model.workload import TokenCosts, Workload
from fastdecode.core.config import EngineConfig
from fastdecode.core.dtype import DType
from fastdecode.core.machine import available_cores
from fastdecode.core.measurement import Point, RProfile, SProfile, Timing
from fastdecode.core.model_spec import ModelSpec
from fastdecode.engine.calibrate import SEffort, calibrate_s
from fastdecode.engine.launch import RunningEngine
from fastdecode.engine.steady import time_steady_steps
from rworker.measure import Effort, Host, measure_r_part

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 8192,
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 4, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """One row of the comparison."""

    batch: int
    context_tokens: int
    kv_dtype: str
    r_workers: int


CONFIGURATIONS = (
    *(Configuration(b, c, "bfloat16", 1) for b, c in ((4, 256), (16, 256), (48, 256), (16, 768), (48, 768))),
    *(Configuration(b, c, "bfloat16", 1) for b, c in ((4, 2048), (16, 2048))),
    *(Configuration(b, c, "float16", 1) for b, c in ((16, 768), (32, 1024))),
    Configuration(16, 1024, "float32", 1),
    *(Configuration(b, c, "bfloat16", 2) for b, c in ((16, 768), (48, 768))),
)
KINDS = tuple(dict.fromkeys((c.kv_dtype, c.r_workers) for c in CONFIGURATIONS))
S_EFFORT = SEffort(batches=(1, 4, 16, 48), prompts=(16, 64), repeats=7)
R_EFFORT = Effort(sequences=(1, 4, 16, 48), contexts=(64, 512, 2048), repeats=5, max_kv_bytes=500 << 20)
NUM_STEPS = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the table there, JSON")
    parser.add_argument("--tolerance", type=float, default=0.15)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    started, load_before = time.time(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        spec = write_checkpoint(Path(name))
        rounds = [compare(spec, name) for _ in range(args.rounds)]
    rows = [middle(configuration, [each[configuration] for each in rounds]) for configuration in CONFIGURATIONS]
    print(table(rows))
    errors = [abs(row["relative_error"]) for row in rows]
    print(f"off by {statistics.median(errors):.1%} in the middle, {max(errors):.1%} at worst")
    if args.out is not None:
        result = {**environment(), "load_average": [load_before, os.getloadavg()[0]], "seconds": time.time() - started}
        result |= {"rounds": args.rounds, "tolerance": args.tolerance, "rows": rows}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if max(errors) <= args.tolerance else 1


def compare(spec: ModelSpec, model: str) -> dict[Configuration, dict[str, float]]:
    """One round: calibrate, run every configuration, and compare."""
    result = {}
    s_profile = calm_s(calibrate_s(config_of(model, *KINDS[0]), S_EFFORT, say))
    for kv_dtype, r_workers in KINDS:
        r_profile = calm_r(calibrate_r(spec, kv_dtype, r_workers))
        costs = TokenCosts(spec, DType.BFLOAT16, kv_dtype)
        system = System(
            s=SPart.from_profile(s_profile, costs),
            r=RPart.from_profile(r_profile, costs),
            link=Link.within_process(),
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
        "relative_error": predicted["step_s"] / step_s - 1,
        "predicted_r_part_s": predicted["r_part_s"],
        "measured_r_part_s": Timing(steps.r_compute_s).calm_s,
        "median_step_s": statistics.median(steps.step_s),
    }


def middle(configuration: Configuration, rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The median round of a configuration, quantity by quantity."""
    return {**asdict(configuration), **{name: statistics.median(r[name] for r in rounds) for name in rounds[0]}}


def config_of(model: str, kv_dtype: str, r_workers: int) -> EngineConfig:
    return EngineConfig(
        model=model,
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        r_workers=r_workers,
        r_threads=threads_of(r_workers),
        kv_memory_gb=2.0 / r_workers,
        max_num_sequences=64,
        lanes=1,
        schedule="greedy",
    )


def threads_of(r_workers: int) -> int:
    return max(1, available_cores() // r_workers)


def calibrate_r(spec: ModelSpec, kv_dtype: str, r_workers: int) -> RProfile:
    say(f"R-part in {kv_dtype}, {r_workers} R-worker(s)")
    host = Host(r_workers, threads_of(r_workers))
    kv = spec.kv_spec(DType.parse(kv_dtype))
    return measure_r_part(host, kv, spec.attention, DType.BFLOAT16, 2 << 30, R_EFFORT)


def calm_s(profile: SProfile) -> SProfile:
    """The profile with each time as it is when little disturbs."""
    parts = {name: calm_points(getattr(profile, name)) for name in ("layer", "head", "step", "prefill")}
    return replace(profile, **parts)


def calm_points(points: Sequence[Point]) -> tuple[Point, ...]:
    return tuple(Point(point.size, Timing((point.timing.calm_s,))) for point in points)


def calm_r(profile: RProfile) -> RProfile:
    decode = [replace(point, timing=Timing((point.timing.calm_s,))) for point in profile.decode]
    return replace(profile, decode=tuple(decode))


def write_checkpoint(directory: Path) -> ModelSpec:
    """A random checkpoint of the model above."""
    hidden, mlp, vocab = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["vocab_size"]
    kv = hidden * MODEL["num_key_value_heads"] // MODEL["num_attention_heads"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    norms = ["model.norm.weight"]
    for i in range(MODEL["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.{name}_proj.weight": (out, hidden)
            for name, out in {"q": hidden, "k": kv, "v": kv}.items()
        }
        shapes |= {f"{layer}.self_attn.o_proj.weight": (hidden, hidden), f"{layer}.mlp.down_proj.weight": (hidden, mlp)}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (mlp, hidden) for name in ("gate", "up")}
        norms += [f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"]
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights |= {name: torch.ones(hidden) for name in norms}
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(MODEL))
    return ModelSpec.from_hf(MODEL, name="llama-100m")


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["batch  context  KV dtype  R-workers   predicted    measured   off by"]
    lines += [
        f"{r['batch']:>5}  {r['context_tokens']:>7}  {r['kv_dtype']:<8}  {r['r_workers']:>9}  "
        f"{1e3 * r['predicted_step_s']:>7.2f} ms  {1e3 * r['measured_step_s']:>7.2f} ms   {r['relative_error']:+.1%}"
        for r in rows
    ]
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": available_cores(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
