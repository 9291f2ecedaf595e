"""Fields of a message that travel as JSON: a value that is no plain number, text or array,
and comes too seldom for a layout of its own.

``name: Annotated[X, AsJson(to_json, from_json)]``. On the wire it is an array of bytes, UTF-8.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_origin, get_type_hints

import numpy as np

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.arrays import Array


@dataclass(frozen=True)
class AsJson:
    """How a field's value becomes JSON's types, and what a peer sent a value."""

    to_json: Callable[[Any], Any]
    from_json: Callable[[Any], Any]
    """Raises ProtocolError, or what Python raises of values of another type: it can't be one."""

    @classmethod
    def listed(cls, to_json: Callable[[Any], Any], from_json: Callable[[Any], Any]) -> AsJson:
        """For a sequence of such values."""
        return cls(
            lambda values: [to_json(each) for each in values],
            lambda said: tuple([from_json(each) for each in _list(said)]),
        )

    def value(self, said: Any) -> Any:
        """Of JSON's types. Raises ProtocolError: it can't be one."""
        try:
            return self.from_json(said)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ProtocolError(
                f"{reprlib.repr(said)} is not what belongs there: {error}"
            ) from None

    def write(self, value: Any) -> Array:
        """As it travels, uint8 [N]."""
        return packed(self.to_json(value))

    def read(self, raw: Array) -> Any:
        """What came. Raises ProtocolError: it is no JSON, or can't be such a value."""
        return self.value(unpacked(raw))


def _list(said: Any) -> list[Any]:
    if not isinstance(said, list):
        raise TypeError("it is no list")
    return said


def json_fields(kind: type[Any]) -> dict[str, AsJson]:
    """Of a message's class, by their names."""
    hints = get_type_hints(kind, include_extras=True)
    marks = {n: x.__metadata__[0] for n, x in hints.items() if get_origin(x) is Annotated}
    return {name: mark for name, mark in marks.items() if isinstance(mark, AsJson)}


def packed(said: Any) -> Array:
    """In JSON's types → uint8 [N]."""
    raw = json.dumps(said, ensure_ascii=False, separators=(",", ":"))
    return np.frombuffer(raw.encode("utf-8", "surrogatepass"), np.uint8)


def unpacked(raw: Array) -> Any:
    """The other way. Raises ProtocolError: it is no JSON."""
    try:
        return json.loads(raw.tobytes().decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"what should be JSON is none: {error}") from None
