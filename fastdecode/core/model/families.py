"""Every model family that runs, one row each, and the reading of
``config.json`` by the row that fits.

A new family is a row here, most often one ``derive`` of a family like it, and
a line in the test of families (see the guide to models).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from fastdecode.core.model import names
from fastdecode.core.model.config_reader import ConfigReader
from fastdecode.core.model.hf_config import (
    MAX_HIDDEN,
    limit_length,
    read_dtype,
    refuse_quantisation,
    text_part,
)
from fastdecode.core.model.refused import refuse_unknown
from fastdecode.core.model.rope import MAX_POSITIONS, RotaryRules
from fastdecode.core.model.rows import (
    Row,
    activation,
    flag,
    integer,
    number,
    optional_number,
    same_as,
    window,
)
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.spec import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS


def check_implemented(
    config: Mapping[str, object], *, name: str, hf_quant_config: Mapping[str, object] | None = None
) -> None:
    """Find out whether a model can run, from its config files alone.

    Args:
        config: ``config.json``, parsed.
        name: the model's directory or name, for messages.
        hf_quant_config: ``hf_quant_config.json``, parsed, where there is one.

    Raises:
        UnsupportedModelError: the architecture, or a feature that the config
            asks for, isn't implemented.
        CheckpointError: the field that names the architecture is missing.
    """
    reader = text_part(ConfigReader(config, f"{name}/config.json"))
    row, _ = find_row(reader)
    refuse_quantisation(reader, hf_quant_config)
    row.refuse_features(reader)


def read_model_spec(
    config: Mapping[str, object],
    *,
    name: str,
    generation_config: Mapping[str, object] | None = None,
    hf_quant_config: Mapping[str, object] | None = None,
    max_model_len: int | None = None,
) -> ModelSpec:
    """Read ``config.json``, as any version of transformers has written it.

    Args:
        config: the parsed file. Of a model with several parts (``text_config``)
            the text part is read.
        name: the model's directory or name, for messages.
        generation_config: ``generation_config.json``; its end-of-text ids have
            precedence.
        hf_quant_config: ``hf_quant_config.json``: some exports say only there
            that weights are quantised.
        max_model_len: a lower length limit than the model's own. For LongRoPE
            models a limit above the original length chooses the long factors;
            without one the model serves its original length.

    Raises:
        UnsupportedModelError: the architecture, or a feature the config asks
            for, isn't implemented.
        CheckpointError: a field is missing or out of range.
        ConfigError: ``max_model_len`` is beyond the model's.
    """
    reader = text_part(ConfigReader(config, f"{name}/config.json"))
    row, architecture = find_row(reader)
    refuse_quantisation(reader, hf_quant_config)
    generation = ConfigReader(generation_config or {}, f"{name}/generation_config.json")
    start = ModelSpec(
        name=name,
        family=row.family,
        architecture=architecture,
        dtype=read_dtype(reader),
        vocab_size=1,
        hidden_size=1,
        embedding_size=1,
        intermediate_size=1,
        num_layers=1,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=1,
        attention=(),
        max_model_len=1,
        activation="silu",
        norm="rms",
        norm_eps=1e-6,
    )
    spec = row.read(reader, start, max_model_len)
    eos = generation.token_ids("eos_token_id") or reader.token_ids("eos_token_id")
    bos = reader.token_ids("bos_token_id")[:1]
    known = range(spec.vocab_size)
    spec = replace(
        spec,
        bos_token_id=next((token for token in bos if token in known), None),
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if token in known)),
    )
    return limit_length(spec, max_model_len)


def find_row(reader: ConfigReader) -> tuple[Row, str]:
    """The row and the architecture that ``architectures`` names, or else
    ``model_type``."""
    architectures = reader.strings("architectures")
    model_type = reader.string("model_type", default="") if reader.fields.get("model_type") else ""
    fitting = [row for row in ROWS if architectures and architectures[0] in row.architectures]
    if not architectures:
        fitting = [row for row in ROWS if row.family == model_type]
    if len(fitting) > 1:  # a model of several parts, whose text part may be one of these
        fitting = [row for row in fitting if row.family == model_type]
    if fitting:
        return fitting[0], architectures[0] if architectures else fitting[0].architectures[0]
    raise refuse_unknown(reader, [row.architectures[0] for row in ROWS])


# --- What isn't a lookup


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """One slope a head (arXiv 2108.12409, section 3): a geometric sequence for
    a power of two heads; for other counts, the next lower power's sequence,
    then every second entry of the next higher power's.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-8.0 * i / (2 * power)) for i in range(1, 2 * (num_heads - power) + 1, 2)]
    return tuple(slopes)


