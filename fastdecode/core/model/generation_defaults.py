"""Sampling parameters that a model's ``generation_config.json`` recommends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.core.model.files import read_model_json
from fastdecode.core.sequence import SamplingParams

GENERATION_CONFIGS = ("auto", "ignore")
_OF_SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p")
_NAMES: Final[Mapping[str, str]] = {
    **{name: name for name in _OF_SAMPLING},
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Name in the file → in ``SamplingParams``; the others there aren't ours."""


def generation_defaults(model: Path, generation_config: str = "auto") -> dict[str, Any]:
    """Return sampling parameters for requests that don't give them, by name.

    Args:
        generation_config: ``ignore`` for none, ``auto`` for those of the file. If it has
            ``do_sample: false``, its sampling parameters don't count, as in transformers.

    Raises:
        ConfigError: a value there makes no sense.
        CheckpointError: the file can't be read.
    """
    if generation_config == "ignore":
        return {}
    path = model / "generation_config.json"
    said = read_model_json(path)
    unused = _OF_SAMPLING if said.get("do_sample") is False else ()
    found = {
        here: said[name]
        for name, here in _NAMES.items()
        if said.get(name) is not None and name not in unused
    }
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ConfigError(
            f"{path}: {error}. Correct it, or leave it out by --generation-config ignore"
        ) from None
    neutral = SamplingParams()
    return {name: value for name, value in found.items() if value != getattr(neutral, name)}


def with_defaults(
    defaults: Mapping[str, Any], given: Mapping[str, Any], said: Mapping[str, Any]
) -> dict[str, Any]:
    """A request's sampling parameters.

    Args:
        defaults: of ``generation_defaults``. Greedy requests take none of them
            but ``max_tokens``: their tokens are the model's own.
        given: for all requests, by the command line.
    """
    chosen = {**given, **said}
    if chosen.get("temperature", defaults.get("temperature")) == 0:
        defaults = {name: x for name, x in defaults.items() if name == "max_tokens"}
    return {**defaults, **chosen}


def told(defaults: Mapping[str, Any]) -> str:
    values = ", ".join(f"{name} {value}" for name, value in defaults.items())
    return (
        f"defaults of generation_config.json: {values}; not for greedy requests, nor with "
        "--generation-config ignore"
    )
