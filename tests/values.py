"""Values with other fields, whatever they are made of."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from msgspec import Struct, structs

ValueT = TypeVar("ValueT")


def replace(value: ValueT, **changes: Any) -> ValueT:
    """Return a frozen dataclass or a message with other fields."""
    made: Any = structs.replace if isinstance(value, Struct) else dataclasses.replace
    result: ValueT = made(value, **changes)
    return result
