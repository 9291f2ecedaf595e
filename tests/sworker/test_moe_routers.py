"""Routers against transformers' own: which experts, in which order, with which
weights, bit for bit."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fastdecode.core.model.config_reader import ConfigReader
from fastdecode.core.model.families import ROWS
from fastdecode.core.model.moe import Moe, Router
from fastdecode.core.model.spec import ModelSpec
from sworker.model.moe import route

HIDDEN, NUM_ROWS = 40, 37
Answer = tuple[Tensor, Tensor]
"""Experts and weights, [T, k] each."""


class Case(NamedTuple):
    module: str
    router: str
    """Class."""
    config: str
    options: dict[str, Any]
    moe: Moe
    asks: Callable[[nn.Module, Tensor, Tensor], Answer] | None = None
    """How its answer is got, with x and a correction that it doesn't hold."""


def moe(num: int, top_k: int, **router: Any) -> Moe:
    return Moe(num, top_k, 24, Router(**router))


def second(router: nn.Module, x: Tensor, correction: Tensor) -> Answer:
    _, weights, experts = router(x)
    return experts, weights


def with_correction(router: nn.Module, x: Tensor, correction: Tensor) -> Answer:
    _, weights, experts = router(x, correction)
    return experts, weights


def afmoe(router: nn.Module, x: Tensor, correction: Tensor) -> Answer:
    _, weights, experts = router(x[None], correction)
    return experts, weights


def llama4(router: nn.Module, x: Tensor, correction: Tensor) -> Answer:
    """It gives all experts' scores, 0 where one wasn't chosen."""
    scores, logits = router(x)
    experts = logits.topk(router.top_k, dim=-1).indices
    return experts, scores.gather(1, experts)


def _moe(num: int, top_k: int) -> dict[str, Any]:
    return {"num_experts": num, "num_experts_per_tok": top_k}


def _local(num: int, top_k: int) -> dict[str, Any]:
    return {"num_local_experts": num, "num_experts_per_tok": top_k}


def _routed(num: int, top_k: int) -> dict[str, Any]:
    return {"n_routed_experts": num, "num_experts_per_tok": top_k}


DEEPSEEK = {
    "score": "sigmoid", "wide": True, "correction": True, "eps": 1e-20, "sorted": False,
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2}
CASES = [
    Case("qwen3_moe", "Qwen3MoeTopKRouter", "Qwen3MoeConfig",
         {**_moe(17, 5), "norm_topk_prob": True}, moe(17, 5, renorm=True, rounded=True)),
    Case("qwen2_moe", "Qwen2MoeTopKRouter", "Qwen2MoeConfig",
         {**_moe(9, 4), "norm_topk_prob": False}, moe(9, 4, rounded=True)),
    Case("qwen3_vl_moe", "Qwen3VLMoeTextTopKRouter", "Qwen3VLMoeTextConfig",
         _moe(128, 8), moe(128, 8, renorm=True, rounded=True)),
    Case("mixtral", "MixtralTopKRouter", "MixtralConfig", _local(8, 2), moe(8, 2, renorm=True)),
    Case("olmoe", "OlmoeTopKRouter", "OlmoeConfig",
         {**_moe(64, 8), "norm_topk_prob": False}, moe(64, 8, rounded=True)),
    Case("glm4_moe", "Glm4MoeTopkRouter", "Glm4MoeConfig",
         {**_routed(16, 3), **GROUPS, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
         moe(16, 3, **DEEPSEEK, groups=4, kept=2, renorm=True, scale=2.5)),
    Case("dots1", "Dots1TopkRouter", "Dots1Config",
         {**_routed(12, 6), "norm_topk_prob": False, "routed_scaling_factor": 1.5},
         moe(12, 6, **DEEPSEEK, scale=1.5)),
    Case("exaone_moe", "ExaoneMoeTopkRouter", "ExaoneMoeConfig",
         {**_moe(128, 8), "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
          "routed_scaling_factor": 2.5}, moe(128, 8, **DEEPSEEK, renorm=True, scale=2.5)),
    Case("solar_open", "SolarOpenTopkRouter", "SolarOpenConfig",
         {**_routed(16, 4), "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
          "routed_scaling_factor": 1.0}, moe(16, 4, **DEEPSEEK, renorm=True)),
    Case("deepseek_v3", "DeepseekV3TopkRouter", "DeepseekV3Config",
         {**_routed(256, 8), "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
          "routed_scaling_factor": 2.5},
         moe(256, 8, **DEEPSEEK, groups=8, kept=4, renorm=True, scale=2.5)),
    Case("minimax_m2", "MiniMaxM2TopKRouter", "MiniMaxM2Config", _local(256, 8),
         moe(256, 8, score="sigmoid", correction=True, renorm=True, sorted=False),
         with_correction),
    Case("hy_v3", "HYV3TopKRouter", "HYV3Config",
         {**_local(192, 8), "router_scaling_factor": 2.8},
         moe(192, 8, **DEEPSEEK, renorm=True, scale=2.8), with_correction),
    Case("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", "Ernie4_5_MoeConfig",
         {"moe_num_experts": 64, "moe_k": 6, "moe_norm_min": 1e-2},
         moe(64, 6, wide=True, correction=True, renorm=True, floor=1e-2, rounded=True)),
    Case("hunyuan_v1_moe", "HunYuanMoEV1Gate", "HunYuanMoEV1Config",
         {"num_experts": 16, "moe_topk": 4}, moe(16, 4, renorm=True, rounded=True)),
    Case("granitemoe", "GraniteMoeTopKRouter", "GraniteMoeConfig", _local(32, 8),
         moe(32, 8, chosen_first=True, rounded=True)),
    Case("granitemoeshared", "GraniteMoeSharedTopKRouter", "GraniteMoeSharedConfig",
         _local(11, 3), moe(11, 3, chosen_first=True, rounded=True)),
    Case("gpt_oss", "GptOssTopKRouter", "GptOssConfig", _local(128, 4),
         moe(128, 4, chosen_first=True, bias=True, rounded=True)),
    Case("llama4", "Llama4Router", "Llama4TextConfig", _local(16, 1),
         moe(16, 1, score="sigmoid", chosen_first=True, rounded=True), llama4),
    Case("step3p7", "Step3p7TopKRouter", "Step3p7TextConfig",
         _local(288, 8),
         moe(288, 8, score="sigmoid", correction=True, renorm=True, sorted=False)),
    Case("laguna", "LagunaTopKRouter", "LagunaConfig",
         {**_moe(256, 8), "moe_router_logit_softcapping": 5.0},
         moe(256, 8, score="sigmoid", correction=True, renorm=True, softcap=5.0, rounded=True)),
    Case("afmoe", "AfmoeTokenChoiceRouter", "AfmoeConfig", {**_moe(128, 8), "route_scale": 2.8},
         moe(128, 8, score="sigmoid", correction=True, renorm=True, eps=1e-20, scale=2.8), afmoe),
    Case("flex_olmo", "FlexOlmoTopKRouter", "FlexOlmoConfig",
         {**_moe(7, 5), "norm_topk_prob": False}, moe(7, 5, rounded=True)),
    Case("cohere2_moe", "Cohere2MoeTopKRouter", "Cohere2MoeConfig",
         {**_moe(12, 5), "expert_selection_fn": "sigmoid"},
         moe(12, 5, score="sigmoid", chosen_first=True, renorm=True, rounded=True, narrow=True)),
    Case("cohere2_moe", "Cohere2MoeTopKRouter", "Cohere2MoeConfig",
         {**_moe(8, 2), "expert_selection_fn": "softmax"},
         moe(8, 2, chosen_first=True, rounded=True)),
    Case("mellum", "MellumTopKRouter", "MellumConfig",
         {**_moe(64, 8), "norm_topk_prob": True}, moe(64, 8, renorm=True, rounded=True)),
]  # fmt: skip


def make(case: Case, dtype: torch.dtype, seed: int) -> tuple[nn.Module, Tensor]:
    """A random router and a correction, and draws that leave few near-ties."""
    package = f"transformers.models.{case.module}"
    config_class = getattr(importlib.import_module(f"{package}.configuration_{case.module}"),
                           case.config)  # fmt: skip
    modeling = importlib.import_module(f"{package}.modeling_{case.module}")
    config = config_class(hidden_size=HIDDEN, **case.options)
    router: nn.Module = getattr(modeling, case.router)(config)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*router.parameters(), *router.buffers()):
        tensor.data.normal_(0, 0.5, generator=generator)
    correction = torch.randn(case.moe.num_experts, generator=generator) * 0.3
    for module in router.modules():
        for name, tensor in (*module.named_parameters(recurse=False),
                             *module.named_buffers(recurse=False)):  # fmt: skip
            is_wide = "correction" in name
            tensor.data = tensor.data.to(torch.float32 if is_wide else dtype)
    return router, correction


