"""What a checkpoint calls its tensors, and how they lie in our modules: data only, read by
``sworker.load.weights``.

A map goes from our module to theirs, weight and bias alike. Several names mean that their outputs
lie one after the other in our fused module, in the order of its ``splits``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

Layout: TypeAlias = Literal["rows", "transposed", "heads", "alternating", "transposed_alternating"]
"""How a checkpoint's matrix lies: output rows as ours; [in, out]; output rows
ordered by KV head, then its q, k, v; rows of gate and up that alternate; or
such columns. Of a stack, [experts, …], each of its matrices."""


@dataclass(frozen=True)
class Source:
    """A checkpoint's module whose layout isn't ours, or whose tensors aren't
    called weight and bias."""

    name: str
    layout: Layout = "rows"
    weight: str = ".weight"
    bias: str = ".bias"

    def tensor(self, parameter: str) -> str:
        """The tensor that fills our parameter of this name."""
        suffixes = {"weight": self.weight, "bias": self.bias}
        return self.name + suffixes.get(parameter, f".{parameter}")


@dataclass(frozen=True)
class PerExpert:
    """One module for each expert, {} is its number; several are fused."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Either:
    """Names of one module, of which a checkpoint has the ones or the others; or
    layouts of one tensor, of which its shape says which it is."""

    names: tuple[Names, ...]


Names: TypeAlias = "str | tuple[str, ...] | Source | PerExpert | Either"


@dataclass(frozen=True)
class CheckpointNames:
    prefixes: tuple[str, ...]
    """Tried in order: checkpoints of the bare model lack the outermost one."""
    layer: str  # prefix of a layer, after one of ``prefixes``; {} is its number
    model: Mapping[str, Names]
    layers: Mapping[str, Names]
    head: Names = "lm_head"  # the output projection; never prefixed
    harmless: tuple[str, ...] = field(default=())
    """Patterns of full names of tensors that older exports contain, and that are not needed:
    rotary frequencies, causal masks."""

    def derive(
        self,
        layers: Mapping[str, Names] | None = None,
        *,
        model: Mapping[str, Names] | None = None,
        prefixes: tuple[str, ...] | None = None,
        harmless: tuple[str, ...] = (),
    ) -> CheckpointNames:
        """These names, but for the ones that are given, and more harmless ones."""
        return replace(
            self,
            layers={**self.layers, **(layers or {})},
            model={**self.model, **(model or {})},
            prefixes=prefixes or self.prefixes,
            harmless=(*self.harmless, *harmless),
        )

    def of_text_part(self) -> CheckpointNames:
        """The same where the model is a part of one that sees or hears; its
        other parts are harmless."""
        return replace(
            self,
            prefixes=("model.language_model.", "language_model.model.", *self.prefixes),
            head=Either(("lm_head", "language_model.lm_head")),
            harmless=(*self.harmless, _OTHER_PARTS),
        )


_OTHER_PARTS = (
    r"(model\.)?(visual|vision_tower|vision_model|vision_encoder|multi_modal_projector|"
    r"mm_projector|patch_merger|audio_tower|embed_vision|embed_audio)\..*"
)


_MODEL: dict[str, Names] = {"embed_tokens": "embed_tokens", "final_norm": "norm"}
_LAYER: dict[str, Names] = {
    "attn_norm": "input_layernorm",
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm", "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": "mlp.down_proj",
}  # fmt: skip
_HARMLESS = (r".*\brotary_emb\.(inv_freq|cos_cached|sin_cached)",)

LLAMA = CheckpointNames(("model.", ""), "layers.{}.", _MODEL, _LAYER, harmless=_HARMLESS)

PHI3 = LLAMA.derive({"qkv": "self_attn.qkv_proj", "mlp.up": "mlp.gate_up_proj"})

