"""What each model family's ``config.json`` says, and what it means by its silence.

One function a family: it reads the family's own field names and defaults (those of its Hugging Face config class) and
says the rest by flags. What a config asks for and we don't implement is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypedDict

from fastdecode.core.config_reader import ConfigReader
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, UnsupportedModelError
from fastdecode.core.model_spec import Activation, ModelSpec
from fastdecode.core.rope_spec import MAX_POSITIONS, read_rope
from fastdecode.core.spec import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, AttentionSpec

MAX_VOCAB = 1 << 24
MAX_HIDDEN = 1 << 18
MAX_INTERMEDIATE = 1 << 22

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
_REFUSED_IF_TRUE = {
    "is_encoder_decoder": "an encoder-decoder",
    "add_cross_attention": "cross-attention",
    "use_bidirectional_attention": "bidirectional attention",
    "apply_residual_connection_post_layernorm": "a residual taken after the norm",
    "pruned_heads": "pruned heads",
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"),
        "a mixture of experts",
    ),
}


class _Shape(TypedDict):
    vocab_size: int
    hidden_size: int
    embedding_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class _Family:
    architectures: tuple[str, ...]
    read: Callable[[ConfigReader, ModelSpec, int | None], ModelSpec]


def read_model_spec(
    config: Mapping[str, object],
    name: str,
    generation_config: Mapping[str, object],
    max_model_len: int | None,
) -> ModelSpec:
    """See ``ModelSpec.from_hf``."""
    reader = ConfigReader(config, f"{name}/config.json")
    family, architecture = _find_family(reader)
    _refuse_features(reader)
    shape = _read_shape(reader, family)
    ids = ConfigReader(generation_config, f"{name}/generation_config.json")
    eos = ids.token_ids("eos_token_id") or reader.token_ids("eos_token_id")
    bos = reader.token_ids("bos_token_id")[:1]
    start = ModelSpec(
        name=name,
        family=family,
        architecture=architecture,
        dtype=_read_dtype(reader),
        **shape,
        intermediate_size=4 * shape["hidden_size"],
        attention=(),
        max_model_len=1,
        activation="silu",
        norm="rms",
        norm_eps=1e-6,
        bos_token_id=next((token for token in bos if token < shape["vocab_size"]), None),
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if token < shape["vocab_size"])),
    )
    spec = _FAMILIES[family].read(reader, start, max_model_len)
    return _limit_length(spec, max_model_len)


# --- steps that all families share ------------------------------------------------------------------------------------


def _find_family(reader: ConfigReader) -> tuple[str, str]:
    for name, why in (("auto_map", "code of its own"), ("quantization_config", "quantised weights")):
        if reader.fields.get(name):
            raise _refuse_feature(reader, name, why)
    architectures = reader.strings("architectures")
    model_type = reader.string("model_type", default="") if reader.fields.get("model_type") else ""
    for family, entry in _FAMILIES.items():
        if architectures and architectures[0] in entry.architectures:
            return family, architectures[0]
        if not architectures and model_type == family:
            return family, entry.architectures[0]
    found = architectures[0] if architectures else model_type
    known = ", ".join(entry.architectures[0] for entry in _FAMILIES.values())
    if not found:
        raise reader.refuse("architectures", None, f"a list that starts with one of {known}")
    raise UnsupportedModelError(
        f"{reader.where}: the architecture {found!r} isn't implemented. Those that are: {known}. "
        f"Use a checkpoint of one of these."
    )


def _refuse_features(reader: ConfigReader) -> None:
    for name, feature in _REFUSED_IF_TRUE.items():
        value = reader.fields.get(name)
        if (value and value != 1) or value is True:
            raise _refuse_feature(reader, name, feature)


def _refuse_feature(reader: ConfigReader, name: str, feature: str) -> UnsupportedModelError:
    mends = {
        "auto_map": "Code that comes with a checkpoint is never run. If the weights are those of a plain "
        "architecture that FastDecode implements, delete the field",
        "quantization_config": "Use the checkpoint in float32, float16 or bfloat16 that it was made from",
    }
    mend = mends.get(name, "Use a checkpoint without it")
    return UnsupportedModelError(f"{reader.where}: {name!r} asks for {feature}, which isn't implemented. {mend}.")


def _read_dtype(reader: ConfigReader) -> DType:
    name = reader.string("dtype", "torch_dtype", default="float32")
    try:
        return DType.parse(name)
    except ConfigError:
        rule = f"one of {', '.join(d.value for d in DType)}"
        raise UnsupportedModelError(
            f"{reader.where}: the dtype {name!r} isn't implemented; it must be {rule}."
        ) from None


def _read_shape(reader: ConfigReader, family: str) -> _Shape:
    hidden = reader.integer("hidden_size", "n_embd", "n_embed", high=MAX_HIDDEN)
    heads = reader.integer("num_attention_heads", "n_head", high=MAX_HEADS)
    kv_heads = heads
    if family in _GROUPED:
        kv_heads = reader.integer("num_key_value_heads", high=MAX_HEADS, default=8 if family == "mistral" else heads)
    if heads % kv_heads:
        raise reader.refuse("num_key_value_heads", kv_heads, f"a divisor of the {heads} query heads")
    head_dim = reader.optional_integer("head_dim", high=MAX_HEAD_DIM) if family in _GROUPED else None
    if head_dim is None:
        head_dim = _DEFAULT_HEAD_DIM.get(family)
    if head_dim is None:
        if hidden % heads or not 1 <= hidden // heads <= MAX_HEAD_DIM:
            rule = f"a multiple of the {heads} heads, at most {MAX_HEAD_DIM} dims a head"
            raise reader.refuse("hidden_size", hidden, rule)
        head_dim = hidden // heads
    return _Shape(
        vocab_size=reader.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=hidden,
        embedding_size=hidden,
        num_layers=reader.integer("num_hidden_layers", "n_layer", high=MAX_LAYERS),
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


_GROUPED = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2"})
_DEFAULT_HEAD_DIM = {"qwen3": 128, "gemma2": 256}


def _limit_length(spec: ModelSpec, max_model_len: int | None) -> ModelSpec:
    if max_model_len is None:
        return spec
    if not 1 <= max_model_len <= spec.max_model_len:
        raise ConfigError(
            f"max_model_len={max_model_len} is not within 1..{spec.max_model_len}, what {spec.name} serves"
        )
    return replace(spec, max_model_len=max_model_len)


def _activation(reader: ConfigReader, *names: str, default: str) -> Activation:
    name = reader.string(*names, default=default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{reader.where}: the activation {name!r} isn't implemented; those that are: {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[name]


def _intermediate_size(reader: ConfigReader, *names: str, default: int | None = None) -> int:
    return reader.integer(*names, high=MAX_INTERMEDIATE, default=default)


def _max_positions(reader: ConfigReader, *names: str, default: int | None = None) -> int:
    return reader.integer(*names, high=MAX_POSITIONS, default=default)


def _attention(
    spec: ModelSpec,
    *,
    windows: tuple[int | None, ...] | None = None,
    scales: tuple[float, ...] | None = None,
    alibi_slopes: tuple[float, ...] | None = None,
    logit_softcap: float | None = None,
) -> tuple[AttentionSpec, ...]:
    return tuple(
        AttentionSpec(
            num_q_heads=spec.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=scales[layer] if scales else spec.head_dim**-0.5,
            sliding_window=windows[layer] if windows else None,
            alibi_slopes=alibi_slopes,
            logit_softcap=logit_softcap,
        )
        for layer in range(spec.num_layers)
    )


def _window(reader: ConfigReader, default: int | None = None) -> int | None:
    if "sliding_window" not in reader.fields:
        return default
    return reader.optional_integer("sliding_window", high=(1 << 31) - 1)


def _layer_windows(
    reader: ConfigReader, spec: ModelSpec, window: int | None, default: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """``layer_types`` says which layers see only a window; without it, ``default`` does."""
    kinds = reader.strings("layer_types")
    if not kinds:
        return tuple(window if default(layer) else None for layer in range(spec.num_layers))
    if len(kinds) != spec.num_layers:
        raise reader.refuse("layer_types", kinds, f"a list of {spec.num_layers} entries, one a layer")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"{reader.where}: layers of the type {kind!r} aren't implemented.")
    if window is None and "sliding_attention" in kinds:
        raise reader.refuse("sliding_window", None, "a number of tokens, since layer_types has sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _refuse_layer_types(reader: ConfigReader) -> None:
    if len(set(reader.strings("layer_types"))) > 1:
        raise UnsupportedModelError(f"{reader.where}: this family with different 'layer_types' isn't implemented.")


# --- RMSNorm, rotary embedding, gated MLP -----------------------------------------------------------------------------


def _rotary(
    reader: ConfigReader, spec: ModelSpec, max_len: int | None, *, max_positions: int | None = None
) -> ModelSpec:
    """What Llama, Mistral, Qwen, Phi-3 and Gemma share."""
    positions = _max_positions(reader, "max_position_embeddings", default=max_positions)
    rope, served = read_rope(reader, spec.head_dim, positions, max_len, phi3=spec.family == "phi3")
    return replace(
        spec,
        intermediate_size=_intermediate_size(reader, "intermediate_size"),
        attention=_attention(spec),
        max_model_len=served,
        activation=_activation(reader, "hidden_act", default="silu"),
        norm_eps=reader.number("rms_norm_eps", high=1.0, default=1e-6),
        gated_mlp=True,
        rope=rope,
        tied_embeddings=reader.flag("tie_word_embeddings", False),
    )


def _llama(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    _refuse_layer_types(reader)
    bias = reader.flag("attention_bias", False)
    base = _rotary(reader, spec, max_len, max_positions=2048)
    return replace(base, qkv_bias=bias, o_bias=bias, mlp_bias=reader.flag("mlp_bias", False))


def _mistral(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    _refuse_layer_types(reader)
    windows = (_window(reader, default=4096),) * spec.num_layers
    return replace(_rotary(reader, spec, max_len, max_positions=131072), attention=_attention(spec, windows=windows))


def _qwen2(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    window = _window(reader, default=4096) if reader.flag("use_sliding_window", False) else None
    first = reader.integer("max_window_layers", low=0, high=MAX_LAYERS, default=28)
    windows = _layer_windows(reader, spec, window, lambda layer: layer >= first)
    base = _rotary(reader, spec, max_len, max_positions=32768)
    return replace(base, attention=_attention(spec, windows=windows), qkv_bias=True)


def _qwen3(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    bias = reader.flag("attention_bias", False)
    return replace(_qwen2(reader, spec, max_len), qkv_bias=bias, o_bias=bias, qk_norm=True)


def _phi3(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    _refuse_layer_types(reader)
    windows = (_window(reader),) * spec.num_layers
    base = _rotary(reader, spec, max_len, max_positions=4096)
    eps = reader.number("rms_norm_eps", high=1.0, default=1e-5)
    return replace(base, attention=_attention(spec, windows=windows), norm_eps=eps)


def _gemma2(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    windows = _layer_windows(reader, spec, _window(reader, default=4096), lambda layer: layer % 2 == 0)
    scalar = reader.number("query_pre_attn_scalar", high=1e6, default=256)
    attention = _attention(
        spec,
        windows=windows,
        scales=(scalar**-0.5,) * spec.num_layers,
        logit_softcap=_softcap(reader, "attn_logit_softcapping", 50.0),
    )
    bias = reader.flag("attention_bias", False)
    return replace(
        _rotary(reader, spec, max_len, max_positions=8192),
        attention=attention,
        activation=_activation(reader, "hidden_activation", default="gelu_pytorch_tanh"),
        norm_placement="sandwich",
        norm_offset=1.0,
        qkv_bias=bias,
        o_bias=bias,
        embedding_scale=math.sqrt(spec.hidden_size),
        logit_softcap=_softcap(reader, "final_logit_softcapping", 30.0),
        tied_embeddings=reader.flag("tie_word_embeddings", True),
    )


def _softcap(reader: ConfigReader, name: str, default: float) -> float | None:
    """A missing field is the default; null means no soft-cap."""
    return reader.optional_number(name, high=1e6) if name in reader.fields else default


# --- LayerNorm, plain MLP, biases -------------------------------------------------------------------------------------


def _opt(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    bias = reader.flag("enable_bias", True)
    before = reader.flag("do_layer_norm_before", True)
    positions = _max_positions(reader, "max_position_embeddings", default=2048)
    return replace(
        spec,
        embedding_size=reader.integer("word_embed_proj_dim", high=MAX_HIDDEN, default=spec.hidden_size),
        intermediate_size=_intermediate_size(reader, "ffn_dim"),
        attention=_attention(spec),
        max_model_len=positions,
        activation=_activation(reader, "activation_function", default="relu"),
        norm="layer",
        norm_eps=1e-5,
        norm_placement="pre" if before else "post",
        norm_affine=reader.flag("layer_norm_elementwise_affine", True),
        final_norm=before and not reader.flag("_remove_final_layer_norm", False),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        num_learned_positions=positions + 2,
        learned_position_offset=2,
        tied_embeddings=reader.flag("tie_word_embeddings", True),
    )


def _gpt2(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    positions = _max_positions(reader, "n_positions", "max_position_embeddings", default=1024)
    scale = spec.head_dim**-0.5 if reader.flag("scale_attn_weights", True) else 1.0
    by_layer = reader.flag("scale_attn_by_inverse_layer_idx", False)
    scales = tuple(scale / (layer + 1 if by_layer else 1) for layer in range(spec.num_layers))
    return replace(
        spec,
        intermediate_size=_intermediate_size(reader, "n_inner", default=4 * spec.hidden_size),
        attention=_attention(spec, scales=scales),
        max_model_len=positions,
        activation=_activation(reader, "activation_function", default="gelu_new"),
        norm="layer",
        norm_eps=reader.number("layer_norm_epsilon", high=1.0, default=1e-5),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        num_learned_positions=positions,
        tied_embeddings=reader.flag("tie_word_embeddings", True),
    )


def _gpt_neox(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    positions = _max_positions(reader, "max_position_embeddings", default=2048)
    rope, served = read_rope(reader, spec.head_dim, positions, max_len, partial=0.25)
    bias = reader.flag("attention_bias", True)
    return replace(
        spec,
        intermediate_size=_intermediate_size(reader, "intermediate_size"),
        attention=_attention(spec),
        max_model_len=served,
        activation=_activation(reader, "hidden_act", default="gelu"),
        norm="layer",
        norm_eps=reader.number("layer_norm_eps", high=1.0, default=1e-5),
        parallel_residual=reader.flag("use_parallel_residual", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        rope=rope,
        tied_embeddings=reader.flag("tie_word_embeddings", False),
    )


def _bloom(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    return replace(
        spec,
        intermediate_size=_intermediate_size(reader, "n_inner", default=4 * spec.hidden_size),
        attention=_attention(spec, alibi_slopes=alibi_slopes(spec.num_q_heads)),
        # ALiBi has no last position; BLOOM was trained on 2,048 tokens and says so only sometimes.
        max_model_len=_max_positions(reader, "seq_length", "max_position_embeddings", default=2048),
        activation="gelu_tanh",
        norm="layer",
        norm_eps=reader.number("layer_norm_epsilon", high=1.0, default=1e-5),
        embedding_norm=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tied_embeddings=reader.flag("tie_word_embeddings", True),
    )


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """One slope a head (arXiv 2108.12409, section 3): a geometric sequence for a power of two heads; for other
    counts, the next lower power's sequence, then every second entry of the next higher power's.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-8.0 * i / (2 * power)) for i in range(1, 2 * (num_heads - power) + 1, 2)]
    return tuple(slopes)


_FAMILIES = {
    "llama": _Family(("LlamaForCausalLM",), _llama),
    "mistral": _Family(("MistralForCausalLM",), _mistral),
    "qwen2": _Family(("Qwen2ForCausalLM",), _qwen2),
    "qwen3": _Family(("Qwen3ForCausalLM",), _qwen3),
    "phi3": _Family(("Phi3ForCausalLM",), _phi3),
    "gemma2": _Family(("Gemma2ForCausalLM",), _gemma2),
    "opt": _Family(("OPTForCausalLM", "OPTModel"), _opt),
    "gpt2": _Family(("GPT2LMHeadModel", "GPT2Model"), _gpt2),
    "gpt_neox": _Family(("GPTNeoXForCausalLM",), _gpt_neox),
    "bloom": _Family(("BloomForCausalLM", "BloomModel"), _bloom),
}
