"""Well-known models by name, as the ``config.json`` that their checkpoints carry.

They are in ``models.json``: a model's config is that of its ``base``, with its own fields over it.
GPT-3 was never released: its shapes (arXiv 2005.14165, table 2.1) are written as GPT-2 configs.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from cost_model.hardware import find_name
from fastdecode.core.errors import CheckpointError, ConfigError, Given
from fastdecode.core.json_file import read_object
from fastdecode.core.model.families import read_model_spec
from fastdecode.core.model.local_models import find_model
from fastdecode.core.model.refused import REFUSED
from fastdecode.core.model.spec import ModelSpec

MAX_CONFIG_BYTES = 16 << 20
_TUNED: Final = re.compile(r"-(instruct|it|chat|hf|base|thinking)(?=-|$)|-\d{4}$")


@dataclass(frozen=True)
class KnownModel:
    name: str
    id: str | None
    """``org/name`` at Hugging Face. None if it has none."""
    parameters: int
    config: Mapping[str, Any]

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.name,) if self.id is None else (self.name, self.id, self.id.split("/")[1])


@cache
def _tables() -> Mapping[str, Any]:
    text = resources.files("cost_model").joinpath("models.json").read_text("utf-8")
    tables: Mapping[str, Any] = json.loads(text)
    return tables


@cache
def known_models() -> Mapping[str, KnownModel]:
    models: dict[str, KnownModel] = {}
    for row in _tables()["models"]:
        config = {**_tables()["bases"].get(row.get("base"), {}), **row["config"]}
        models[row["name"]] = KnownModel(row["name"], row.get("id"), row["parameters"], config)
    return models


def model_named(name: str) -> ModelSpec:
    models = known_models().values()
    spellings = {each: model.name for model in models for each in model.spellings}
    tuned = {_untuned(each): own for each, own in spellings.items()}
    known = tuned.get(_untuned(name)) if name not in spellings else None
    if known is None:
        try:
            known = find_name(name.rpartition("/")[2] or name, spellings, option="model")
        except ConfigError:
            _refuse(name)
            raise
    return read_model_spec(known_models()[known].config, name=known)


def _refuse(name: str) -> None:
    """Raises ConfigError: If FastDecode does not implement the model of this name."""
    own = name.rpartition("/")[2].lower().replace(" ", "-")
    for pattern, architecture in reversed(_tables()["refused"].items()):
        if re.match(pattern, own):
            (row,) = (each for each in REFUSED if architecture in each.architectures)
            raise ConfigError(
                Given("model", name),
                f": it has {row.what}, which FastDecode does not implement. Use another model; "
                "--list has the names",
                code="unsupported_model",
            )


def _untuned(name: str) -> str:
    """Strip how a release was trained: ``Qwen/Qwen2.5-7B-Instruct`` is ``qwen2.5-7b``."""
    return _TUNED.sub("", name.rpartition("/")[2].lower().replace(" ", "-"))


def read_model(model: str) -> ModelSpec:
    """Return the spec of a model directory, a ``config.json``, a known name, or a name in the
    local Hugging Face cache, whichever ``model`` is first.

    Raises ConfigError: If it isn't one of these, or the file can't be read. ModelError: If the
    config isn't one of a model that we implement."""
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        if path.name == "config.json" or path.suffix == ".json":
            raise ConfigError(
                Given("model", model), f": there is no file {path}", code="unknown_model"
            )
        try:
            return model_named(model)
        except ConfigError:
            with contextlib.suppress(CheckpointError):
                path = find_model(model) / "config.json"
            if not path.is_file():
                raise
    beside = path.with_name("hf_quant_config.json")
    told = _read(model, beside) if path.name == "config.json" and beside.is_file() else None
    name = path.parent.name or model
    return read_model_spec(_read(model, path), name=name, hf_quant_config=told)


def _read(model: str, path: Path) -> dict[str, Any]:
    return read_object(
        path,
        most_bytes=MAX_CONFIG_BYTES,
        refuse=lambda why: ConfigError(Given("model", model), f": {path}: {why}"),
    )