def _qwen_slides(reader: ConfigReader, spec: ModelSpec) -> Callable[[int], bool]:
    first = reader.integer("max_window_layers", low=0, high=MAX_LAYERS, default=28)
    return lambda layer: layer >= first


def _qwen_window(reader: ConfigReader, spec: ModelSpec) -> int | None:
    if not reader.flag("use_sliding_window", False):
        return None
    return window(4096)(reader, spec)


def _gpt2_scale(reader: ConfigReader, spec: ModelSpec, layer: int) -> float:
    scale = spec.head_dim**-0.5 if reader.flag("scale_attn_weights", True) else 1.0
    by_layer = reader.flag("scale_attn_by_inverse_layer_idx", False)
    return scale / (layer + 1 if by_layer else 1)


def _query_scalar(reader: ConfigReader, spec: ModelSpec, layer: int) -> float:
    return float(reader.number("query_pre_attn_scalar", high=1e6, default=256) ** -0.5)


def _opt_has_final_norm(reader: ConfigReader, spec: ModelSpec) -> bool:
    return spec.norm_placement == "pre" and not reader.flag("_remove_final_layer_norm", False)


# --- RMSNorm, rotary embedding, gated MLP

_GROUPED = integer("num_key_value_heads", high=MAX_HEADS, default=same_as("num_q_heads"))


def _positions(*names: str, default: int) -> Callable[[ConfigReader, ModelSpec], int]:
    return integer(*names, high=MAX_POSITIONS, default=default)


def _head_dim(default: int | None = None) -> Callable[[ConfigReader, ModelSpec], int | None]:
    return lambda reader, _: reader.optional_integer("head_dim", high=MAX_HEAD_DIM) or default


LLAMA = Row(
    "llama",
    ("LlamaForCausalLM", "LlamaModel"),
    names.LLAMA,
    fields={
        "intermediate_size": integer("intermediate_size"),
        "activation": activation("hidden_act", default="silu"),
        "norm_eps": number("rms_norm_eps", high=1.0, default=1e-6),
        "gated_mlp": True,
        "tied_embeddings": flag("tie_word_embeddings", False),
        "qkv_bias": flag("attention_bias", False),
        "o_bias": flag("attention_bias", False),
        "mlp_bias": flag("mlp_bias", False),
    },
    kv_heads=_GROUPED,
    head_dim=_head_dim(),
    positions=_positions("max_position_embeddings", default=2048),
    rotary=RotaryRules(),
)
_NO_BIAS = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}

MISTRAL = LLAMA.derive(
    "mistral", "MistralForCausalLM", "MistralModel",
    fields=_NO_BIAS,
    kv_heads=integer("num_key_value_heads", high=MAX_HEADS, default=8),
    positions=_positions("max_position_embeddings", default=131072),
    window=window(4096),
)  # fmt: skip
QWEN2 = LLAMA.derive(
    "qwen2", "Qwen2ForCausalLM", "Qwen2Model",
    fields={**_NO_BIAS, "qkv_bias": True},
    positions=_positions("max_position_embeddings", default=32768),
    window=_qwen_window,
    slides=_qwen_slides,
)  # fmt: skip
QWEN3 = QWEN2.derive(
    "qwen3", "Qwen3ForCausalLM", "Qwen3Model",
    fields={
        "qkv_bias": flag("attention_bias", False),
        "o_bias": flag("attention_bias", False),
        "qk_norm": "head",
    },
    head_dim=_head_dim(128),
)  # fmt: skip
PHI3 = LLAMA.derive(
    "phi3", "Phi3ForCausalLM", "Phi3Model",
    fields={**_NO_BIAS, "norm_eps": number("rms_norm_eps", high=1.0, default=1e-5)},
    names=names.PHI3,
    positions=_positions("max_position_embeddings", default=4096),
    window=window(),
    rotary=RotaryRules(is_phi3=True),
)  # fmt: skip
GEMMA2 = LLAMA.derive(
    "gemma2", "Gemma2ForCausalLM", "Gemma2Model",
    fields={
        "mlp_bias": False,
        "activation": activation("hidden_activation", default="gelu_pytorch_tanh"),
        "norm_placement": "sandwich",
        "norm_offset": 1.0,
        "embedding_scale": lambda reader, spec: math.sqrt(spec.hidden_size),
        "logit_softcap": optional_number("final_logit_softcapping", 30.0),
        "tied_embeddings": flag("tie_word_embeddings", True),
    },
    names=names.GEMMA2,
    head_dim=_head_dim(256),
    positions=_positions("max_position_embeddings", default=8192),
    scale=_query_scalar,
    softcap=optional_number("attn_logit_softcapping", 50.0),
    window=window(4096),
    slides=lambda reader, spec: lambda layer: layer % 2 == 0,
)  # fmt: skip

