"""What of a configuration a text depends on; all else decides how fast it comes."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.spec import MAX_SEQUENCE_TOKENS


@dataclass(frozen=True)
class Identity:
    """Of an engine: with another one of these, its tokens would be others."""

    dtype: DType  # dtype of weights and activations
    kv_dtype: DType
    max_model_len: int


def identify(config: EngineConfig, spec: ModelSpec) -> Identity:
    """What ``config`` makes of a model.

    Args:
        spec: read with the limit that ``config`` asks for.

    Raises:
        ConfigError: ``max_model_len`` exceeds what kernels count.
        UnsupportedModelError: If the checkpoint is in float64, and no other dtype was asked for.
    """
    dtype = spec.choose_dtype(config.s_part.dtype)
    if config.r_part.kv_dtype == "auto":
        return Identity(dtype, dtype, _max_model_len(config, spec))
    kv_dtype = DType.parse(config.r_part.kv_dtype, option="kv_dtype", of_kv=True)
    return Identity(dtype, kv_dtype, _max_model_len(config, spec))


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """What the spec serves, as far as kernels can count."""
    max_model_len = config.s_part.max_model_len
    if max_model_len is not None and max_model_len > MAX_SEQUENCE_TOKENS:
        raise ConfigError(
            Given("max_model_len", max_model_len),
            f" exceeds the {MAX_SEQUENCE_TOKENS} tokens that kernels can count: lower it",
        )
    return min(spec.max_model_len, MAX_SEQUENCE_TOKENS)
