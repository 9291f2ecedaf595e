"""What each model family's ``config.json`` says, and what it means by its
silence.

One function a family: it reads the family's own field names and defaults (those
of its Hugging Face config class) and says the rest by flags. What a config asks
for and we don't implement is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fastdecode.core.model.config_reader import ConfigReader
from fastdecode.core.model.hf_config import (
    MAX_HIDDEN,
    find_family,
    limit_length,
    make_attention,
    read_activation,
    read_dtype,
    read_intermediate_size,
    read_layer_windows,
    read_max_positions,
    read_shape,
    read_window,
    refuse_features,
    refuse_layer_types,
)
from fastdecode.core.model.rope import read_rope
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.spec import MAX_LAYERS


@dataclass(frozen=True)
class _Family:
    architectures: tuple[str, ...]
    """The language model, and the base model that it is made of: a checkpoint
    of either is a language model's if it has an output projection or its token
    embedding is one."""
    read: Callable[[ConfigReader, ModelSpec, int | None], ModelSpec]
    grouped: bool = False
    """Has KV heads fewer than query heads, and a head_dim of its own."""
    default_kv_heads: int | None = None
    default_head_dim: int | None = None


def check_implemented(config: Mapping[str, object], *, name: str) -> None:
    """Find out whether a model can run, from ``config.json`` alone.

    Args:
        config: the parsed file.
        name: the model's directory or name, for messages.

    Raises:
        UnsupportedModelError: the architecture, or a feature that the config
            asks for, isn't implemented.
        CheckpointError: the field that names the architecture is missing.
    """
    reader = ConfigReader(config, f"{name}/config.json")
    find_family(reader, _ARCHITECTURES)
    refuse_features(reader)


def read_model_spec(
    config: Mapping[str, object],
    *,
    name: str,
    generation_config: Mapping[str, object] | None = None,
    max_model_len: int | None = None,
) -> ModelSpec:
    """Read ``config.json``, as any version of transformers has written it.

    Args:
        config: the parsed file.
        name: the model's directory or name, for messages.
        generation_config: ``generation_config.json``; its end-of-text ids have
            precedence.
        max_model_len: a lower length limit than the model's own. For LongRoPE
            models a limit above the original length chooses the long factors;
            without one the model serves its original length.

    Raises:
        UnsupportedModelError: the architecture, or a feature the config asks
            for, isn't implemented.
        CheckpointError: a field is missing or out of range.
        ConfigError: ``max_model_len`` is beyond the model's.
    """
    reader = ConfigReader(config, f"{name}/config.json")
    family, architecture = find_family(reader, _ARCHITECTURES)
    refuse_features(reader)
    entry = _FAMILIES[family]
    shape = read_shape(reader, entry.grouped, entry.default_kv_heads, entry.default_head_dim)
    generation = ConfigReader(generation_config or {}, f"{name}/generation_config.json")
    eos = generation.token_ids("eos_token_id") or reader.token_ids("eos_token_id")
    bos = reader.token_ids("bos_token_id")[:1]
    known = range(shape["vocab_size"])
    start = ModelSpec(
        name=name,
        family=family,
        architecture=architecture,
        dtype=read_dtype(reader),
        **shape,
        intermediate_size=4 * shape["hidden_size"],
        attention=(),
        max_model_len=1,
        activation="silu",
        norm="rms",
        norm_eps=1e-6,
        bos_token_id=next((token for token in bos if token in known), None),
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if token in known)),
    )
    return limit_length(entry.read(reader, start, max_model_len), max_model_len)


# --- RMSNorm, rotary embedding, gated MLP
# -----------------------------------------------------------------------------


def _rotary(
    reader: ConfigReader, spec: ModelSpec, max_len: int | None, *, max_positions: int | None = None
) -> ModelSpec:
    """What Llama, Mistral, Qwen, Phi-3 and Gemma share."""
    positions = read_max_positions(reader, "max_position_embeddings", default=max_positions)
    rope, served = read_rope(reader, spec.head_dim, positions, max_len, phi3=spec.family == "phi3")
    return replace(
        spec,
        intermediate_size=read_intermediate_size(reader, "intermediate_size"),
        attention=make_attention(spec),
        max_model_len=served,
        activation=read_activation(reader, "hidden_act", default="silu"),
        norm_eps=reader.number("rms_norm_eps", high=1.0, default=1e-6),
        gated_mlp=True,
        rope=rope,
        tied_embeddings=reader.flag("tie_word_embeddings", False),
    )


def _llama(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    refuse_layer_types(reader)
    bias = reader.flag("attention_bias", False)
    base = _rotary(reader, spec, max_len, max_positions=2048)
    return replace(base, qkv_bias=bias, o_bias=bias, mlp_bias=reader.flag("mlp_bias", False))


def _mistral(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    refuse_layer_types(reader)
    windows = (read_window(reader, default=4096),) * spec.num_layers
    return replace(
        _rotary(reader, spec, max_len, max_positions=131072),
        attention=make_attention(spec, windows=windows),
    )


def _qwen2(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    window = read_window(reader, default=4096) if reader.flag("use_sliding_window", False) else None
    first = reader.integer("max_window_layers", low=0, high=MAX_LAYERS, default=28)
    windows = read_layer_windows(reader, spec, window, lambda layer: layer >= first)
    base = _rotary(reader, spec, max_len, max_positions=32768)
    return replace(base, attention=make_attention(spec, windows=windows), qkv_bias=True)


def _qwen3(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    bias = reader.flag("attention_bias", False)
    return replace(_qwen2(reader, spec, max_len), qkv_bias=bias, o_bias=bias, qk_norm=True)


def _phi3(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    refuse_layer_types(reader)
    windows = (read_window(reader),) * spec.num_layers
    base = _rotary(reader, spec, max_len, max_positions=4096)
    eps = reader.number("rms_norm_eps", high=1.0, default=1e-5)
    return replace(base, attention=make_attention(spec, windows=windows), norm_eps=eps)


def _gemma2(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    windows = read_layer_windows(
        reader, spec, read_window(reader, default=4096), lambda layer: layer % 2 == 0
    )
    scalar = reader.number("query_pre_attn_scalar", high=1e6, default=256)
    attention = make_attention(
        spec,
        windows=windows,
        scales=(scalar**-0.5,) * spec.num_layers,
        logit_softcap=_softcap(reader, "attn_logit_softcapping", 50.0),
    )
    bias = reader.flag("attention_bias", False)
    return replace(
        _rotary(reader, spec, max_len, max_positions=8192),
        attention=attention,
        activation=read_activation(reader, "hidden_activation", default="gelu_pytorch_tanh"),
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


# --- LayerNorm, plain MLP, biases
# -------------------------------------------------------------------------------------


def _opt(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    bias = reader.flag("enable_bias", True)
    before = reader.flag("do_layer_norm_before", True)
    positions = read_max_positions(reader, "max_position_embeddings", default=2048)
    return replace(
        spec,
        embedding_size=reader.integer(
            "word_embed_proj_dim", high=MAX_HIDDEN, default=spec.hidden_size
        ),
        intermediate_size=read_intermediate_size(reader, "ffn_dim"),
        attention=make_attention(spec),
        max_model_len=positions,
        activation=read_activation(reader, "activation_function", default="relu"),
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
    positions = read_max_positions(reader, "n_positions", "max_position_embeddings", default=1024)
    scale = spec.head_dim**-0.5 if reader.flag("scale_attn_weights", True) else 1.0
    by_layer = reader.flag("scale_attn_by_inverse_layer_idx", False)
    scales = tuple(scale / (layer + 1 if by_layer else 1) for layer in range(spec.num_layers))
    return replace(
        spec,
        intermediate_size=read_intermediate_size(reader, "n_inner", default=4 * spec.hidden_size),
        attention=make_attention(spec, scales=scales),
        max_model_len=positions,
        activation=read_activation(reader, "activation_function", default="gelu_new"),
        norm="layer",
        norm_eps=reader.number("layer_norm_epsilon", high=1.0, default=1e-5),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        num_learned_positions=positions,
        tied_embeddings=reader.flag("tie_word_embeddings", True),
    )


def _gpt_neox(reader: ConfigReader, spec: ModelSpec, max_len: int | None) -> ModelSpec:
    positions = read_max_positions(reader, "max_position_embeddings", default=2048)
    rope, served = read_rope(reader, spec.head_dim, positions, max_len, partial=0.25)
    bias = reader.flag("attention_bias", True)
    return replace(
        spec,
        intermediate_size=read_intermediate_size(reader, "intermediate_size"),
        attention=make_attention(spec),
        max_model_len=served,
        activation=read_activation(reader, "hidden_act", default="gelu"),
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
        intermediate_size=4 * spec.hidden_size,
        attention=make_attention(spec, alibi_slopes=alibi_slopes(spec.num_q_heads)),
        # ALiBi has no last position; BLOOM was trained on 2,048 tokens and says so only sometimes.
        max_model_len=read_max_positions(
            reader, "seq_length", "max_position_embeddings", default=2048
        ),
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
    """One slope a head (arXiv 2108.12409, section 3): a geometric sequence for
    a power of two heads; for other counts, the next lower power's sequence,
    then every second entry of the next higher power's.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-8.0 * i / (2 * power)) for i in range(1, 2 * (num_heads - power) + 1, 2)]
    return tuple(slopes)


