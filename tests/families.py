"""Random tiny models of every family, drawn by a seed: one line a family."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from checkpoints import VOCAB

_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}  # fmt: skip
_ALPHA = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1,
          "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
_MULTIPLIERS = {
    "embedding_multiplier": (12.0, 3.0), "residual_multiplier": (0.22, 0.7),
    "attention_multiplier": (0.25, 0.1), "logits_scaling": (2.0, 0.3),
}  # fmt: skip
_BOTH = (False, True)


def _experts(
    num: str, inner: str = "moe_intermediate_size", top_k: str = "num_experts_per_tok"
) -> tuple[dict[str, int], ...]:
    """Experts of odd numbers and sizes, by names of options."""
    sizes = ((3, 1, 10), (17, 5, 13), (8, 2, 22), (5, 5, 9), (12, 3, 16))
    return tuple({num: e, top_k: k, inner: m} for e, k, m in sizes)


_GROUPS = tuple(
    {"n_routed_experts": e, "num_experts_per_tok": k, "moe_intermediate_size": m,
     "n_group": groups, "topk_group": kept}
    for e, k, m, groups, kept in (
        (16, 3, 10, 4, 2), (6, 2, 13, 1, 1), (12, 5, 24, 3, 3), (8, 2, 9, 2, 1), (4, 4, 12, 2, 2))
)  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """How to draw tiny models of one family."""

    config: str  # transformers' class
    drawn: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Option → what it may be; under "": several options together."""
    always: Mapping[str, Any] = field(default_factory=dict)
    style: str = "llama"  # how the family calls its sizes
    has_head_dim: bool = True
    has_kv_heads: bool = True
    head_dims: tuple[int, ...] = (10, 12, 20)
    is_part: bool = False  # the language model is a part of a model that sees


