"""What a batch job needs of the format of its lines: a request out of a line,
an answer into one."""

from __future__ import annotations

import json
import marshal
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, TypeAlias

from fastdecode.conversations.turns import MAX_ID_CHARS
from fastdecode.core.errors import FastDecodeError, RequestError
from fastdecode.core.sequence import SHARED, CacheUse, RequestOutput, SamplingParams
from fastdecode.openai.chat import Turn
from fastdecode.openai.requests import BodyRequest
from fastdecode.text.codec import TextCodec

LineId: TypeAlias = "str | int"
"""As the line gave it. 1 and "1" are the same."""


@dataclass(frozen=True)
class LineRequest:
    """What a line asks: some prompts, all to be continued in the same way."""

    line_id: LineId
    prompts: tuple[Turn, ...]
    params: SamplingParams
    body: BodyRequest | None = None
    """The body that it is the line of, where lines have bodies."""
    cache: CacheUse = SHARED
    conversation_id: str | None = None
    """The conversation that it is a turn of."""


class LineError(RequestError):
    """A line that can't be answered. ``line_id``, ``param`` (the field to
    blame) and ``conversation_id`` (whose turn it was to be), as far as they are
    known."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        line_id: LineId | None = None,
        param: str | None = None,
        conversation_id: object = None,
    ) -> None:
        super().__init__(message, code=code)
        self.line_id = line_id
        self.param = param
        self.conversation_id = conversation_id if isinstance(conversation_id, str) else None


class LineFormat(Protocol):
    """Lines of one kind. Lines have numbers, from 1, by which answers name them."""

    name: ClassVar[str]
    id_field: ClassVar[str]
    duplicate_code: ClassVar[str]

    def parse(self, raw: bytes, number: int) -> LineRequest:
        """Raises LineError: the line is no request that can be answered."""

    def answer(
        self, number: int, request: LineRequest, outputs: Sequence[RequestOutput], codec: TextCodec
    ) -> dict[str, Any]:
        """The answer to a request of which every prompt was continued."""

    def refusal(
        self, number: int, line_id: LineId | None, error: FastDecodeError
    ) -> dict[str, Any]:
        """The answer to a line that is answered with an error."""

    def identify(self, answer: dict[str, Any]) -> tuple[int, bool]:
        """Which line an answer is for, and whether it is an error.

        Raises:
            KeyError, ValueError, TypeError: it is no answer of this format and
                this run.
        """


_FREE: Final = frozenset(
    ("id", "custom_id", "prompt", "prompt_token_ids", "seed", "conversation_id", "user")
)
"""Fields of a line or a body whose content no check reads."""
_TEXT, _LONG_TEXT, _WHOLE, _WHOLES = (), ((),), ..., b""
"""What a shape has in place of such content. JSON has none of these values."""
_LEAST_LONG: Final = 10**18
"""Whole numbers from here on are checked."""


def shape_of(raw: bytes) -> tuple[LineId | None, bytes | None]:
    """Return a line's id, and its shape: what is left without contents that no check reads.

    Lines of one shape are all valid, or all bad. A line without an id has no shape.
    """
    try:
        line = json.loads(raw.decode())
        line_id = line.get("id", line.get("custom_id"))
        _blank(line, _FREE)
        body = line.get("body")
        if isinstance(body, dict):
            _blank(body, _FREE)
            for message in body.get("messages") or ():
                if isinstance(message.get("content"), list):
                    for part in message["content"]:
                        _blank(part, {"text"})
                else:
                    _blank(message, {"content"})
    except (ValueError, RecursionError, AttributeError, TypeError):
        return None, None
    if not isinstance(line_id, (str, int)):
        return None, None
    # Unlike repr: a third of the time. It is compared, and never loaded.
    return line_id, marshal.dumps(line, 2)


def _blank(fields: dict[str, Any], names: Set[str]) -> None:
    """Replace texts and whole numbers of these names. Raises ValueError: a text is no UTF-8."""
    for name in fields.keys() & names:
        value = fields[name]
        kind = type(value)
        if kind is str and value:
            if not value.isascii():
                value.encode()
            fields[name] = _TEXT if len(value) <= MAX_ID_CHARS else _LONG_TEXT
        elif kind is int and -_LEAST_LONG < value < _LEAST_LONG:
            fields[name] = _WHOLE
        elif kind is list and value and all(type(each) is int for each in value):
            fields[name] = _WHOLES
