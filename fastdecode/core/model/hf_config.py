"""Steps in which every family's ``config.json`` is read: what is asked for, its
sizes, its attention."""

from __future__ import annotations

from dataclasses import replace

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, Given, UnsupportedModelError
from fastdecode.core.model.config_reader import ConfigReader
from fastdecode.core.model.spec import Activation, ModelSpec

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
    "relu2": "relu2",
    "xielu": "xielu",
}
REFUSED_IF_TRUE = {
    "is_encoder_decoder": "an encoder-decoder",
    "add_cross_attention": "cross-attention",
    "use_bidirectional_attention": "bidirectional attention",
    "apply_residual_connection_post_layernorm": "a residual taken after the norm",
    "pruned_heads": "pruned heads",
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
_OF_ALL_PARTS = (
    "architectures",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
)
"""Fields of a model of several parts that overrule its text part's."""


def text_part(reader: ConfigReader) -> ConfigReader:
    """The config of a model's text part, where it has several (``text_config``),
    with what the whole says of it; else the config as it is."""
    text = reader.mapping("text_config")
    if text is None:
        return reader
    whole = {
        name: reader.fields[name] for name in _OF_ALL_PARTS if reader.fields.get(name) is not None
    }
    return ConfigReader({**text.fields, **whole}, reader.where)


def refuse_feature(reader: ConfigReader, name: str, feature: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{reader.where}: {name!r} asks for {feature}, which isn't implemented. Use a checkpoint "
        "without it."
    )


def read_dtype(reader: ConfigReader, default: str) -> DType | None:
    """None for float64: weights can be read from it, but nothing runs in it."""
    name = reader.string("dtype", "torch_dtype", default=default)
    if name.removeprefix("torch.") in ("float64", "double"):
        return None
    try:
        return DType.parse(name)
    except ConfigError:
        rule = f"one of {', '.join(d.value for d in DType)}"
        raise UnsupportedModelError(
            f"{reader.where}: the dtype {name!r} isn't implemented; it must be {rule}."
        ) from None


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
