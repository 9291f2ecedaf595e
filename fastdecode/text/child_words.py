"""What a process and its ``LimitedChild`` say to each other: JSON behind its length."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

LENGTH = struct.Struct("<I")
"""Of a question or an answer, in bytes; stands before it."""
Answer = Callable[[dict[str, Any]], Any]
"""From a question to its answer, in JSON's types. Raises Refusal, or whatever
the model's authors make it raise."""


class Refusal(Exception):  # noqa: N818  (an answer of its kind)
    """What is asked for can't be done."""


def pack(message: Mapping[str, Any]) -> bytes:
    """A message as it travels. Half a surrogate pair, which JSON can spell, passes."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


def unpack(raw: bytes) -> Any:
    """Raises ValueError, RecursionError: it is no message."""
    return json.loads(raw.decode("utf-8", "surrogatepass"))