FAMILIES: dict[str, Tiny] = {
    "gemma": Tiny("GemmaConfig"),
    "gemma3_text": Tiny("Gemma3TextConfig", {
        "sliding_window": (5, 9), "query_pre_attn_scalar": (10, 20),
        "layer_types": ("FSF", "SSF", "SFS"), "final_logit_softcapping": (None, 9.0)}),
    "granite": Tiny("GraniteConfig", {**_MULTIPLIERS, "attention_bias": _BOTH, "mlp_bias": _BOTH},
                    has_head_dim=False),
    "smollm3": Tiny("SmolLM3Config", {"no_rope_layers": ([1, 0, 1, 1], [0, 1, 0, 1]),
                                      "rope_theta": (2e6, 100.0)}, has_head_dim=False),
    "olmo": Tiny("OlmoConfig", {"clip_qkv": (None, 0.7)}, has_head_dim=False),
    "olmo2": Tiny("Olmo2Config", {"attention_bias": _BOTH}, has_head_dim=False),
    "olmo3": Tiny("Olmo3Config", {
        "sliding_window": (5, 9), "layer_types": (None, "FSF", "SFS"),
        "rope_scaling": (None, _YARN)}, has_head_dim=False),
    "exaone4": Tiny("Exaone4Config", {
        "": ({"sliding_window": None, "layer_types": "FFF"}, {"sliding_window": 7},
             {"sliding_window": 5, "layer_types": "FSF"})}),
    "cohere": Tiny("CohereConfig", {"use_qk_norm": _BOTH, "logit_scale": (0.0625, 2.0),
                                    "attention_bias": _BOTH}, has_head_dim=False),
    "cohere2": Tiny("Cohere2Config", {
        "sliding_window": (5, 9), "layer_types": (None, "FSF", "SFS")}, has_head_dim=False),
    "glm": Tiny("GlmConfig", {"partial_rotary_factor": (0.5, 1.0), "attention_bias": _BOTH}),
    "glm4": Tiny("Glm4Config", {"partial_rotary_factor": (0.5, 1.0), "attention_bias": _BOTH}),
    "seed_oss": Tiny("SeedOssConfig", {"attention_bias": _BOTH, "attention_out_bias": _BOTH,
                                       "mlp_bias": _BOTH}),
    "ernie4_5": Tiny("Ernie4_5Config", {"use_bias": _BOTH}),
    "hunyuan_v1_dense": Tiny("HunYuanDenseV1Config", {
        "attention_bias": _BOTH, "rope_scaling": (None, _ALPHA)}),
    "arcee": Tiny("ArceeConfig", {"attention_bias": _BOTH, "mlp_bias": _BOTH}, has_head_dim=False),
    "apertus": Tiny("ApertusConfig", {"attention_bias": _BOTH, "rope_scaling": (None, _LLAMA3)},
                    has_head_dim=False),
    "ministral3": Tiny("Ministral3Config", {"sliding_window": (None, 9)}, {"rope_parameters": {
        **_YARN, "rope_theta": 1e4, "original_max_position_embeddings": 11,
        "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "qwen3_vl_text": Tiny("Qwen3VLConfig", {"rope_parameters": (
        {"rope_type": "default", "rope_theta": 5e6, "mrope_section": []},)}, is_part=True),
    "qwen2_5_vl_text": Tiny("Qwen2_5_VLConfig", {"rope_parameters": (
        {"rope_type": "default", "rope_theta": 1e6, "mrope_section": []},)},
        is_part=True, has_head_dim=False),
    "starcoder2": Tiny("Starcoder2Config", {"use_bias": _BOTH, "sliding_window": (None, 9)},
                       has_head_dim=False),
    "stablelm": Tiny("StableLmConfig", {
        "use_qkv_bias": _BOTH, "use_parallel_residual": _BOTH,
        "partial_rotary_factor": (0.25, 0.5)}, has_head_dim=False, head_dims=(8, 16)),
    "phi": Tiny("PhiConfig", {"partial_rotary_factor": (0.5, 0.25)},
                {"tie_word_embeddings": False}, has_head_dim=False, head_dims=(8, 16)),
    "gptj": Tiny("GPTJConfig", {"rotary_dim": (4, 6)}, {"tie_word_embeddings": False},
                 style="gpt2"),
    "gpt_bigcode": Tiny("GPTBigCodeConfig", {"multi_query": _BOTH}, style="gpt2"),
    "falcon": Tiny("FalconConfig", {
        "bias": _BOTH,
        "": ({"new_decoder_architecture": True, "num_kv_heads": 2},
             {"new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1},
             {"multi_query": True},
             {"multi_query": True, "parallel_attn": False},
             {"multi_query": False})}, has_head_dim=False, has_kv_heads=False),
    "mpt": Tiny("MptConfig", {"n_heads": (2, 3, 6), "attn_config": (
        {}, {"clip_qkv": 0.8}, {"softmax_scale": 0.4})}, style="mpt"),
    "nemotron": Tiny("NemotronConfig", {"attention_bias": _BOTH, "mlp_bias": _BOTH},
                     head_dims=(8, 16)),
    "qwen3_moe": Tiny("Qwen3MoeConfig", {
        "": _experts("num_experts"), "norm_topk_prob": _BOTH,
        "mlp_only_layers": ([], [1]), "attention_bias": _BOTH}),
    "qwen2_moe": Tiny("Qwen2MoeConfig", {
        "": _experts("num_experts"), "norm_topk_prob": _BOTH, "decoder_sparse_step": (1, 2),
        "shared_expert_intermediate_size": (9, 22), "qkv_bias": _BOTH}, has_head_dim=False),
    "qwen3_vl_moe_text": Tiny("Qwen3VLMoeConfig", {
        "": _experts("num_experts"),
        "rope_parameters": (
            {"rope_type": "default", "rope_theta": 5e6, "mrope_section": []},)}, is_part=True),
    "mixtral": Tiny("MixtralConfig", {
        "": _experts("num_local_experts", "intermediate_size"), "sliding_window": (None, 9)}),
    "olmoe": Tiny("OlmoeConfig", {
        "": _experts("num_experts", "intermediate_size"), "norm_topk_prob": _BOTH,
        "clip_qkv": (None, 0.7)}, has_head_dim=False),
    "flex_olmo": Tiny("FlexOlmoConfig", {
        "": _experts("num_experts", "intermediate_size"), "norm_topk_prob": _BOTH,
        "attention_bias": _BOTH}, has_head_dim=False),
    "cohere2_moe": Tiny("Cohere2MoeConfig", {
        "": _experts("num_experts", "intermediate_size"), "sliding_window": (5, 9),
        "layer_types": (None, "FSF", "SFS"), "first_k_dense_replace": (0, 1, 2),
        "prefix_dense_sliding_window_pattern": (1, 2), "sliding_window_pattern": (2, 3),
        "prefix_dense_intermediate_size": (None, 50), "num_shared_experts": (0, 1, 2),
        "shared_expert_combination_strategy": ("average", "sum"), "norm_topk_prob": _BOTH,
        "expert_selection_fn": ("softmax", "sigmoid"), "rms_norm_eps": (None, 1e-4)}),
    "glm4_moe": Tiny("Glm4MoeConfig", {
        "": _GROUPS, "n_shared_experts": (1, 2), "first_k_dense_replace": (0, 1, 2),
        "norm_topk_prob": _BOTH, "routed_scaling_factor": (1.0, 2.5), "use_qk_norm": _BOTH,
        "attention_bias": _BOTH}),
    "solar_open": Tiny("SolarOpenConfig", {"": _GROUPS, "n_shared_experts": (1, 2),
                                           "norm_topk_prob": _BOTH}),
    "dots1": Tiny("Dots1Config", {
        "": _GROUPS, "n_shared_experts": (1, 2), "first_k_dense_replace": (0, 1),
        "routed_scaling_factor": (1.0, 1.5), "sliding_window": (9,),
        "layer_types": ("FFF", "FSF")}),
    "minimax_m2": Tiny("MiniMaxM2Config", {
        "": _experts("num_local_experts", "intermediate_size"), "rotary_dim": (4, 6)}),
    "ernie4_5_moe": Tiny("Ernie4_5_MoeConfig", {
        "": _experts("moe_num_experts", top_k="moe_k"), "moe_num_shared_experts": (0, 1, 2),
        "moe_layer_start_index": (0, 1), "moe_layer_interval": (1, 2),
        "use_bias": _BOTH}, has_head_dim=False),
    "hunyuan_v1_moe": Tiny("HunYuanMoEV1Config", {
        "": _experts("num_experts", "intermediate_size", top_k="moe_topk"),
        "rope_scaling": (None, _ALPHA)}),
    "hy_v3": Tiny("HYV3Config", {
        "": _experts("num_experts"), "num_shared_experts": (1, 2),
        "router_scaling_factor": (1.0, 2.8), "enable_moe_fp32_combine": _BOTH}),
    "exaone_moe": Tiny("ExaoneMoeConfig", {
        "": _experts("num_experts"), "num_shared_experts": (1, 2), "sliding_window": (5, 9),
        "layer_types": ("FSF", "SSF")}),
    "granitemoe": Tiny("GraniteMoeConfig", {
        **_MULTIPLIERS, "": _experts("num_local_experts", "intermediate_size")},
        has_head_dim=False),
    "granitemoeshared": Tiny("GraniteMoeSharedConfig", {
        **_MULTIPLIERS, "": _experts("num_local_experts", "intermediate_size"),
        "shared_intermediate_size": (7, 12)}, has_head_dim=False),
    "mellum": Tiny("MellumConfig", {
        "": _experts("num_experts"), "sliding_window": (5, 9), "layer_types": ("FSF", "SFS"),
        "norm_topk_prob": _BOTH}),
}  # fmt: skip

FAMILIES |= {
    "gpt_oss": Tiny("GptOssConfig", {
        "": _experts("num_local_experts", "intermediate_size"), "sliding_window": (5, 9),
        "layer_types": (None, "FSF"), "attention_bias": _BOTH, "swiglu_limit": (7.0, 0.8)},
        {"rope_parameters": {**_YARN, "rope_theta": 1e4, "truncate": False}}),
    "llama4_text": Tiny("Llama4TextConfig", {
        "": ({"num_local_experts": 3}, {"num_local_experts": 5, "interleave_moe_layer_step": 2},
             {"num_local_experts": 8, "moe_layers": [0, 2]},
             {"num_local_experts": 4, "num_experts_per_tok": 2},
             {"num_local_experts": 7, "use_qk_norm": False}),
        "no_rope_layers": ([1, 0, 1], [0, 1, 1]), "attention_bias": _BOTH,
        "intermediate_size_mlp": (37, 50)}),
    "afmoe": Tiny("AfmoeConfig", {
        "": _experts("num_experts"), "num_shared_experts": (1, 2), "num_dense_layers": (0, 1, 2),
        "sliding_window": (5, 9), "route_scale": (1.0, 2.5), "mup_enabled": _BOTH,
        "layer_types": ("FSF", "SSF")}),
}  # fmt: skip

FAMILIES |= {
    "laguna": Tiny("LagunaConfig", {
        "": _experts("num_experts"), "shared_expert_intermediate_size": (7, 12),
        "num_attention_heads_per_layer": (None, "MORE"), "gating": (True, "per-element"),
        "moe_router_logit_softcapping": (0.0, 5.0), "moe_routed_scaling_factor": (1.0, 2.5),
        "sliding_window": (5, 9), "layer_types": ("FSF", "SFS"),
        "mlp_layer_types": (["dense", "sparse", "sparse"], ["sparse"] * 3)},
        {"rope_parameters": {
            "full_attention": {**_YARN, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4,
                                  "partial_rotary_factor": 1.0}}}, head_dims=(12, 20)),
}  # fmt: skip

FAMILIES |= {
    "step3p5": Tiny("Step3p7Config", {
        "": _experts("n_routed_experts"), "share_expert_dim": (7, 12),
        "num_sliding_attention_heads": (None, "MORE"), "moe_router_scaling_factor": (1.0, 3.0),
        "sliding_window": (5, 9), "layer_types": ("FSF", "SFS"),
        "mlp_layer_types": (["dense", "sparse", "sparse"], ["sparse", "dense", "sparse"]),
        "swiglu_limits": (None, [0.0, 0.1, 0.3], [0.2, None, 0.4]),
        "swiglu_limits_shared": (None, [0.3, 0.0, 0.1], [0.2, 0.1, None])},
        {"rope_parameters": {
            "full_attention": {**_LLAMA3, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        head_dims=(12, 20), is_part=True),
}  # fmt: skip

_LETTERS = {"F": "full_attention", "S": "sliding_attention"}


def draw_config(family: str, seed: int) -> dict[str, Any]:
    """Options of a tiny model: sizes that nothing divides, and what the family may be."""
    tiny, draw = FAMILIES[family], random.Random(f"{family} {seed}")
    heads, kv_heads = draw.choice(((6, 2), (6, 3), (4, 1), (4, 4)))
    head_dim = draw.choice(tiny.head_dims)
    sizes = {
        "llama": {
            "hidden_size": heads * head_dim, "intermediate_size": draw.choice((33, 52, 80)),
            "num_hidden_layers": 3, "num_attention_heads": heads, "max_position_embeddings": 128,
        },
        "gpt2": {"n_embd": heads * head_dim, "n_layer": 3, "n_head": heads, "n_positions": 128},
        "mpt": {"d_model": 6 * head_dim, "n_layers": 3, "max_seq_len": 128},
    }[tiny.style]  # fmt: skip
    options: dict[str, Any] = {"vocab_size": VOCAB, **_IDS, **sizes}
    if tiny.style == "llama" and tiny.has_kv_heads:
        options["num_key_value_heads"] = kv_heads
    if tiny.style == "llama" and tiny.has_head_dim:
        options |= {"head_dim": head_dim, "hidden_size": draw.choice((24, 40, 72))}
    options["tie_word_embeddings"] = draw.random() < 0.5
    for name, values in tiny.drawn.items():
        drawn = values[seed % len(values)] if name == "" else draw.choice(values)
        options |= drawn if name == "" else {name: drawn}
    if options.get("num_attention_heads_per_layer") == "MORE":
        options["num_attention_heads_per_layer"] = [heads, heads + 2 * kv_heads, heads]
    if options.get("num_sliding_attention_heads") == "MORE":
        options["num_sliding_attention_heads"] = heads + 2 * kv_heads
    options |= tiny.always
    return {
        name: _finished(name, value, head_dim)
        for name, value in options.items()
        if value is not None or name in _NULLS
    }


_NULLS = ("sliding_window", "final_logit_softcapping", "attn_logit_softcapping")
"""Options that may be null and mean something else when they are missing."""


def _finished(name: str, value: Any, head_dim: int) -> Any:
    if name == "layer_types" and isinstance(value, str):
        return [_LETTERS[letter] for letter in value]
    if name == "rope_parameters" and "mrope_section" in value:
        return {**value, "mrope_section": [head_dim // 2 - 2, 1, 1]}
    return value


def config_of(family: str, seed: int) -> str:
    """A tiny model's config.json, without ``architectures``."""
    text: str = _make_config(family, seed).to_json_string(use_diff=False)
    return text


def _make_config(family: str, seed: int) -> Any:
    """transformers' own."""
    tiny = FAMILIES[family]
    options = json.loads(json.dumps(draw_config(family, seed)))
    if tiny.is_part:
        options = {"text_config": options, "vision_config": _SEES[family],
                   "tie_word_embeddings": options["tie_word_embeddings"]}  # fmt: skip
    return getattr(transformers, tiny.config)(**options)


def save_tiny(directory: Path, family: str, seed: int) -> None:
    """A random checkpoint in the Hugging Face layout."""
    tiny = FAMILIES[family]
    config = _make_config(family, seed)
    mapping = (
        transformers.AutoModelForImageTextToText
        if tiny.is_part
        else transformers.AutoModelForCausalLM
    )
    model = mapping.from_config(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *_corrections(model)):
            _draw(name, parameter, generator, offset=family in _OFFSET)
    model.save_pretrained(directory)


_OFFSET = ("gemma", "gemma2", "gemma3_text", "nemotron", "step3p5")
"""Families whose norms add 1 to their weights."""
_SEES = {
    "qwen3_vl_text": {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
                      "out_hidden_size": 16, "num_position_embeddings": 16,
                      "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe_text": {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
                          "out_hidden_size": 16, "num_position_embeddings": 16,
                          "deepstack_visual_indexes": [0]},
    "qwen2_5_vl_text": {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
                        "out_hidden_size": 16, "fullatt_block_indexes": [0]},
    "step3p5": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2,
                "image_size": 56},
}  # fmt: skip


def _corrections(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Of routers, which transformers keeps as buffers."""
    return [(name, buffer) for name, buffer in model.named_buffers() if "correction" in name]


def _draw(name: str, parameter: torch.Tensor, generator: torch.Generator, *, offset: bool) -> None:
    if "norm" in name or ".ln_" in name or parameter.dim() == 1:
        is_weight = name.endswith("weight")
        centre = 1.0 if is_weight and not offset else 0.0
        if name.endswith("sinks"):
            parameter.normal_(0.0, 2.0, generator=generator)
            return
        parameter.normal_(centre, 0.3, generator=generator)
        return
    gain = 1.0 if "embed" in name or "wte" in name else 1.5
    parameter.normal_(0.0, gain / max(parameter.shape[-1], 16) ** 0.5, generator=generator)