# --- LayerNorm, plain MLP, biases

_ALL_BIAS = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}

OPT = Row(
    "opt",
    ("OPTForCausalLM", "OPTModel"),
    names.OPT,
    fields={
        "embedding_size": integer(
            "word_embed_proj_dim", high=MAX_HIDDEN, default=same_as("hidden_size")
        ),
        "intermediate_size": integer("ffn_dim"),
        "activation": activation("activation_function", default="relu"),
        "norm": "layer",
        "norm_eps": 1e-5,
        "norm_placement": lambda reader, spec: (
            "pre" if reader.flag("do_layer_norm_before", True) else "post"
        ),
        "norm_affine": flag("layer_norm_elementwise_affine", True),
        "final_norm": _opt_has_final_norm,
        "qkv_bias": flag("enable_bias", True),
        "o_bias": flag("enable_bias", True),
        "mlp_bias": flag("enable_bias", True),
        "num_learned_positions": lambda reader, spec: spec.max_model_len + 2,
        "learned_position_offset": 2,
        "tied_embeddings": flag("tie_word_embeddings", True),
    },
    positions=_positions("max_position_embeddings", default=2048),
)
GPT2 = Row(
    "gpt2",
    ("GPT2LMHeadModel", "GPT2Model"),
    names.GPT2,
    fields={
        "intermediate_size": integer("n_inner", default=same_as("intermediate_size")),
        "activation": activation("activation_function", default="gelu_new"),
        "norm": "layer",
        "norm_eps": number("layer_norm_epsilon", high=1.0, default=1e-5),
        **_ALL_BIAS,
        "num_learned_positions": same_as("max_model_len"),
        "tied_embeddings": flag("tie_word_embeddings", True),
    },
    positions=_positions("n_positions", "max_position_embeddings", default=1024),
    scale=_gpt2_scale,
)
GPT_NEOX = Row(
    "gpt_neox",
    ("GPTNeoXForCausalLM", "GPTNeoXModel"),
    names.GPT_NEOX,
    fields={
        "intermediate_size": integer("intermediate_size"),
        "activation": activation("hidden_act", default="gelu"),
        "norm": "layer",
        "norm_eps": number("layer_norm_eps", high=1.0, default=1e-5),
        "parallel_residual": flag("use_parallel_residual", True),
        "qkv_bias": flag("attention_bias", True),
        "o_bias": flag("attention_bias", True),
        "mlp_bias": True,
        "tied_embeddings": flag("tie_word_embeddings", False),
    },
    positions=_positions("max_position_embeddings", default=2048),
    rotary=RotaryRules(partial=0.25),
)
BLOOM = Row(
    "bloom",
    ("BloomForCausalLM", "BloomModel"),
    names.BLOOM,
    fields={
        "activation": "gelu_tanh",
        "norm": "layer",
        "norm_eps": number("layer_norm_epsilon", high=1.0, default=1e-5),
        "embedding_norm": True,
        **_ALL_BIAS,
        "tied_embeddings": flag("tie_word_embeddings", True),
    },
    # ALiBi has no last position; BLOOM was trained on 2,048 tokens and says so only sometimes.
    positions=_positions("seq_length", "max_position_embeddings", default=2048),
    alibi=lambda reader, spec: alibi_slopes(spec.num_q_heads),
)

ROWS = (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GEMMA2, OPT, GPT2, GPT_NEOX, BLOOM)


def names_of(spec: ModelSpec) -> names.CheckpointNames:
    """What checkpoints of this model call their tensors."""
    return next(row.names for row in ROWS if row.family == spec.family)