GEMMA2 = LLAMA.derive(
    {
        "attn_out_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
)  # fmt: skip

OPT = CheckpointNames(
    ("model.decoder.", "decoder.", ""), "layers.{}.",
    {
        "embed_tokens": "embed_tokens", "embed_positions": "embed_positions",
        "project_in": "project_in", "project_out": "project_out", "final_norm": "final_layer_norm",
    },
    {
        "attn_norm": "self_attn_layer_norm",
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": "self_attn.out_proj", "mlp_norm": "final_layer_norm", "mlp.up": "fc1",
        "mlp.down": "fc2",
    },
)  # fmt: skip

GPT2 = CheckpointNames(
    ("transformer.", ""), "h.{}.",
    {"embed_tokens": "wte", "embed_positions": "wpe", "final_norm": "ln_f"},
    {
        "attn_norm": "ln_1", "qkv": Source("attn.c_attn", "transposed"),
        "o": Source("attn.c_proj", "transposed"), "mlp_norm": "ln_2",
        "mlp.up": Source("mlp.c_fc", "transposed"), "mlp.down": Source("mlp.c_proj", "transposed"),
    },
    harmless=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
)  # fmt: skip

_NEOX_LAYER: dict[str, Names] = {
    "attn_norm": "input_layernorm", "qkv": Source("attention.query_key_value", "heads"),
    "o": "attention.dense", "mlp_norm": "post_attention_layernorm", "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}  # fmt: skip

GPT_NEOX = CheckpointNames(
    ("gpt_neox.", ""), "layers.{}.", {"embed_tokens": "embed_in", "final_norm": "final_layer_norm"},
    _NEOX_LAYER, head="embed_out",
    harmless=(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)  # fmt: skip

BLOOM = CheckpointNames(
    ("transformer.", ""), "h.{}.",
    {
        "embed_tokens": "word_embeddings", "embed_norm": "word_embeddings_layernorm",
        "final_norm": "ln_f",
    },
    {
        **_NEOX_LAYER, "qkv": Source("self_attention.query_key_value", "heads"),
        "o": "self_attention.dense",
    },
)  # fmt: skip

FALCON = BLOOM.derive(
    {
        "attn_norm": Either(("input_layernorm", "ln_attn")),
        "mlp_norm": Either(("post_attention_layernorm", "ln_mlp")),
    }
)

MPT = CheckpointNames(
    ("transformer.", ""), "blocks.{}.", {"embed_tokens": "wte", "final_norm": "norm_f"},
    {
        "attn_norm": "norm_1", "qkv": "attn.Wqkv", "o": "attn.out_proj", "mlp_norm": "norm_2",
        "mlp.up": "ffn.up_proj", "mlp.down": "ffn.down_proj",
    },
)  # fmt: skip

BRANCH = LLAMA.derive(
    {"attn_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
)


# --- Mixtures of experts


def _mlp(name: str) -> tuple[str, str]:
    return (f"{name}.gate_proj", f"{name}.up_proj")


def with_experts(
    base: CheckpointNames,
    *,
    router: str = "mlp.gate",
    correction: str = "mlp.gate.e_score_correction_bias",
    shared: str = "mlp.shared_experts",
    experts: tuple[str, str, str] = (
        "mlp.experts.{}.gate_proj",
        "mlp.experts.{}.up_proj",
        "mlp.experts.{}.down_proj",
    ),
    layers: Mapping[str, Names] | None = None,
) -> CheckpointNames:
    """A family's names, and those of its experts: of the gate, the up and the
    down projection of each, which transformers also keeps in stacks."""
    stack = "mlp.experts"
    return base.derive(
        {
            "mlp.router": router,
            "mlp.correction": Source(correction, weight=""),
            "mlp.experts.up": Either(
                (PerExpert(experts[:2]), Source(f"{stack}.gate_up_proj", weight=""))
            ),
            "mlp.experts.down": Either(
                (PerExpert(experts[2:]), Source(f"{stack}.down_proj", weight=""))
            ),
            "mlp.shared.up": _mlp(shared),
            "mlp.shared.down": f"{shared}.down_proj",
            "mlp.shared_gate": f"{shared}_gate",
            **(layers or {}),
        },
        harmless=(r"(model\.)?mtp\..*",),
    )  # fmt: skip


QWEN_MOE = with_experts(LLAMA, shared="mlp.shared_expert")

_W123 = "block_sparse_moe.experts.{}."
MIXTRAL = with_experts(
    LLAMA, router="block_sparse_moe.gate", correction="block_sparse_moe.e_score_correction_bias",
    experts=(f"{_W123}w1", f"{_W123}w3", f"{_W123}w2"),
)  # fmt: skip

FLEX_OLMO = with_experts(BRANCH)

GLM_MOE = with_experts(LLAMA)

ERNIE_MOE = with_experts(LLAMA, correction="mlp.moe_statics.e_score_correction_bias")

_GRANITE_SHARED: dict[str, Names] = {
    "mlp.experts.up": "block_sparse_moe.input_linear",
    "mlp.experts.down": "block_sparse_moe.output_linear",
    "mlp.shared.up": "shared_mlp.input_linear", "mlp.shared.down": "shared_mlp.output_linear",
}  # fmt: skip
GRANITE_MOE = with_experts(LLAMA, router="block_sparse_moe.router.layer", layers=_GRANITE_SHARED)

GPT_OSS = with_experts(
    LLAMA, router="mlp.router",
    layers={
        "mlp.experts.up": Source(
            "mlp.experts.gate_up_proj", "transposed_alternating", weight="", bias="_bias"
        ),
        "mlp.experts.down": Source("mlp.experts.down_proj", "transposed", weight="", bias="_bias"),
    },
)  # fmt: skip

_TRANSPOSED = {
    "mlp.experts.up": Source("mlp.experts.gate_up_proj", "transposed", weight=""),
    "mlp.experts.down": Source("mlp.experts.down_proj", "transposed", weight=""),
}
QWEN_VL_MOE = with_experts(
    LLAMA,
    layers={
        name: Either((_TRANSPOSED[name], replace(_TRANSPOSED[name], layout="rows")))
        for name in _TRANSPOSED
    },
)

LLAMA4 = with_experts(
    LLAMA, router="feed_forward.router", shared="feed_forward.shared_expert",
    layers={
        "mlp.up": _mlp("feed_forward"), "mlp.down": "feed_forward.down_proj",
        "mlp.experts.up": Source("feed_forward.experts.gate_up_proj", "transposed", weight=""),
        "mlp.experts.down": Source("feed_forward.experts.down_proj", "transposed", weight=""),
    },
)  # fmt: skip

AFMOE = with_experts(
    LLAMA, router="mlp.router.gate", correction="mlp.expert_bias",
    layers={
        "attn_out_norm": "post_attention_layernorm", "mlp_norm": "pre_mlp_layernorm",
        "mlp_out_norm": "post_mlp_layernorm", "gate.proj": "self_attn.gate_proj",
    },
)  # fmt: skip

LAGUNA = with_experts(
    LLAMA, correction="mlp.experts.e_score_correction_bias", shared="mlp.shared_expert",
    layers={"gate.proj": "self_attn.g_proj"},
)  # fmt: skip

STEP = with_experts(
    LLAMA, router="moe.gate", correction="moe.router_bias", shared="share_expert",
    layers={
        "mlp.experts.up": ("moe.gate_proj", "moe.up_proj"), "mlp.experts.down": "moe.down_proj",
        "gate.proj": "self_attn.g_proj",
    },
).derive(harmless=(r"(model\.)?vit_large_projector\..*",))  # fmt: skip
