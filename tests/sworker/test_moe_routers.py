"""Routers against transformers' own: which experts, in which order, with which
weights, bit for bit. A family's row makes ours of the options of its config."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from moe_blocks import PLAIN, spec_of
from torch import Tensor, nn

from fastdecode.core.model.config_reader import ConfigReader
from fastdecode.core.model.families import ROWS
from fastdecode.core.model.moe import Moe
from fastdecode.core.model.rows import Row
from sworker.model.moe import route

HIDDEN, NUM_ROWS = 40, 37
Answer = tuple[Tensor, Tensor]
"""Experts and weights, [T, k] each."""


class Case(NamedTuple):
    module: str
    router: str  # class
    config: str
    options: dict[str, Any]
    asks: Callable[[nn.Module, Tensor, Tensor], Answer] | None = None
    """How its answer is got, with x and a correction that it doesn't hold."""

    @property
    def row(self) -> Row:
        family = "step3p5" if self.module == "step3p7" else self.module
        return next(row for row in ROWS if row.family.removesuffix("_text") == family)

    @property
    def moe(self) -> Moe:
        fields = {"moe_intermediate_size": 24, "intermediate_size": 24, **self.options}
        read: Any = self.row.fields["moe"]
        moe: Moe = read(ConfigReader(fields, "config.json"), spec_of(PLAIN, HIDDEN))
        return moe


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


GROUPS = {"n_group": 4, "topk_group": 2}
CASES = [
    Case("qwen3_moe", "Qwen3MoeTopKRouter", "Qwen3MoeConfig",
         {**_moe(17, 5), "norm_topk_prob": True}),
    Case("qwen2_moe", "Qwen2MoeTopKRouter", "Qwen2MoeConfig",
         {**_moe(9, 4), "norm_topk_prob": False}),
    Case("qwen3_vl_moe", "Qwen3VLMoeTextTopKRouter", "Qwen3VLMoeTextConfig", _moe(128, 8)),
    Case("mixtral", "MixtralTopKRouter", "MixtralConfig", _local(8, 2)),
    Case("olmoe", "OlmoeTopKRouter", "OlmoeConfig", {**_moe(64, 8), "norm_topk_prob": False}),
    Case("glm4_moe", "Glm4MoeTopkRouter", "Glm4MoeConfig",
         {**_routed(16, 3), **GROUPS, "norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    Case("dots1", "Dots1TopkRouter", "Dots1Config",
         {**_routed(12, 6), "norm_topk_prob": False, "routed_scaling_factor": 1.5}),
    Case("exaone_moe", "ExaoneMoeTopkRouter", "ExaoneMoeConfig",
         {**_moe(128, 8), "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
          "routed_scaling_factor": 2.5}),
    Case("solar_open", "SolarOpenTopkRouter", "SolarOpenConfig",
         {**_routed(256, 8), "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
          "routed_scaling_factor": 2.5}),
    Case("minimax_m2", "MiniMaxM2TopKRouter", "MiniMaxM2Config", _local(256, 8), with_correction),
    Case("hy_v3", "HYV3TopKRouter", "HYV3Config",
         {**_local(192, 8), "router_scaling_factor": 2.8}, with_correction),
    Case("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", "Ernie4_5_MoeConfig",
         {"moe_num_experts": 64, "moe_k": 6, "moe_norm_min": 1e-2}),
    Case("hunyuan_v1_moe", "HunYuanMoEV1Gate", "HunYuanMoEV1Config",
         {"num_experts": 16, "moe_topk": 4}),
    Case("granitemoe", "GraniteMoeTopKRouter", "GraniteMoeConfig", _local(32, 8)),
    Case("granitemoeshared", "GraniteMoeSharedTopKRouter", "GraniteMoeSharedConfig",
         _local(11, 3)),
    Case("gpt_oss", "GptOssTopKRouter", "GptOssConfig", _local(128, 4)),
    Case("llama4", "Llama4Router", "Llama4TextConfig", _local(16, 1), llama4),
    Case("step3p7", "Step3p7TopKRouter", "Step3p7TextConfig", _local(288, 8)),
    Case("laguna", "LagunaTopKRouter", "LagunaConfig",
         {**_moe(256, 8), "moe_router_logit_softcapping": 5.0}),
    Case("afmoe", "AfmoeTokenChoiceRouter", "AfmoeConfig",
         {**_moe(128, 8), "route_scale": 2.8}, afmoe),
    Case("flex_olmo", "FlexOlmoTopKRouter", "FlexOlmoConfig",
         {**_moe(7, 5), "norm_topk_prob": False}),
    *(Case("cohere2_moe", "Cohere2MoeTopKRouter", "Cohere2MoeConfig",
           {**_moe(12, 5), "expert_selection_fn": score}) for score in ("sigmoid", "softmax")),
    Case("mellum", "MellumTopKRouter", "MellumConfig",
         {**_moe(64, 8), "norm_topk_prob": True}),
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
    corrections = [*(x.flatten() for name, x in held.items() if "correction" in name), correction]
    ours, top_k = case.moe.router, case.moe.top_k
    correction_of = corrections[0] if ours.correction else None
    return route(ours, top_k, x, weight, held.get("bias"), correction_of)


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


def test_every_family_with_experts_is_compared() -> None:
    assert {case.row.family for case in CASES} == {
        row.family for row in ROWS if "moe" in row.fields
    }
