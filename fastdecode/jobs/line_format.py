"""What a batch job needs of the format of its lines: a request out of a line,
an answer into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

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
