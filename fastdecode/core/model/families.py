"""Every model family that runs, one row each, and the reading of ``config.json`` by the row that
fits.

A new family is a row here, most often one ``derive`` of a family like it, and a line in the test
of families (see the guide to models)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.model import moe_rows, names
from fastdecode.core.model.config_reader import ConfigReader, refuse_feature, text_part
from fastdecode.core.model.moe import Router
from fastdecode.core.model.moe_rows import deepseek_router, layers_from, shared, softmax_router
from fastdecode.core.model.names import Source
from fastdecode.core.model.quantisation import read_quantisation
from fastdecode.core.model.refused import refuse_unknown
from fastdecode.core.model.rope import MAX_POSITIONS, RotaryRules
from fastdecode.core.model.rows import (
    MAX_HIDDEN,
    LayerKinds,
    Read,
    Row,
    activation,
    by_root_of_head_dim,
    flag,
    integer,
    no_value,
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
    read_quantisation(reader.fields, name, hf_quant_config)
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
        config: The parsed file. Of a model with several parts the text part is read.
        name: The model's directory or name, for messages.
        generation_config: ``generation_config.json``; its end-of-text ids come first.
        hf_quant_config: ``hf_quant_config.json``, which some exports name quantised weights in.
        max_model_len: A lower length limit than the model's own. A LongRoPE model takes its
            long factors for a limit above its original length, which it serves without one.

    Raises:
        UnsupportedModelError: If the architecture or a feature is not implemented.
        CheckpointError: If a field is missing or out of range.
        ConfigError: If ``max_model_len`` is beyond the model's.
    """
    reader = text_part(ConfigReader(config, f"{name}/config.json"))
    row, architecture = find_row(reader)
    quantisation = read_quantisation(reader.fields, name, hf_quant_config)
    generation = ConfigReader(generation_config or {}, f"{name}/generation_config.json")
    spec = row.read(reader, name, architecture, quantisation, max_model_len)
    if max_model_len is not None and not 1 <= max_model_len <= spec.max_model_len:
        rule = f" is not within 1..{spec.max_model_len}, what {spec.name} serves"
        raise ConfigError(Given("max_model_len", max_model_len), rule)
    # Tokens outside the vocabulary begin and end no text.
    eos = (*generation.token_ids("eos_token_id"), *reader.token_ids("eos_token_id"))
    bos, known = reader.token_ids("bos_token_id")[:1], range(spec.vocab_size)
    return replace(
        spec,
        bos_token_id=next((token for token in bos if token in known), None),
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if token in known)),
        max_model_len=max_model_len or spec.max_model_len,
    )


def find_row(reader: ConfigReader) -> tuple[Row, str]:
    """Return the row and architecture of ``architectures``, or else of ``model_type``."""
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
    """Return one slope per head (arXiv 2108.12409, section 3): a geometric sequence for a power of
    two heads; for other counts, the next lower power's sequence, then every second entry of the
    next higher power's."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-8.0 * i / (2 * power)) for i in range(1, 2 * (num_heads - power) + 1, 2)]
    return tuple(slopes)


def _switched_window(default: int | None) -> Read[int | None]:
    """A window that is off unless ``use_sliding_window`` says otherwise."""
    size = window(default)
    return lambda reader, spec: (
        size(reader, spec) if reader.flag("use_sliding_window", False) else None
    )


def _all_but_every(name: str, default: int) -> Read[Callable[[int], bool]]:
    """Layers with a window: all but every so many."""

    def read(reader: ConfigReader, spec: ModelSpec) -> Callable[[int], bool]:
        every = reader.integer(name, high=MAX_LAYERS, default=default)
        return lambda layer: (layer + 1) % every != 0

    return read


def _exaone_slides(reader: ConfigReader, spec: ModelSpec) -> Callable[[int], bool]:
    if window(4096)(reader, spec) is None:
        return lambda layer: False
    pattern = reader.fields.get("sliding_window_pattern")
    if isinstance(pattern, str):  # one letter a layer, G without a window, again and again
        return lambda layer: pattern[layer % len(pattern)] != "G"
    return _all_but_every("sliding_window_pattern", 4)(reader, spec)


def _rotates_some(reader: ConfigReader, spec: ModelSpec, kinds: LayerKinds) -> tuple[bool, ...]:
    """Layers with a 1 in ``no_rope_layers`` turn. Without it, all do but every fourth."""
    every = reader.integer("no_rope_layer_interval", high=MAX_LAYERS, default=4)
    turns = reader.integers("no_rope_layers", high=1) or tuple(
        int((layer + 1) % every != 0) for layer in range(spec.num_layers)
    )
    if len(turns) < spec.num_layers:
        rule = f"a list of {spec.num_layers} entries, one a layer, each 0 or 1"
        raise reader.refuse("no_rope_layers", turns, rule)
    return tuple(map(bool, turns[: spec.num_layers]))


def _llama4_growth(reader: ConfigReader, spec: ModelSpec) -> tuple[float, int] | None:
    rope = reader.mapping("rope_parameters", "rope_scaling")
    beta = None if rope is None else rope.optional_number("llama_4_scaling_beta", high=1e6)
    if rope is None or beta is None:
        return None
    return beta, rope.integer("original_max_position_embeddings", high=MAX_POSITIONS)


def _qwen2_moe_slides(reader: ConfigReader, spec: ModelSpec) -> Callable[[int], bool]:
    first = reader.integer("max_window_layers", low=0, high=MAX_LAYERS, default=28)
    return lambda layer: (layer + 1) % 2 == 1 and layer < first


def _cohere_has_layer_norms(reader: ConfigReader) -> bool:
    return reader.fields.get("rms_norm_eps") is None


def _cohere_slides(reader: ConfigReader, spec: ModelSpec) -> Callable[[int], bool]:
    """Of the first, dense layers and of the others, all but every so many."""
    first = reader.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=0)
    dense = _all_but_every("prefix_dense_sliding_window_pattern", 1)(reader, spec)
    others = _all_but_every("sliding_window_pattern", 4)(reader, spec)
    return lambda layer: dense(layer) if layer < first else others(layer - first)


def _cohere_rotates(reader: ConfigReader, spec: ModelSpec, kinds: LayerKinds) -> tuple[bool, ...]:
    """Layers with a window, and dense ones if none of those has one."""
    every = reader.integer("prefix_dense_sliding_window_pattern", high=MAX_LAYERS, default=1)
    return tuple(
        kind == "sliding_attention" or (every == 1 and mlp == "dense")
        for kind, mlp in zip(kinds, spec.mlps, strict=True)
    )


def _laguna_heads(reader: ConfigReader, spec: ModelSpec) -> tuple[int, ...]:
    name = "num_attention_heads_per_layer"
    heads = reader.integers(name, low=1, high=MAX_HEADS)
    if heads and len(heads) != spec.num_layers:
        raise reader.refuse(name, heads, f"a list of {spec.num_layers} entries, one a layer")
    return heads


def _newer_step(reader: ConfigReader) -> ConfigReader:
    """Lists without the layers that predict ahead; ``rope_parameters`` of each
    kind of layer, where theta and the part that turns are lists, one entry a
    layer. Only layers without a window are scaled."""
    num = reader.integer("num_hidden_layers", high=MAX_LAYERS)
    ahead = reader.integer("num_nextn_predict_layers", low=0, high=MAX_LAYERS, default=0)
    fields = dict(reader.fields)
    for name in _STEP_LISTS:
        value = fields.get(name)
        if isinstance(value, list) and len(value) == num + ahead:
            fields[name] = value[:num]
    cut = ConfigReader(fields, reader.where)
    if fields.get("rope_parameters"):
        return cut
    ropes = {kind: _step_rope(cut, layer, kind) for layer, kind in _first_of_kinds(cut, num)}
    dropped = dict.fromkeys(("rope_theta", "rope_scaling", "partial_rotary_factors"))
    return ConfigReader({**fields, **dropped, "rope_parameters": ropes}, reader.where)


_STEP_LISTS = (
    "layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "rope_theta",
    "partial_rotary_factors",
)  # fmt: skip


def _first_of_kinds(reader: ConfigReader, num_layers: int) -> list[tuple[int, str]]:
    kinds = reader.strings("layer_types") or ("full_attention",)
    if len(kinds) > num_layers:
        raise reader.refuse("layer_types", kinds, f"a list of {num_layers} entries, one a layer")
    return [(kinds.index(kind), kind) for kind in dict.fromkeys(kinds)]


def _step_rope(reader: ConfigReader, layer: int, kind: str) -> dict[str, object]:
    rope: dict[str, object] = {}
    names = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factors"}
    for name, source in names.items():
        value = reader.fields.get(source)
        if isinstance(value, list) and value:
            if layer >= len(value):
                raise reader.refuse(source, value, "a list of one number a layer")
            value = value[layer]
        rope[name] = value or None
    scaling = reader.mapping("rope_scaling")
    if scaling is not None and kind == "full_attention":
        rope |= scaling.fields
    return rope


def _step_heads(reader: ConfigReader, spec: ModelSpec) -> tuple[int, ...]:
    """Layers with a window may have another number of query heads."""
    name, other = "num_sliding_attention_heads", reader.mapping("attention_other_setting")
    local = reader.optional_integer(name, high=MAX_HEADS)
    if local is None and other is not None:
        local = other.optional_integer("num_attention_heads", high=MAX_HEADS)
    heads = {"sliding_attention": local or spec.num_q_heads}
    kinds = reader.strings("layer_types")
    return tuple(heads.get(kind, spec.num_q_heads) for kind in kinds)


def _within_one_chunk(reader: ConfigReader, spec: ModelSpec) -> int:
    """Llama-4: as many tokens as see all before them, and whose queries aren't scaled."""
    most = reader.integer("max_position_embeddings", high=MAX_POSITIONS, default=131072)
    chunk = reader.integer("attention_chunk_size", low=2, high=MAX_POSITIONS, default=8192)
    floor = reader.integer("floor_scale", low=2, high=MAX_POSITIONS, default=8192)
    return min(most, chunk - 1, floor - 1)


