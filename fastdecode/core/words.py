"""Words of others, as they may be logged and shown."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import force_setattr


def printable(text: str) -> str:
    """The same, with what would move a cursor, colour a terminal or begin a
    line of its own spelt out."""
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def make_printable(record: Any, max_chars: int | None = None) -> None:
    """Make every text of a frozen dataclass or Struct printable, in its ``__post_init__``. Texts
    longer than ``max_chars`` are cut."""
    is_struct = isinstance(record, Struct)
    put = force_setattr if is_struct else object.__setattr__
    for name in record.__struct_fields__ if is_struct else record.__dataclass_fields__:
        value = getattr(record, name)
        if isinstance(value, str):
            if not value.isprintable():
                value = printable(value)
                put(record, name, value)
            if max_chars is not None and len(value) > max_chars:
                put(record, name, value[: max_chars - 3] + "...")
        elif isinstance(value, tuple) and any(isinstance(x, str) for x in value):
            put(record, name, tuple(printable(x) if isinstance(x, str) else x for x in value))
