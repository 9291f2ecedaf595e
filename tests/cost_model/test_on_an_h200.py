"""What the cost model says of an H200 by its datasheet, beside what was measured on one
(`benchmarks/results/gpu_first.json`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cost_model.hardware import Hardware
from cost_model.stages import SPartModel
from cost_model.workload import TokenCosts
from fastdecode.core.dtype import DType
from fastdecode.core.model.families import read_model_spec

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KEPT = json.loads((BENCHMARKS / "results" / "gpu_first.json").read_text())


@pytest.fixture(scope="module")
def s_part() -> SPartModel:
    config = _engine_config()
    costs = TokenCosts(read_model_spec(config, name="8b"), DType.BFLOAT16, "bfloat16")
    return SPartModel.from_gpu(Hardware.load().gpu("H200"), 1, costs)


def _engine_config() -> dict[str, Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import gpu
    finally:
        sys.path.remove(str(BENCHMARKS))
    return dict(gpu.CONFIG)


def rows(step: str, **wanted: object) -> list[dict[str, Any]]:
    found = KEPT["steps"][step]["rows"]
    return [row for row in found if all(row.get(key) == value for key, value in wanted.items())]


def test_it_was_measured_on_an_h200() -> None:
    (gpu,) = rows("facts", fact="GPU")
    assert gpu["value"]["name"] == "NVIDIA H200" and not KEPT["smoke"]


@pytest.mark.parametrize("num_rows", [64, 256, 512])
def test_a_layer(s_part: SPartModel, num_rows: int) -> None:
    (row,) = rows("layers", model="8b", rows=num_rows, how="graph")
    assert s_part.layer_s(num_rows) * 1e6 == pytest.approx(row["layer_us"], rel=0.10)


@pytest.mark.parametrize("num_sequences", [16, 64, 256])
def test_a_decode_step_with_kv_on_the_gpu(s_part: SPartModel, num_sequences: int) -> None:
    """All layers and their attention, without the logits."""
    (row,) = rows("whole_steps", kv="bfloat16", sequences=num_sequences, how="one graph")
    step_s = s_part.num_layers * s_part.layer_s(num_sequences)
    step_s += _read_s(s_part, num_sequences * row["context"])
    assert step_s * 1e6 == pytest.approx(row["step_us"], rel=0.15)


def test_a_step_of_a_whole_engine(s_part: SPartModel) -> None:
    row = next(x for x in rows("engines", engine="KV on the GPU") if "decode_step_ms" in x)
    count, context = row["requests"], row["prompt"] + row["new"] / 2
    step_s = s_part.num_layers * s_part.t_of_b(count) + _read_s(s_part, count * context)
    assert step_s * 1e3 == pytest.approx(row["decode_step_ms"], rel=0.10)


def _read_s(s_part: SPartModel, num_tokens: float) -> float:
    """Of K and V in bfloat16."""
    token_bytes = 2 * 2 * 32 * 8 * 128
    return num_tokens * token_bytes / s_part.kv_read_bytes_per_s