def _falcon_kv_heads(reader: ConfigReader, spec: ModelSpec) -> int:
    if reader.flag("new_decoder_architecture", False):
        return reader.integer("num_kv_heads", high=MAX_HEADS, default=spec.num_q_heads)
    return 1 if reader.flag("multi_query", True) else spec.num_q_heads


def _falcon_shares_norm(reader: ConfigReader, spec: ModelSpec) -> bool:
    num_norms = 2 if reader.flag("new_decoder_architecture", False) else 1
    num_norms = reader.integer("num_ln_in_parallel_attn", high=2, default=num_norms)
    return spec.parallel_residual and num_norms == 1


def _mpt_attention(reader: ConfigReader) -> ConfigReader:
    found = reader.mapping("attn_config") or ConfigReader({}, reader.where)
    for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        if found.flag(name, False):
            raise refuse_feature(found, name, f"{name!r} of MPT")
    if not found.flag("alibi", True):
        raise refuse_feature(found, "alibi", "MPT without ALiBi")
    return found


def _mpt_scale(reader: ConfigReader, spec: ModelSpec, layer: int) -> float:
    default = float(spec.head_dim**-0.5)
    return _mpt_attention(reader).number("softmax_scale", high=1e6, default=default)


def _mpt_slopes(reader: ConfigReader, spec: ModelSpec) -> tuple[float, ...]:
    """As ``alibi_slopes``, but for other counts than powers of two the next
    higher power's, every second one first."""
    most = _mpt_attention(reader).number("alibi_bias_max", high=1e6, default=8.0)
    power = 1 << (spec.num_q_heads - 1).bit_length()
    slopes = tuple(2.0 ** (-most * i / power) for i in range(1, power + 1))
    if power != spec.num_q_heads:
        slopes = slopes[1::2] + slopes[::2]
    return slopes[: spec.num_q_heads]


def _gpt2_scale(reader: ConfigReader, spec: ModelSpec, layer: int) -> float:
    scale = spec.head_dim**-0.5 if reader.flag("scale_attn_weights", True) else 1.0
    by_layer = reader.flag("scale_attn_by_inverse_layer_idx", False)
    return scale / (layer + 1 if by_layer else 1)


# --- RMSNorm, rotary embedding, gated MLP

_GROUPED = integer("num_key_value_heads", high=MAX_HEADS, default=same_as("num_q_heads"))


def _positions(default: int, *others: str) -> Read[int]:
    return integer(*others, "max_position_embeddings", high=MAX_POSITIONS, default=default)


def _kv_heads(default: int) -> Read[int]:
    return integer("num_key_value_heads", high=MAX_HEADS, default=default)


def _rms_eps(default: float) -> Read[float]:
    return number("rms_norm_eps", high=1.0, default=default)


