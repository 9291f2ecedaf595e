"""What is wrong with a body, and which of its fields is to blame."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from fastdecode.core.errors import Given, RequestError

SHOWN = 64
"""Letters of what a client says that an error repeats."""


class BodyError(RequestError):
    """A body that can't be answered. ``param``: the field to blame, if it is known."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, code=code)
        self.param = param


def refuse(param: str, problem: str, code: str = "invalid_value") -> NoReturn:
    """Raise BodyError: ``param`` has this problem."""
    raise BodyError(f"{param} {problem}", code=code, param=param)


def blamed(error: RequestError, names: Iterable[str]) -> str | None:
    """Return the first of these parameters that an error names."""
    wanted = frozenset(names)
    given = (word.name for word in error.words if isinstance(word, Given))
    return next((name for name in given if name in wanted), None)


@contextmanager
def blaming(*names: str, otherwise: str | None = None) -> Iterator[None]:
    """Raise a RequestError as a BodyError of the first of these fields that it names."""
    try:
        yield
    except RequestError as error:
        param = blamed(error, names) or otherwise
        raise BodyError(str(error), code=error.code, param=param) from None


def refuse_unknown(
    given: dict[str, Any], known: Sequence[str], also: Collection[str], where: str
) -> None:
    """Raise BodyError if a name that isn't null is neither known nor one of the others."""
    for name, value in given.items():
        if value is not None and name not in known and name not in also:
            # A name of a thousand letters isn't misspelled, and comparing it would take long.
            near = difflib.get_close_matches(name, known, n=1) if len(name) <= SHOWN else ()
            name = name[:SHOWN]
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise BodyError(
                f"{where} has an unknown field {name!r}: {hint}", code="unknown_field", param=name
            )
