"""That every case is handled, for the type checker and at run time."""

from __future__ import annotations

from typing import NoReturn


def assert_never(value: NoReturn) -> NoReturn:
    """The last case of a ``match``: the type checker refuses it where a value could come to it."""
    raise AssertionError(f"{value!r} is a case that nobody thought of")