def _head_dim(default: int | None = None) -> Callable[[ConfigReader, ModelSpec], int | None]:
    return lambda reader, _: reader.optional_integer("head_dim", high=MAX_HEAD_DIM) or default


LLAMA = Row(
    "llama", ("LlamaForCausalLM", "LlamaModel"), names.LLAMA, models="Llama 1, 2, 3",
    fields={
        "intermediate_size": integer("intermediate_size"),
        "activation": activation("hidden_act", default="silu"), "norm_eps": _rms_eps(1e-6),
        "gated_mlp": True, "tied_embeddings": flag("tie_word_embeddings", False),
        "qkv_bias": flag("attention_bias", False), "o_bias": flag("attention_bias", False),
        "mlp_bias": flag("mlp_bias", False),
    },
    kv_heads=_GROUPED, head_dim=_head_dim(), positions=_positions(2048), rotary=RotaryRules(),
)  # fmt: skip
_NO_BIAS = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
_ALL_BIAS = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}

MISTRAL = LLAMA.derive(
    "mistral", "MistralForCausalLM", "MistralModel", "Mistral3ForConditionalGeneration",
    models="Mistral, Mistral Small 3 (text)", fields=_NO_BIAS, kv_heads=_kv_heads(8),
    positions=_positions(131072), window=window(4096),
)  # fmt: skip
QWEN2 = LLAMA.derive(
    "qwen2", "Qwen2ForCausalLM", "Qwen2Model", models="Qwen2, Qwen2.5",
    fields={**_NO_BIAS, "qkv_bias": True}, positions=_positions(32768),
    window=_switched_window(4096), slides=layers_from("max_window_layers", 28),
)  # fmt: skip
QWEN3 = QWEN2.derive(
    "qwen3", "Qwen3ForCausalLM", "Qwen3Model", models="Qwen3",
    fields={
        "qkv_bias": flag("attention_bias", False), "o_bias": flag("attention_bias", False),
        "qk_norm": "head",
    },
    head_dim=_head_dim(128),
)  # fmt: skip
PHI3 = LLAMA.derive(
    "phi3", "Phi3ForCausalLM", "Phi3Model", models="Phi-3, Phi-4",
    fields={**_NO_BIAS, "norm_eps": _rms_eps(1e-5)}, names=names.PHI3, positions=_positions(4096),
    window=window(), rotary=RotaryRules(is_phi3=True),
)  # fmt: skip
GEMMA = LLAMA.derive(
    "gemma", "GemmaForCausalLM", "GemmaModel", models="Gemma",
    fields={
        "mlp_bias": False,
        "activation": activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        "norm_offset": 1.0, "embedding_scale": lambda reader, spec: math.sqrt(spec.hidden_size),
        "tied_embeddings": flag("tie_word_embeddings", True),
    },
    head_dim=_head_dim(256), positions=_positions(8192),
)  # fmt: skip
GEMMA2 = GEMMA.derive(
    "gemma2", "Gemma2ForCausalLM", "Gemma2Model", models="Gemma 2",
    fields={
        "activation": activation("hidden_activation", default="gelu_pytorch_tanh"),
        "norm_placement": "sandwich",
        "logit_softcap": optional_number("final_logit_softcapping", 30.0),
    },
    names=names.GEMMA2,
    scale=lambda reader, spec, layer: float(
        reader.number("query_pre_attn_scalar", high=1e6, default=256) ** -0.5
    ),
    softcap=optional_number("attn_logit_softcapping", 50.0), window=window(4096),
    slides=lambda reader, spec: lambda layer: layer % 2 == 0,
)  # fmt: skip
GEMMA3 = GEMMA2.derive(
    "gemma3_text", "Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3ForConditionalGeneration",
    models="Gemma 3 (text)",
    fields={
        "qk_norm": "head", "logit_softcap": optional_number("final_logit_softcapping"),
    },
    positions=_positions(131072), softcap=optional_number("attn_logit_softcapping"),
    slides=_all_but_every("sliding_window_pattern", 6),
    rotary=RotaryRules(theta=1e6, scales_local=False, local_theta=10000.0),
)  # fmt: skip
GRANITE = LLAMA.derive(
    "granite", "GraniteForCausalLM", "GraniteModel", models="Granite 3",
    fields={
        "embedding_scale": number("embedding_multiplier", default=1.0),
        "residual_scale": number("residual_multiplier", default=1.0),
        "logit_scale": lambda reader, spec: 1 / reader.number("logits_scaling", default=1.0),
    },
    scale=lambda reader, spec, layer: reader.number("attention_multiplier", default=1.0),
)  # fmt: skip
SMOLLM3 = LLAMA.derive(
    "smollm3", "SmolLM3ForCausalLM", "SmolLM3Model", models="SmolLM3",
    fields={"tied_embeddings": flag("tie_word_embeddings", True)}, kv_heads=_kv_heads(4),
    positions=_positions(32768), window=_switched_window(None),
    slides=lambda reader, spec: lambda layer: False, rotary=RotaryRules(theta=2e6),
    rotates=_rotates_some,
)  # fmt: skip
OLMO = LLAMA.derive(
    "olmo", "OlmoForCausalLM", "OlmoModel", models="OLMo",
    fields={
        "mlp_bias": False, "norm": "layer", "norm_eps": 1e-5, "norm_affine": False,
        "qkv_clip": optional_number("clip_qkv"),
    },
)  # fmt: skip
OLMO2 = LLAMA.derive(
    "olmo2", "Olmo2ForCausalLM", "Olmo2Model", models="OLMo 2",
    fields={
        "mlp_bias": False, "norm_eps": _rms_eps(1e-5), "norm_placement": "branch",
        "qk_norm": "full",
    },
    names=names.BRANCH,
)  # fmt: skip
OLMO3 = OLMO2.derive(
    "olmo3", "Olmo3ForCausalLM", "Olmo3Model", models="OLMo 3", window=window(4096),
    slides=_all_but_every("sliding_window_pattern", 4),
    rotary=RotaryRules(theta=500000.0, scales_local=False),
)  # fmt: skip
EXAONE4 = LLAMA.derive(
    "exaone4", "Exaone4ForCausalLM", "Exaone4Model", models="EXAONE 4",
    fields={
        **_NO_BIAS, "norm_eps": _rms_eps(1e-5), "norm_placement": "branch", "qk_norm": "head",
    },
    names=names.BRANCH, window=window(4096), slides=_exaone_slides,
    rotates=lambda reader, spec, kinds: tuple(
        window(4096)(reader, spec) is None or kind == "sliding_attention" for kind in kinds
    ),
)  # fmt: skip
COHERE = LLAMA.derive(
    "cohere", "CohereForCausalLM", "CohereModel", models="Command R",
    fields={
        "mlp_bias": False, "norm": "layer", "norm_bias": False,
        "norm_eps": number("layer_norm_eps", high=1.0, default=1e-5),
        "qk_norm": lambda reader, spec: "own" if reader.flag("use_qk_norm", False) else "none",
        "parallel_residual": True, "shared_norm": True, "rope_interleaved": True,
        "logit_scale": number("logit_scale", default=0.0625),
        "tied_embeddings": flag("tie_word_embeddings", True),
    },
    positions=_positions(8192), rotary=RotaryRules(theta=500000.0),
)  # fmt: skip
COHERE2 = COHERE.derive(
    "cohere2", "Cohere2ForCausalLM", "Cohere2Model", models="Command R7B, A",
    fields={"qk_norm": "none"}, window=window(4096),
    slides=_all_but_every("sliding_window_pattern", 4), rotary=RotaryRules(),
    rotates=lambda reader, spec, kinds: tuple(kind == "sliding_attention" for kind in kinds),
)  # fmt: skip
GLM = LLAMA.derive(
    "glm", "GlmForCausalLM", "GlmModel", models="GLM-4-9B",
    fields={
        "qkv_bias": flag("attention_bias", True), "o_bias": False, "mlp_bias": False,
        "norm_eps": _rms_eps(1.5625e-7), "rope_interleaved": True,
    },
    names=names.LLAMA.derive({"mlp.up": "mlp.gate_up_proj"}), kv_heads=_kv_heads(2),
    head_dim=_head_dim(128), positions=_positions(131072), rotary=RotaryRules(partial=0.5),
)  # fmt: skip
GLM4 = GLM.derive(
    "glm4", "Glm4ForCausalLM", "Glm4Model", models="GLM-4-0414",
    fields={"norm_placement": "sandwich"},
    names=names.LLAMA.derive(
        {
            "mlp.up": "mlp.gate_up_proj", "attn_out_norm": "post_self_attn_layernorm",
            "mlp_out_norm": "post_mlp_layernorm",
        }
    ),
)  # fmt: skip
SEED_OSS = LLAMA.derive(
    "seed_oss", "SeedOssForCausalLM", "SeedOssModel", models="Seed-OSS",
    fields={
        "qkv_bias": flag("attention_bias", True), "o_bias": flag("attention_out_bias", False),
    },
    kv_heads=_kv_heads(8), head_dim=_head_dim(128), positions=_positions(524288),
)  # fmt: skip
ERNIE45 = LLAMA.derive(
    "ernie4_5", "Ernie4_5ForCausalLM", "Ernie4_5Model", models="ERNIE 4.5 0.3B",
    fields={
        "qkv_bias": flag("use_bias", False), "o_bias": flag("use_bias", False),
        "mlp_bias": flag("use_bias", False), "norm_eps": _rms_eps(1e-5), "rope_interleaved": True,
        "tied_embeddings": flag("tie_word_embeddings", True),
    },
    kv_heads=_kv_heads(2), head_dim=_head_dim(128), positions=_positions(131072),
    rotary=RotaryRules(theta=500000.0),
)  # fmt: skip
HUNYUAN = LLAMA.derive(
    "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Model",
    models="Hunyuan 0.5B to 7B",
    fields={
        "mlp_bias": False, "norm_eps": _rms_eps(1e-5), "qk_norm": "turned",
    },
    names=names.LLAMA.derive(
        {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}
    ),
    rotary=RotaryRules(keys=("alpha",)),
)  # fmt: skip
ARCEE = LLAMA.derive(
    "arcee", "ArceeForCausalLM", "ArceeModel", models="AFM-4.5B",
    fields={
        "activation": activation("hidden_act", default="relu2"), "gated_mlp": False,
        "norm_eps": _rms_eps(1e-5),
    },
    names=names.LLAMA.derive({"mlp.up": "mlp.up_proj"}), positions=_positions(4096),
)  # fmt: skip
APERTUS = LLAMA.derive(
    "apertus", "ApertusForCausalLM", "ApertusModel", models="Apertus",
    fields={
        "activation": activation("hidden_act", default="xielu"), "gated_mlp": False,
        "mlp_bias": False, "norm_eps": _rms_eps(1e-5), "qk_norm": "head",
    },
    names=names.LLAMA.derive(
        {
            "attn_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm",
            "mlp.up": "mlp.up_proj", "mlp.act": "mlp.act_fn",
        },
        harmless=(r".*\.mlp\.act_fn\.(beta|eps)",),
    ),
    positions=_positions(65536), rotary=RotaryRules(theta=12e6),
)  # fmt: skip
MINISTRAL3 = LLAMA.derive(
    "ministral3", "Ministral3ForCausalLM", "Ministral3Model", "Mistral3ForConditionalGeneration",
    models="Ministral 3 (text)",
    fields={
        **_NO_BIAS, "norm_eps": _rms_eps(1e-5), "q_growth": _llama4_growth,
    },
    kv_heads=_kv_heads(8), head_dim=_head_dim(128), positions=_positions(262144), window=window(),
    rotary=RotaryRules(theta=1e6, keys=("llama_4_scaling_beta",)),
)  # fmt: skip
MIMO = QWEN2.derive("mimo", "MiMoForCausalLM", "MiMoModel",
    models="MiMo-7B", fields={"qkv_bias": flag("attention_bias", True)},
    names=names.LLAMA.derive(harmless=(r"model\.mtp_layers\..*",)),
)  # fmt: skip
QWEN25_VL = QWEN2.derive(
    "qwen2_5_vl_text", "Qwen2_5_VLForConditionalGeneration", models="Qwen2.5-VL (text)",
    rotary=RotaryRules(theta=1e6, keys=("mrope_section",)),
)  # fmt: skip
QWEN3_VL = QWEN3.derive(
    "qwen3_vl_text", "Qwen3VLForConditionalGeneration", "Qwen3VLModel", models="Qwen3-VL (text)",
    rotary=RotaryRules(theta=500000.0, keys=("mrope_section",)), window=no_value, slides=None,
)  # fmt: skip

