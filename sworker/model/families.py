"""What each family calls its tensors, and how they lie in ours: data only.

A family's map goes from our module to theirs, weight and bias alike. Several
names mean that their outputs lie one after the other in our fused module, in
the order of its ``splits``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Layout: TypeAlias = Literal["rows", "transposed", "heads"]
"""How a checkpoint's matrix lies: output rows as ours; [in, out]; or output
rows ordered by head, then q, k, v."""


@dataclass(frozen=True)
class Source:
    """A checkpoint's module whose layout isn't ours."""

    name: str
    layout: Layout


Names: TypeAlias = "str | tuple[str, ...] | Source"


@dataclass(frozen=True)
class CheckpointNames:
    prefixes: tuple[str, ...]
    """Tried in order: checkpoints of the bare model lack the outermost one."""
    layer: str
    """Prefix of a layer, after one of ``prefixes``; {} is its number."""
    model: Mapping[str, Names]
    layers: Mapping[str, Names]
    head: str = "lm_head"
    """The output projection; never prefixed."""
    harmless: tuple[str, ...] = field(default=())
    """Patterns of full names that older exports contain and nobody needs:
    rotary frequencies, causal masks."""


_ROTARY_MODEL: dict[str, Names] = {"embed_tokens": "embed_tokens", "final_norm": "norm"}
_ROTARY_LAYER: dict[str, Names] = {
    "attn_norm": "input_layernorm",
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": "mlp.down_proj",
}
_ROTARY_HARMLESS = (r".*\brotary_emb\.(inv_freq|cos_cached|sin_cached)",)

_ROTARY = CheckpointNames(
    ("model.", ""), "layers.{}.", _ROTARY_MODEL, _ROTARY_LAYER, harmless=_ROTARY_HARMLESS
)

_PHI3 = CheckpointNames(
    ("model.", ""),
    "layers.{}.",
    _ROTARY_MODEL,
    {**_ROTARY_LAYER, "qkv": "self_attn.qkv_proj", "mlp.up": "mlp.gate_up_proj"},
    harmless=_ROTARY_HARMLESS,
)

_GEMMA2 = CheckpointNames(
    ("model.", ""),
    "layers.{}.",
    _ROTARY_MODEL,
    {
        **_ROTARY_LAYER,
        "attn_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    harmless=_ROTARY_HARMLESS,
)

_OPT = CheckpointNames(
    ("model.decoder.", "decoder.", ""),
    "layers.{}.",
    {
        "embed_tokens": "embed_tokens",
        "embed_positions": "embed_positions",
        "project_in": "project_in",
        "project_out": "project_out",
        "final_norm": "final_layer_norm",
    },
    {
        "attn_norm": "self_attn_layer_norm",
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "mlp.up": "fc1",
        "mlp.down": "fc2",
    },
)

_GPT2 = CheckpointNames(
    ("transformer.", ""),
    "h.{}.",
    {"embed_tokens": "wte", "embed_positions": "wpe", "final_norm": "ln_f"},
    {
        "attn_norm": "ln_1",
        "qkv": Source("attn.c_attn", "transposed"),
        "o": Source("attn.c_proj", "transposed"),
        "mlp_norm": "ln_2",
        "mlp.up": Source("mlp.c_fc", "transposed"),
        "mlp.down": Source("mlp.c_proj", "transposed"),
    },
    harmless=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
)

_NEOX_LAYER: dict[str, Names] = {
    "attn_norm": "input_layernorm",
    "qkv": Source("attention.query_key_value", "heads"),
    "o": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}

_GPT_NEOX = CheckpointNames(
    ("gpt_neox.", ""),
    "layers.{}.",
    {"embed_tokens": "embed_in", "final_norm": "final_layer_norm"},
    _NEOX_LAYER,
    head="embed_out",
    harmless=(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)

_BLOOM = CheckpointNames(
    ("transformer.", ""),
    "h.{}.",
    {
        "embed_tokens": "word_embeddings",
        "embed_norm": "word_embeddings_layernorm",
        "final_norm": "ln_f",
    },
    {
        **_NEOX_LAYER,
        "qkv": Source("self_attention.query_key_value", "heads"),
        "o": "self_attention.dense",
    },
)

CHECKPOINT_NAMES: Mapping[str, CheckpointNames] = {
    "llama": _ROTARY,
    "mistral": _ROTARY,
    "qwen2": _ROTARY,
    "qwen3": _ROTARY,
    "phi3": _PHI3,
    "gemma2": _GEMMA2,
    "opt": _OPT,
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "bloom": _BLOOM,
}