def own_answer(case: Case, router: nn.Module, x: Tensor, correction: Tensor) -> Answer:
    held = dict((*router.named_parameters(), *router.named_buffers()))
    weight = next(tensor for name, tensor in held.items() if name.endswith("weight"))
    bias = held.get("bias")
    if case.moe.router.correction:
        named = [tensor for name, tensor in held.items() if "correction" in name]
        correction = named[0].flatten() if named else correction
    return route(
        case.moe.router,
        case.moe.top_k,
        x,
        weight,
        bias,
        correction if case.moe.router.correction else None,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.module)
@torch.inference_mode()
def test_equal_bit_for_bit(case: Case, dtype: torch.dtype) -> None:
    for seed in range(3):
        router, correction = make(case, dtype, seed)
        x = torch.randn(NUM_ROWS, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)
        expected = (case.asks or second)(router, x, correction)
        experts, weights = own_answer(case, router, x, correction)
        assert torch.equal(experts, expected[0])
        assert weights.dtype == expected[1].dtype
        assert torch.equal(weights, expected[1])


def test_rows_of_the_table_read_these_routers() -> None:
    """What a family's row makes of the options is the router that was compared."""
    tested = {case.module: case for case in CASES}
    tested["step3p5"] = tested["step3p7"]  # the text part's model_type
    found = 0
    for row in ROWS:
        case = tested.get(row.family.removesuffix("_text"))
        if not row.has_experts or case is None:
            continue
        fields = {"moe_intermediate_size": 24, "intermediate_size": 24, **case.options}
        read: Any = row.fields["moe"]
        spec = ModelSpec(
            name="", family="", architecture="", dtype=None, vocab_size=1, hidden_size=HIDDEN,
            embedding_size=1, intermediate_size=24, num_layers=1, num_q_heads=1, num_kv_heads=1,
            head_dim=1, attention=(), max_model_len=1, activation="silu", norm="rms", norm_eps=1,
        )  # fmt: skip
        router = read(ConfigReader(fields, "config.json"), spec).router
        assert router == case.moe.router, row.family
        found += 1
    assert found == sum(row.has_experts for row in ROWS)