# --- LayerNorm, plain MLP, biases

OPT = Row(
    "opt", ("OPTForCausalLM", "OPTModel"), names.OPT, models="OPT",
    fields={
        "embedding_size": integer(
            "word_embed_proj_dim", high=MAX_HIDDEN, default=same_as("hidden_size")
        ),
        "intermediate_size": integer("ffn_dim"),
        "activation": activation("activation_function", default="relu"), "norm": "layer",
        "norm_eps": 1e-5,
        "norm_placement": lambda reader, spec: (
            "pre" if reader.flag("do_layer_norm_before", True) else "post"
        ),
        "norm_affine": flag("layer_norm_elementwise_affine", True),
        "final_norm": lambda reader, spec: (
            spec.norm_placement == "pre" and not reader.flag("_remove_final_layer_norm", False)
        ),
        "qkv_bias": flag("enable_bias", True),
        "o_bias": flag("enable_bias", True), "mlp_bias": flag("enable_bias", True),
        "num_learned_positions": lambda reader, spec: spec.max_model_len + 2,
        "learned_position_offset": 2, "tied_embeddings": flag("tie_word_embeddings", True),
    },
    positions=_positions(2048),
)  # fmt: skip
GPT2 = Row(
    "gpt2", ("GPT2LMHeadModel", "GPT2Model"), names.GPT2, models="GPT-2",
    fields={
        "intermediate_size": integer("n_inner", default=same_as("intermediate_size")),
        "activation": activation("activation_function", default="gelu_new"), "norm": "layer",
        "norm_eps": number("layer_norm_epsilon", high=1.0, default=1e-5), **_ALL_BIAS,
        "num_learned_positions": same_as("max_model_len"),
        "tied_embeddings": flag("tie_word_embeddings", True),
    },
    positions=_positions(1024, "n_positions"), scale=_gpt2_scale,
)  # fmt: skip
GPT_NEOX = Row(
    "gpt_neox", ("GPTNeoXForCausalLM", "GPTNeoXModel"), names.GPT_NEOX, models="GPT-NeoX, Pythia",
    fields={
        "intermediate_size": integer("intermediate_size"),
        "activation": activation("hidden_act", default="gelu"), "norm": "layer",
        "norm_eps": number("layer_norm_eps", high=1.0, default=1e-5),
        "parallel_residual": flag("use_parallel_residual", True),
        "qkv_bias": flag("attention_bias", True), "o_bias": flag("attention_bias", True),
        "mlp_bias": True, "tied_embeddings": flag("tie_word_embeddings", False),
    },
    positions=_positions(2048), rotary=RotaryRules(partial=0.25),
)  # fmt: skip
BLOOM = Row(
    "bloom", ("BloomForCausalLM", "BloomModel"), names.BLOOM, models="BLOOM",
    fields={
        "activation": "gelu_tanh", "norm": "layer",
        "norm_eps": number("layer_norm_epsilon", high=1.0, default=1e-5), "embedding_norm": True,
        **_ALL_BIAS, "tied_embeddings": flag("tie_word_embeddings", True),
    },
    # ALiBi has no last position; BLOOM was trained on 2,048 tokens and says so only sometimes.
    positions=_positions(2048, "seq_length"),
    alibi=lambda reader, spec: alibi_slopes(spec.num_q_heads),
)  # fmt: skip

