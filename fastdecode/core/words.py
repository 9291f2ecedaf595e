"""Words of others, as they may be logged and shown."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def printable(text: str) -> str:
    """The same, with what would move a cursor, colour a terminal or begin a
    line of its own spelt out."""
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def make_printable(record: Any) -> None:
    """Do that to every text of a frozen dataclass, in its ``__post_init__``."""
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, str):
            object.__setattr__(record, field.name, printable(value))
        elif isinstance(value, tuple) and any(isinstance(x, str) for x in value):
            words = tuple(printable(x) if isinstance(x, str) else x for x in value)
            object.__setattr__(record, field.name, words)
