"""Steps in which every family's ``config.json`` is read: what is asked for, its
sizes, its attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypedDict

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, Given, UnsupportedModelError
from fastdecode.core.model.config_reader import ConfigReader
from fastdecode.core.model.rope import MAX_POSITIONS
from fastdecode.core.model.spec import Activation, ModelSpec
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


class Shape(TypedDict):
    vocab_size: int
    hidden_size: int
    embedding_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


def find_family(reader: ConfigReader, known: Mapping[str, tuple[str, ...]]) -> tuple[str, str]:
    """The family and the architecture that ``architectures`` names, or else
    ``model_type``.

    Args:
        known: family → the architectures that it implements.
    """
    for name, why in (
        ("auto_map", "code of its own"),
        ("quantization_config", "quantised weights"),
    ):
        if reader.fields.get(name):
            raise _refuse_feature(reader, name, why)
    architectures = reader.strings("architectures")
    model_type = reader.string("model_type", default="") if reader.fields.get("model_type") else ""
    for family, names in known.items():
        if architectures and architectures[0] in names:
            return family, architectures[0]
        if not architectures and model_type == family:
            return family, names[0]
    found = architectures[0] if architectures else model_type
    all_known = ", ".join(names[0] for names in known.values())
    if not found:
        raise reader.refuse("architectures", None, f"a list that starts with one of {all_known}")
    raise UnsupportedModelError(
        f"{reader.where}: the architecture {found!r} is not supported. Supported are "
        f"{all_known}. Use a checkpoint of one of these."
    )


def refuse_features(reader: ConfigReader) -> None:
    for name, feature in _REFUSED_IF_TRUE.items():
        value = reader.fields.get(name)
        if (value and value != 1) or value is True:
            raise _refuse_feature(reader, name, feature)


def _refuse_feature(reader: ConfigReader, name: str, feature: str) -> UnsupportedModelError:
    mends = {
        "auto_map": "Code that comes with a checkpoint is never run. If the weights are those of a "
        "plain architecture that FastDecode implements, delete the field",
        "quantization_config": "Use the checkpoint in float32, float16 or bfloat16 that it was "
        "made from",
    }
    mend = mends.get(name, "Use a checkpoint without it")
    return UnsupportedModelError(
        f"{reader.where}: {name!r} asks for {feature}, which isn't implemented. {mend}."
    )


def read_dtype(reader: ConfigReader) -> DType | None:
    """None for float64: weights can be read from it, but nothing runs in it."""
    name = reader.string("dtype", "torch_dtype", default="float32")
    if name.removeprefix("torch.") in ("float64", "double"):
        return None
    try:
        return DType.parse(name)
    except ConfigError:
        rule = f"one of {', '.join(d.value for d in DType)}"
        raise UnsupportedModelError(
            f"{reader.where}: the dtype {name!r} isn't implemented; it must be {rule}."
        ) from None


def read_shape(
    reader: ConfigReader,
    grouped: bool,
    default_kv_heads: int | None,
    default_head_dim: int | None,
) -> Shape:
    """Sizes, under all the names that they have had.

    Args:
        grouped: the family has ``num_key_value_heads`` and ``head_dim``; else
            every query head has its own KV head, and the heads divide the
            hidden size.
    """
    hidden = reader.integer("hidden_size", "n_embd", "n_embed", high=MAX_HIDDEN)
    heads = reader.integer("num_attention_heads", "n_head", high=MAX_HEADS)
    kv_heads = heads
    if grouped:
        kv_heads = reader.integer(
            "num_key_value_heads", high=MAX_HEADS, default=default_kv_heads or heads
        )
    if heads % kv_heads:
        raise reader.refuse(
            "num_key_value_heads", kv_heads, f"a divisor of the {heads} query heads"
        )
    head_dim = reader.optional_integer("head_dim", high=MAX_HEAD_DIM) if grouped else None
    if head_dim is None:
        head_dim = default_head_dim
    if head_dim is None:
        if hidden % heads or not 1 <= hidden // heads <= MAX_HEAD_DIM:
            rule = f"a multiple of the {heads} heads, at most {MAX_HEAD_DIM} dims a head"
            raise reader.refuse("hidden_size", hidden, rule)
        head_dim = hidden // heads
    return Shape(
        vocab_size=reader.integer("vocab_size", high=MAX_VOCAB),
        hidden_size=hidden,
        embedding_size=hidden,
        num_layers=reader.integer("num_hidden_layers", "n_layer", high=MAX_LAYERS),
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


def limit_length(spec: ModelSpec, max_model_len: int | None) -> ModelSpec:
    if max_model_len is None:
        return spec
    if not 1 <= max_model_len <= spec.max_model_len:
        raise ConfigError(
            Given("max_model_len", max_model_len),
            f" is not within 1..{spec.max_model_len}, what {spec.name} serves",
        )
    return replace(spec, max_model_len=max_model_len)


def read_activation(reader: ConfigReader, *names: str, default: str) -> Activation:
    name = reader.string(*names, default=default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{reader.where}: the activation {name!r} is not supported. Supported are "
            f"{', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[name]


def read_intermediate_size(reader: ConfigReader, *names: str, default: int | None = None) -> int:
    return reader.integer(*names, high=MAX_INTERMEDIATE, default=default)


def read_max_positions(reader: ConfigReader, *names: str, default: int | None = None) -> int:
    return reader.integer(*names, high=MAX_POSITIONS, default=default)


def make_attention(
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


def read_window(reader: ConfigReader, default: int | None = None) -> int | None:
    if "sliding_window" not in reader.fields:
        return default
    return reader.optional_integer("sliding_window", high=(1 << 31) - 1)


def read_layer_windows(
    reader: ConfigReader, spec: ModelSpec, window: int | None, default: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """``layer_types`` says which layers see only a window; without it, ``default`` does."""
    kinds = reader.strings("layer_types")
    if not kinds:
        return tuple(window if default(layer) else None for layer in range(spec.num_layers))
    if len(kinds) != spec.num_layers:
        raise reader.refuse(
            "layer_types", kinds, f"a list of {spec.num_layers} entries, one a layer"
        )
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"{reader.where}: layers of the type {kind!r} aren't implemented."
            )
    if window is None and "sliding_attention" in kinds:
        raise reader.refuse(
            "sliding_window", None, "a number of tokens, since layer_types has sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def refuse_layer_types(reader: ConfigReader) -> None:
    if len(set(reader.strings("layer_types"))) > 1:
        raise UnsupportedModelError(
            f"{reader.where}: this family with different 'layer_types' isn't implemented."
        )