STARCODER2 = LLAMA.derive(
    "starcoder2", "Starcoder2ForCausalLM", "Starcoder2Model", models="StarCoder2",
    fields={
        "activation": activation("hidden_act", default="gelu_pytorch_tanh"), "gated_mlp": False,
        "norm": "layer", "norm_eps": number("norm_epsilon", high=1.0, default=1e-5),
        "qkv_bias": flag("use_bias", True), "o_bias": flag("use_bias", True),
        "mlp_bias": flag("use_bias", True), "tied_embeddings": flag("tie_word_embeddings", True),
    },
    names=names.LLAMA.derive({"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}),
    kv_heads=_kv_heads(2), positions=_positions(4096), window=window(),
)  # fmt: skip
STABLELM = LLAMA.derive(
    "stablelm", "StableLmForCausalLM", "StableLmModel", models="StableLM",
    fields={
        "norm": "layer", "norm_eps": number("layer_norm_eps", high=1.0, default=1e-5),
        "qkv_bias": flag("use_qkv_bias", False), "o_bias": False, "mlp_bias": False,
        "parallel_residual": flag("use_parallel_residual", False),
        "shared_norm": flag("use_parallel_residual", False),
    },
    positions=_positions(4096), rotary=RotaryRules(partial=0.25),
    refused={"qk_layernorm": "a LayerNorm for each head of q and k"},
)  # fmt: skip
PHI = LLAMA.derive(
    "phi", "PhiForCausalLM", "PhiModel", models="Phi-1, 1.5, 2",
    fields={
        **_ALL_BIAS, "head_bias": True, "activation": activation("hidden_act", default="gelu_new"),
        "gated_mlp": False, "norm": "layer",
        "norm_eps": number("layer_norm_eps", high=1.0, default=1e-5), "parallel_residual": True,
        "shared_norm": True,
    },
    names=names.LLAMA.derive(
        {"o": "self_attn.dense", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"},
        model={"final_norm": "final_layernorm"},
    ),
    rotary=RotaryRules(partial=0.5), refused={"qk_layernorm": "a LayerNorm of q and k"},
)  # fmt: skip
GPTJ = GPT2.derive(
    "gptj", "GPTJForCausalLM", "GPTJModel", models="GPT-J",
    fields={
        "qkv_bias": False, "o_bias": False, "head_bias": True, "parallel_residual": True,
        "shared_norm": True, "rope_interleaved": True, "num_learned_positions": 0,
        "tied_embeddings": flag("tie_word_embeddings", False),
    },
    names=names.GPT2.derive(
        {
            "qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"), "o": "attn.out_proj",
            "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out",
        }
    ),
    positions=_positions(2048, "n_positions"), scale=by_root_of_head_dim,
    rotary=RotaryRules(partial=1.0),
)  # fmt: skip
GPT_BIGCODE = GPT2.derive(
    "gpt_bigcode", "GPTBigCodeForCausalLM", "GPTBigCodeModel", models="StarCoder, SantaCoder",
    fields={"activation": activation("activation_function", default="gelu_pytorch_tanh")},
    names=names.GPT2.derive(
        {
            "qkv": Source("attn.c_attn", "heads"), "o": "attn.c_proj", "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        }
    ),
    kv_heads=lambda reader, spec: 1 if reader.flag("multi_query", True) else spec.num_q_heads,
)  # fmt: skip
FALCON = Row(
    "falcon", ("FalconForCausalLM", "FalconModel"), names.FALCON, models="Falcon 7B, 40B, 180B",
    fields={
        "intermediate_size": integer("ffn_hidden_size", default=same_as("intermediate_size")),
        "activation": activation("activation", default="gelu"), "norm": "layer",
        "norm_eps": number("layer_norm_epsilon", high=1.0, default=1e-5),
        "parallel_residual": lambda reader, spec: (
            reader.flag("new_decoder_architecture", False) or reader.flag("parallel_attn", True)
        ),
        "shared_norm": _falcon_shares_norm,
        "qkv_bias": flag("bias", False), "o_bias": flag("bias", False),
        "mlp_bias": flag("bias", False), "tied_embeddings": flag("tie_word_embeddings", True),
    },
    kv_heads=_falcon_kv_heads, positions=_positions(2048), rotary=RotaryRules(),
    refused={"alibi": "ALiBi in 16 bits"},
)  # fmt: skip
MPT = Row(
    "mpt", ("MptForCausalLM", "MPTForCausalLM", "MptModel"), names.MPT, models="MPT",
    fields={
        "activation": "gelu", "norm": "layer", "norm_bias": False,
        "norm_eps": number("layer_norm_epsilon", high=1.0, default=1e-5),
        "qkv_clip": lambda reader, spec: (
            _mpt_attention(reader).optional_number("clip_qkv", high=1e6)
        ),
        "tied_embeddings": flag("tie_word_embeddings", True),
    },
    positions=_positions(2048, "max_seq_len"), scale=_mpt_scale, alibi=_mpt_slopes,
)  # fmt: skip
NEMOTRON = LLAMA.derive(
    "nemotron", "NemotronForCausalLM", "NemotronModel", models="Nemotron-4, Minitron",
    fields={
        "activation": activation("hidden_act", default="relu2"), "gated_mlp": False,
        "norm": "layer", "norm_eps": number("norm_eps", high=1.0, default=1e-5), "norm_offset": 1.0,
    },
    names=names.LLAMA.derive({"mlp.up": "mlp.up_proj"}), positions=_positions(4096),
    rotary=RotaryRules(partial=0.5),
)  # fmt: skip

# --- Mixtures of experts

_NUM = ("num_experts", "num_local_experts")
_RMS_EPS = {"norm_eps": _rms_eps(1e-5)}

QWEN3_MOE = QWEN3.derive(
    "qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeModel", models="Qwen3-30B-A3B, 235B-A22B, Coder",
    fields={
        "moe": moe_rows.experts(softmax_router(), defaults=(128, 8, 768)),
        "mlps": moe_rows.mlps(moe_rows.by_step),
    },
    names=names.QWEN_MOE, kv_heads=_kv_heads(4), slides=None,
)  # fmt: skip
QWEN2_MOE = QWEN2.derive(
    "qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeModel", models="Qwen1.5-MoE, Qwen2-57B-A14B",
    fields={
        "qkv_bias": flag("qkv_bias", True),
        "moe": moe_rows.experts(
            softmax_router(), defaults=(60, 4, 1408),
            more=shared("shared_expert_intermediate_size", default=5632, shared_gate=True),
        ),
        "mlps": moe_rows.mlps(moe_rows.by_step),
    },
    names=names.QWEN_MOE, kv_heads=_kv_heads(16), slides=_qwen2_moe_slides,
)  # fmt: skip
QWEN3_VL_MOE = QWEN3_MOE.derive(
    "qwen3_vl_moe_text", "Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeModel",
    models="Qwen3-VL-30B-A3B, 235B-A22B (text)",
    fields={"moe": moe_rows.experts(softmax_router(True), defaults=(60, 4, 1408))},
    names=names.QWEN_VL_MOE, kv_heads=_kv_heads(16),
    rotary=RotaryRules(theta=500000.0, keys=("mrope_section",)), window=no_value,
)  # fmt: skip
MIXTRAL = MISTRAL.derive(
    "mixtral", "MixtralForCausalLM", "MixtralModel", models="Mixtral",
    fields={
        **_RMS_EPS,
        "moe": moe_rows.experts(
            softmax_router(True, rounded=False), inner=("intermediate_size",),
            defaults=(8, 2, 14336),
        ),
    },
    names=names.MIXTRAL, window=window(), rotary=RotaryRules(theta=1e6),
)  # fmt: skip
OLMOE = LLAMA.derive(
    "olmoe", "OlmoeForCausalLM", "OlmoeModel", models="OLMoE",
    fields={
        **_RMS_EPS, "mlp_bias": False, "qk_norm": "full", "qkv_clip": optional_number("clip_qkv"),
        "moe": moe_rows.experts(
            softmax_router(), inner=("intermediate_size",), defaults=(64, 8, 2048)
        ),
    },
    names=names.QWEN_MOE, positions=_positions(4096),
)  # fmt: skip
FLEX_OLMO = OLMO2.derive(
    "flex_olmo", "FlexOlmoForCausalLM", "FlexOlmoModel", models="FlexOlmo",
    fields={
        "norm_eps": _rms_eps(1e-6),
        "moe": moe_rows.experts(
            softmax_router(), inner=("intermediate_size",), defaults=(7, 5, 11008)
        ),
    },
    names=names.FLEX_OLMO, positions=_positions(4096), rotary=RotaryRules(theta=500000.0),
)  # fmt: skip
COHERE2_MOE = COHERE2.derive(
    "cohere2_moe", "Cohere2MoeForCausalLM", "Cohere2MoeModel", models="Command A (experts)",
    fields={
        "intermediate_size": integer(
            "prefix_dense_intermediate_size", "intermediate_size", default=22528
        ),
        "norm": lambda reader, spec: "layer" if _cohere_has_layer_norms(reader) else "rms",
        "norm_eps": lambda reader, spec: reader.number(
            "layer_norm_eps" if _cohere_has_layer_norms(reader) else "rms_norm_eps",
            high=1.0, default=1e-5,
        ),
        "moe": moe_rows.experts(
            moe_rows.cohere_router, inner=("intermediate_size",), defaults=(8, 2, 22528),
            more=moe_rows.cohere_shared,
        ),
        "mlps": moe_rows.mlps(moe_rows.after_dense(0)),
    },
    names=names.GLM_MOE, head_dim=_head_dim(128), slides=_cohere_slides, rotates=_cohere_rotates,
)  # fmt: skip
_GLM_EXPERTS = shared("moe_intermediate_size", times="n_shared_experts")
GLM4_MOE = LLAMA.derive(
    "glm4_moe", "Glm4MoeForCausalLM", "Glm4MoeModel", models="GLM-4.5, 4.6, 4.7",
    fields={
        **_RMS_EPS, "o_bias": False, "mlp_bias": False,
        "qk_norm": lambda reader, spec: "head" if reader.flag("use_qk_norm", False) else "none",
        "moe": moe_rows.experts(
            deepseek_router(True), num=("n_routed_experts", *_NUM), defaults=(128, 8, 1408),
            more=_GLM_EXPERTS,
        ),
        "mlps": moe_rows.mlps(moe_rows.after_dense(1)),
    },
    names=names.GLM_MOE, kv_heads=_kv_heads(8), positions=_positions(131072),
    rotary=RotaryRules(partial=0.5),
)  # fmt: skip
SOLAR_OPEN = GLM4_MOE.derive(
    "solar_open", "SolarOpenForCausalLM", "SolarOpenModel", models="Solar Open",
    fields={"qk_norm": "none", "mlps": ()}, rotary=RotaryRules(theta=1e6),
)  # fmt: skip
DOTS1 = GLM4_MOE.derive(
    "dots1", "Dots1ForCausalLM", "Dots1Model", models="dots.llm1",
    fields={
        "norm_eps": _rms_eps(1e-6), "o_bias": flag("attention_bias", False), "qk_norm": "head",
        "moe": moe_rows.experts(
            deepseek_router(False), num=("n_routed_experts", *_NUM),
            more=shared("moe_intermediate_size", times="n_shared_experts", count=0),
        ),
        "mlps": moe_rows.mlps(moe_rows.after_dense(0)),
    },
    kv_heads=_kv_heads(32), positions=_positions(2048), window=window(4096),
    slides=layers_from("max_window_layers", 62), rotary=RotaryRules(),
)  # fmt: skip
MINIMAX_M2 = LLAMA.derive(
    "minimax_m2", "MiniMaxM2ForCausalLM", "MiniMaxM2Model", models="MiniMax-M2",
    fields={
        **_NO_BIAS, "qk_norm": "full",
        "moe": moe_rows.experts(
            moe_rows.always(
                Router("sigmoid", correction=True, renorm=True, sorted=False)
            ),
            num=("num_local_experts", "num_experts"),
            inner=("intermediate_size",), defaults=(256, 8, 1536),
        ),
    },
    names=names.MIXTRAL, kv_heads=_kv_heads(8), head_dim=_head_dim(128),
    positions=_positions(196608), rotary=RotaryRules(theta=5e6),
)  # fmt: skip
ERNIE45_MOE = ERNIE45.derive(
    "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeModel", models="ERNIE 4.5 21B, 300B",
    fields={
        "head_bias": flag("use_bias", False),
        "moe": moe_rows.experts(
            moe_rows.ernie_router, num=("moe_num_experts", *_NUM),
            top_k=("moe_k", "num_experts_per_tok"), defaults=(64, 6, 1536),
            more=shared("moe_intermediate_size", times="moe_num_shared_experts", count=2),
        ),
        "mlps": moe_rows.mlps(moe_rows.by_interval),
    },
    names=names.ERNIE_MOE, kv_heads=_kv_heads(4), head_dim=_head_dim(),
)  # fmt: skip
HUNYUAN_MOE = HUNYUAN.derive(
    "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Model", models="Hunyuan A13B",
    fields={
        "moe": moe_rows.experts(
            softmax_router(True), top_k=("moe_topk", "num_experts_per_tok"),
            inner=("intermediate_size",), defaults=(1, 1, 11008), more=shared("intermediate_size"),
        ),
    },
    names=names.with_experts(
        HUNYUAN.names, router="mlp.gate.wg", shared="mlp.shared_mlp"
    ),
)  # fmt: skip
HY_V3 = LLAMA.derive(
    "hy_v3", "HYV3ForCausalLM", "HYV3Model", models="Hunyuan 3",
    fields={
        **_RMS_EPS, "qk_norm": "head",
        "moe": moe_rows.experts(
            moe_rows.hy_router, defaults=(192, 8, 1536),
            more=shared("moe_intermediate_size", times="num_shared_experts"),
        ),
        "mlps": moe_rows.mlps(moe_rows.after_dense(1)),
    },
    names=names.with_experts(
        names.LLAMA, router="mlp.router.gate", correction="mlp.expert_bias",
        shared="mlp.shared_mlp",
    ),
    kv_heads=_kv_heads(8), head_dim=_head_dim(128), positions=_positions(131072),
    rotary=RotaryRules(theta=11158840.0),
)  # fmt: skip
EXAONE_MOE = EXAONE4.derive(
    "exaone_moe", "ExaoneMoeForCausalLM", "ExaoneMoeModel", models="K-EXAONE",
    fields={
        "norm_placement": "pre",
        "moe": moe_rows.experts(
            deepseek_router(True), defaults=(128, 8, 1024),
            more=shared("moe_intermediate_size", times="num_shared_experts"),
        ),
        "mlps": moe_rows.mlps(moe_rows.after_dense(1)),
    },
    names=names.with_experts(names.LLAMA, correction="mlp.e_score_correction_bias"),
)  # fmt: skip
GRANITE_MOE = GRANITE.derive(
    "granitemoe", "GraniteMoeForCausalLM", "GraniteMoeModel", models="Granite 3 MoE",
    fields={
        "moe": moe_rows.experts(
            moe_rows.always(Router(chosen_first=True, rounded=True)),
            num=("num_local_experts",), inner=("intermediate_size",), defaults=(8, 2, 11008),
        ),
    },
    names=names.GRANITE_MOE,
)  # fmt: skip
GRANITE_MOE_SHARED = GRANITE_MOE.derive(
    "granitemoeshared", "GraniteMoeSharedForCausalLM", "GraniteMoeSharedModel",
    models="Granite MoE with a shared expert",
    fields={
        "moe": moe_rows.experts(
            moe_rows.always(Router(chosen_first=True, rounded=True)),
            num=("num_local_experts",), inner=("intermediate_size",), defaults=(8, 2, 11008),
            more=shared("shared_intermediate_size"),
        ),
    },
)  # fmt: skip
MELLUM = QWEN3_MOE.derive(
    "mellum", "MellumForCausalLM", "MellumModel", models="Mellum 2",
    fields={
        "moe": moe_rows.experts(softmax_router(default=True), defaults=(64, 8, 896)),
        "mlps": moe_rows.mlps(lambda reader, spec: lambda layer: True),
    },
    window=window(1024), slides=lambda reader, spec: lambda layer: False,
    rotary=RotaryRules(theta=500000.0),
)  # fmt: skip

GPT_OSS = LLAMA.derive(
    "gpt_oss", "GptOssForCausalLM", "GptOssModel", models="gpt-oss",
    fields={
        **_RMS_EPS, "qkv_bias": flag("attention_bias", True),
        "o_bias": flag("attention_bias", True), "mlp_bias": False,
        "num_sinks": same_as("num_q_heads"),
        "moe": moe_rows.experts(
            moe_rows.always(Router(chosen_first=True, bias=True, rounded=True)),
            num=("num_local_experts", "num_experts"),
            top_k=("num_experts_per_tok", "experts_per_token"),
            inner=("intermediate_size",), defaults=(128, 4, 2880), more=moe_rows.clamped_gate,
        ),
    },
    names=names.GPT_OSS.derive({"sinks": "self_attn"}), kv_heads=_kv_heads(8),
    head_dim=_head_dim(64), positions=_positions(131072), window=window(128),
    slides=lambda reader, spec: lambda layer: layer % 2 == 0, rotary=RotaryRules(theta=150000.0),
)  # fmt: skip
LLAMA4 = LLAMA.derive(
    "llama4_text", "Llama4ForConditionalGeneration", "Llama4ForCausalLM", "Llama4TextModel",
    models="Llama 4 (text, up to 8,191 tokens)",
    fields={
        **_RMS_EPS, "intermediate_size": integer("intermediate_size_mlp", default=16384),
        "mlp_bias": False,
        "qk_norm": lambda reader, spec: "length" if reader.flag("use_qk_norm", True) else "none",
        "rope_interleaved": True,
        "moe": moe_rows.experts(
            moe_rows.always(Router("sigmoid", chosen_first=True, rounded=True)),
            num=("num_local_experts",), inner=("intermediate_size",), defaults=(16, 1, 8192),
            more=shared("intermediate_size", default=8192, weighs_input=True),
        ),
        "mlps": moe_rows.mlps(moe_rows.listed),
    },
    names=names.LLAMA4, kv_heads=_kv_heads(8), head_dim=_head_dim(128), positions=_within_one_chunk,
    slides=lambda reader, spec: lambda layer: False, has_chunks=True,
    rotary=RotaryRules(theta=500000.0), rotates=_rotates_some,
)  # fmt: skip
AFMOE = LLAMA.derive(
    "afmoe", "AfmoeForCausalLM", "AfmoeModel", models="Trinity",
    fields={
        **_RMS_EPS, "mlp_bias": False, "norm_placement": "sandwich", "qk_norm": "head",
        "attn_gate": "dim",
        "embedding_scale": lambda reader, spec: (
            math.sqrt(spec.hidden_size) if reader.flag("mup_enabled", False) else 1.0
        ),
        "moe": moe_rows.experts(
            moe_rows.afmoe_router, defaults=(64, 6, 1408),
            more=shared("moe_intermediate_size", times="num_shared_experts", count=2),
        ),
        "mlps": moe_rows.mlps(layers_from("num_dense_layers", 1)),
    },
    names=names.AFMOE, head_dim=_head_dim(128), positions=_positions(16384), window=window(1024),
    slides=_all_but_every("global_attn_every_n_layers", 4),
    rotates=lambda reader, spec, kinds: tuple(kind == "sliding_attention" for kind in kinds),
)  # fmt: skip
LAGUNA = LLAMA.derive(
    "laguna", "LagunaForCausalLM", "LagunaModel", models="Laguna",
    fields={
        "mlp_bias": False, "qk_norm": "head",
        "attn_gate": lambda reader, spec: (
            "head" if reader.fields.get("gating", True) in (True, "per-head") else "dim"
        ),
        "attn_gate_activation": "softplus",
        "moe": moe_rows.experts(
            moe_rows.laguna_router, defaults=(256, 8, 512), more=moe_rows.laguna_shared,
        ),
        "mlps": moe_rows.mlps(moe_rows.after_dense(1)),
    },
    names=names.LAGUNA, layer_q_heads=_laguna_heads, kv_heads=_kv_heads(8), head_dim=_head_dim(128),
    positions=_positions(131072), window=window(512),
    slides=lambda reader, spec: lambda layer: False,
    rotary=RotaryRules(theta=500000.0, scales_local=False, local_theta=10000.0),
    refused={"moe_apply_router_weight_on_input": "router weights on the experts' input"},
)  # fmt: skip
STEP = LLAMA.derive(
    "step3p5", "Step3p5ForCausalLM", "Step3p7FlashForCausalLM", "Step3p7ForConditionalGeneration",
    "Step3p7TextModel", models="Step-3.5, 3.7 (text)",
    fields={
        **_RMS_EPS, "activation": "silu", "norm_offset": 1.0, "qk_norm": "head",
        "attn_gate": "head",
        "moe": moe_rows.experts(
            moe_rows.step_router, num=("n_routed_experts", "moe_num_experts", *_NUM),
            top_k=("num_experts_per_tok", "moe_top_k"), defaults=(288, 8, 1280),
            more=moe_rows.step_shared,
        ),
        "mlps": moe_rows.mlps(moe_rows.enumerated),
        "mlp_limits": moe_rows.layer_limits("swiglu_limits_shared"),
        "expert_limits": moe_rows.layer_limits("swiglu_limits"),
    },
    names=names.STEP, newer=_newer_step, layer_q_heads=_step_heads,
    kv_heads=integer("num_key_value_heads", "num_attention_groups", high=MAX_HEADS, default=8),
    head_dim=_head_dim(128), positions=_positions(128000),
    scale=lambda reader, spec, layer: float(
        reader.number("query_pre_attn_scalar", high=1e6, default=spec.head_dim) ** -0.5
    ),
    window=window(), slides=lambda reader, spec: lambda layer: False,
)  # fmt: skip

ROWS: tuple[Row, ...] = tuple(row for row in list(vars().values()) if isinstance(row, Row))


def names_of(spec: ModelSpec) -> names.CheckpointNames:
    return next(row.names for row in ROWS if row.family == spec.family)
