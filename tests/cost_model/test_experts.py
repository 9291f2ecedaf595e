"""Models with experts, quantised weights and windows, against cases that were
worked out by hand from these formulas:

* ``E_hit(b) = E · (1 - (1 - k / E)^b)`` experts are read by b rows.
* A layer takes ``max(weights read / bandwidth, 2 · b · weights passed / flops)``
  and 30 us; the head likewise.
* The GPU alone runs as many sequences as have room beside the weights.

They leave activations and logits out, which the product counts: ``WeightsOnly``
does so as well, and one test says how much they are.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from sizing import HARDWARE, setup

from cost_model.plans.placement import best_gpu_only
from cost_model.predict import System
from cost_model.shapes import model_named
from cost_model.stages import LinkModel, SPartModel
from cost_model.workload import TokenCosts, WeightBytes
from fastdecode.core.dtype import DType

FP8 = WeightBytes(1, 1, 2)
MXFP4 = WeightBytes(17 / 32, 2, 2)
EXACT = 0.005


class WeightsOnly(TokenCosts):
    """Only weights count."""

    def layer_activation_bytes(self, layer: int) -> float:
        return 0.0

    @property
    def peak_activation_bytes(self) -> float:
        return 0.0


def costs(
    name: str, kept: WeightBytes | None = None, kind: type[TokenCosts] = WeightsOnly
) -> TokenCosts:
    return kind(model_named(name), DType.BFLOAT16, "bfloat16", kept)


def s_part_ms(name: str, gpu: str, batch: int, kept: WeightBytes | None = None) -> float:
    s = SPartModel.from_gpu(HARDWARE.gpu(gpu), 1, costs(name, kept))
    return 1e3 * s.num_layers * s.t_of_b(batch)


def system(
    name: str,
    gpu: str,
    context: int,
    kept: WeightBytes | None = None,
    cpu: str = "EPYC 9654",
    kind: type[TokenCosts] = WeightsOnly,
) -> System:
    """Contexts are spread evenly around their mean; messages and calls cost nothing."""
    used = costs(name, kept, kind)
    asked = setup(name, gpu, cpu, "400GbE", output=2 * context - 1, kv="bfloat16")
    found = replace(asked, dtype=DType.BFLOAT16).system()
    s = replace(SPartModel.from_gpu(HARDWARE.gpu(gpu), 1, used), host_link_bytes_per_s=None)
    r, link = replace(found.r, call_s=0.0), LinkModel.within_process()
    return replace(found, s=s, r=r, costs=used, link=link)


@pytest.mark.parametrize(
    ("name", "one_token"),
    [("Qwen3 30B-A3B", 3_041_867_776), ("Qwen3 235B-A22B", 21_568_433_664)],
)
def test_weights_that_a_token_passes(name: str, one_token: int) -> None:
    spec = model_named(name)
    head = spec.vocab_size * spec.hidden_size + spec.hidden_size
    layers = map(spec.active_layer_parameters, range(spec.num_layers))
    assert sum(layers) + head == one_token


def test_experts_that_rows_reach() -> None:
    qwen, mixtral = model_named("Qwen3 30B-A3B").moe, model_named("Mixtral 8x7B").moe
    assert qwen is not None and mixtral is not None
    assert qwen.experts_hit(64) == pytest.approx(125.9423, abs=1e-4)
    assert mixtral.experts_hit(4) == pytest.approx(5.4688, abs=1e-4)


def test_the_s_part() -> None:
    assert s_part_ms("Qwen3 30B-A3B", "H100", 100) == pytest.approx(23.959, rel=EXACT)
    assert s_part_ms("gpt-oss 120B", "H100", 512, MXFP4) == pytest.approx(25.397, rel=EXACT)


@pytest.mark.parametrize(
    ("name", "gpu", "context", "kept", "batch", "step_ms", "tokens_per_s"),
    [
        ("Qwen3 30B-A3B", "H100", 2048, None, 100, 31.47, 3178),
        ("gpt-oss 120B", "H200", 8192, MXFP4, 129, 27.79, 4641),
    ],
)
def test_the_gpu_alone(
    name: str, gpu: str, context: int, kept: WeightBytes | None, batch: int, step_ms: float,
    tokens_per_s: float,
) -> None:  # fmt: skip
    alone = best_gpu_only(system(name, gpu, context, kept), float("inf"))
    assert alone is not None and alone.limit == "memory"
    assert alone.batch == batch
    assert 1e3 * alone.tpot_s == pytest.approx(step_ms, rel=EXACT)
    assert alone.tokens_per_s == pytest.approx(tokens_per_s, rel=EXACT)
    counted = best_gpu_only(system(name, gpu, context, kept, kind=TokenCosts), float("inf"))
    assert counted is not None
    assert 0.93 * tokens_per_s < counted.tokens_per_s < tokens_per_s


@pytest.mark.parametrize(
    ("name", "gpu", "cpu", "sockets", "kept", "batch", "context", "step_ms", "rate", "limit"),
    [
        ("Qwen3 30B-A3B", "H100", "EPYC 9654", 16, None, 2048, 2048, 82.24, 24902, "R-part"),
        ("Mixtral 8x22B", "H200", "Xeon 8480+", 8, FP8, 512, 1024, 76.69, 6677, "S-part"),
    ],
)
def test_two_lanes_on_r_workers(
    name: str, gpu: str, cpu: str, sockets: int, kept: WeightBytes | None, batch: int,
    context: int, step_ms: float, rate: float, limit: str,
) -> None:  # fmt: skip
    """Each lane reads the experts again."""
    step = system(name, gpu, context, kept, cpu).predict(batch // 2, 2, sockets)
    assert step.limit == limit
    assert 1e3 * step.step_s == pytest.approx(step_ms, rel=EXACT)
    assert step.tokens_per_s == pytest.approx(rate, rel=EXACT)


def test_weights_as_checkpoints_keep_them() -> None:
    def kept(name: str) -> WeightBytes:
        return WeightBytes.kept(model_named(name), DType.BFLOAT16)

    assert kept("Qwen3 30B-A3B FP8") == FP8
    assert kept("gpt-oss 120B") == MXFP4
    assert kept("Qwen3 235B-A22B NVFP4") == WeightBytes(9 / 16, 9 / 16, 2)
    assert kept("Qwen3 8B") == WeightBytes.decoded(DType.BFLOAT16)
    whole, quantised = costs("Qwen3 235B-A22B FP8"), costs("Qwen3 235B-A22B FP8", FP8)
    assert whole.weight_bytes == 2 * 235_093_634_560
    others = 2 * 151936 * 4096 + 4096  # embedding, head, final norm
    assert quantised.weight_bytes == 235_093_634_560 + others
