"""Words of others, as they may be logged and shown."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import force_setattr


def printable(text: str) -> str:
    """Return a text with escapes for what moves a cursor, colours or begins a line."""
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def is_unicode(text: str) -> bool:
    """Return False if a text has a lone surrogate, which JSON can spell and UTF-8 cannot."""
    return text.isascii() or not any("\ud800" <= x <= "\udfff" for x in text)


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