_FAMILIES = {
    "llama": _Family(("LlamaForCausalLM", "LlamaModel"), _llama, grouped=True),
    "mistral": _Family(
        ("MistralForCausalLM", "MistralModel"), _mistral, grouped=True, default_kv_heads=8
    ),
    "qwen2": _Family(("Qwen2ForCausalLM", "Qwen2Model"), _qwen2, grouped=True),
    "qwen3": _Family(
        ("Qwen3ForCausalLM", "Qwen3Model"), _qwen3, grouped=True, default_head_dim=128
    ),
    "phi3": _Family(("Phi3ForCausalLM", "Phi3Model"), _phi3, grouped=True),
    "gemma2": _Family(
        ("Gemma2ForCausalLM", "Gemma2Model"), _gemma2, grouped=True, default_head_dim=256
    ),
    "opt": _Family(("OPTForCausalLM", "OPTModel"), _opt),
    "gpt2": _Family(("GPT2LMHeadModel", "GPT2Model"), _gpt2),
    "gpt_neox": _Family(("GPTNeoXForCausalLM", "GPTNeoXModel"), _gpt_neox),
    "bloom": _Family(("BloomForCausalLM", "BloomModel"), _bloom),
}
_ARCHITECTURES = {name: entry.architectures for name, entry in _FAMILIES.items()}
