"""Typed, bounded reads of ``config.json``, which another program wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fastdecode.core.dtype import DType
from fastdecode.core.errors import CheckpointError, ConfigError, Given, UnsupportedModelError

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


class ConfigReader:
    """Reads fields of ``where`` (a file's name, for messages) and refuses those that can't be
    right.

    Fields have had several names over the years: every method takes all of them, newest first, and
    reads the first that is present and not null. Every refusal is a ``CheckpointError`` that names
    the file, the field, the value that was found and what it must be."""

    def __init__(self, fields: Mapping[str, object], where: str) -> None:
        self.fields = fields
        self.where = where
        self.asked: set[str] = set()
        """Names that were looked for."""

    def find(self, *names: str) -> tuple[str, object]:
        """The name and value of the first field that is present and not null;
        the first name and None if none is."""
        self.asked.update(names)
        for name in names:
            value = self.fields.get(name)
            if value is not None:
                return name, value
        return names[0], None

    def unknown(self, known: Collection[str] = ()) -> list[str]:
        """Return the fields that ask for something, were not looked for and are not ``known``."""
        asking = {name for name, value in self.fields.items() if value}
        return sorted(asking - self.asked - set(known))

    def refuse(self, name: str, value: object, rule: str) -> CheckpointError:
        found = "is missing" if value is None else f"is {Given(name, value).shown}"
        return CheckpointError(
            f"{self.where}: {name!r} {found}; it must be {rule}. The file is damaged or isn't "
            "this model's: "
            f"fetch it again, or correct the field."
        )

    def integer(self, *names: str, low: int = 1, high: int, default: int | None = None) -> int:
        """A whole number within ``low..high``; ``default`` stands for a missing
        field, which is refused without one."""
        value = self.optional_integer(*names, low=low, high=high)
        if value is None:
            value = default
        if value is None:
            raise self.refuse(names[0], None, f"a whole number from {low} to {high}")
        return value

    def optional_integer(self, *names: str, low: int = 1, high: int) -> int | None:
        """As ``integer``, but a missing or null field is None."""
        name, value = self.find(*names)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # some exporters write 4096.0
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(name, value, f"a whole number from {low} to {high}")
        return value

    def number(self, *names: str, high: float = 1e12, default: float | None = None) -> float:
        """A finite number above 0 and at most ``high``; a missing field is
        ``default``, or refused without one."""
        value = self.optional_number(*names, high=high)
        if value is None:
            value = default
        if value is None:
            raise self.refuse(names[0], None, f"a number above 0 and at most {high:g}")
        return value

    def optional_number(self, *names: str, high: float = 1e12) -> float | None:
        """As ``number``, but a missing or null field is None."""
        name, value = self.find(*names)
        return None if value is None else self._positive(name, value, high)

    def numbers(self, name: str, length: int, *, high: float = 1e12) -> tuple[float, ...]:
        """A list of exactly ``length`` finite numbers above 0."""
        _, value = self.find(name)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != length:
            raise self.refuse(name, value, f"a list of {length} numbers above 0")
        return tuple(self._positive(f"{name}[{i}]", item, high) for i, item in enumerate(value))

    def integers(self, name: str, *, low: int = 0, high: int) -> tuple[int, ...]:
        """A list of whole numbers within ``low..high``; a missing field is an empty one."""
        rule = f"a list of whole numbers from {low} to {high}"
        items = self._items(name, rule, lambda x: isinstance(x, int) and low <= x <= high)
        return tuple(map(int, items))

    def flag(self, name: str, default: bool) -> bool:
        """True or false; a missing field is ``default``."""
        _, value = self.find(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, value, "true or false")
        return value

    def string(self, *names: str, default: str | None = None) -> str:
        """A non-empty string; a missing field is ``default``, or refused without one."""
        name, value = self.find(*names)
        if value is None:
            value = default
        if not isinstance(value, str) or not value:
            raise self.refuse(name, value, "a string")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings; a missing field is an empty one."""
        return self._items(name, "a list of strings", lambda x: isinstance(x, str))

    def mapping(self, *names: str) -> ConfigReader | None:
        """A reader of a nested object; None if the field is missing."""
        name, value = self.find(*names)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(name, value, "an object")
        return ConfigReader(value, f"{self.where}, {name!r}")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; a missing field is an empty list."""
        _, value = self.find(name)
        if value is None:
            return ()
        items = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
        ids: list[int] = []
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 1 << 31:
                raise self.refuse(name, value, "a token id or a list of token ids")
            ids.append(item)
        return tuple(ids)

    def _items(self, name: str, rule: str, is_item: Callable[[Any], bool]) -> tuple[Any, ...]:
        _, value = self.find(name)
        if value is None:
            return ()
        if (
            isinstance(value, str)
            or not isinstance(value, Sequence)
            or not all(map(is_item, value))
        ):
            raise self.refuse(name, value, rule)
        return tuple(value)

    def _positive(self, name: str, value: object, high: float) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= high:
            raise self.refuse(name, value, f"a number above 0 and at most {high:g}")
        if not math.isfinite(value):
            raise self.refuse(name, value, "finite")
        return float(value)


def text_part(reader: ConfigReader) -> ConfigReader:
    """Return the config of the text part of a model with several (``text_config``), with the
    fields of the whole that overrule it. Return any other config as it is."""
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
