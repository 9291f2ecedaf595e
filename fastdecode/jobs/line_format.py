"""What a batch job needs of the format of its lines: a request out of a line, an answer into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

from fastdecode.core.errors import FastDecodeError, RequestError
from fastdecode.core.sequence import Prompt, RequestOutput, SamplingParams
from fastdecode.text.codec import TextCodec


@dataclass(frozen=True)
class Chat:
    """A conversation, to become a prompt by the model's chat template."""

    messages: Sequence[Mapping[str, str]]
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    """More names for the template."""


Turn: TypeAlias = "Prompt | Chat"
LineId: TypeAlias = "str | int"
"""As the line gave it. 1 and "1" are the same."""


@dataclass(frozen=True)
class LineRequest:
    """What a line asks: some prompts, all to be continued in the same way."""

    line_id: LineId
    prompts: tuple[Turn, ...]
    params: SamplingParams
    model: str | None = None
    """The model's name as the line gave it."""
    want_token_ids: bool = False


class LineError(RequestError):
    """A line that can't be answered. ``line_id`` and ``param`` (the field to blame), as far as they are known."""

    def __init__(self, message: str, *, code: str, line_id: LineId | None = None, param: str | None = None) -> None:
        super().__init__(message, code=code)
        self.line_id = line_id
        self.param = param


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

    def refusal(self, number: int, line_id: LineId | None, error: FastDecodeError) -> dict[str, Any]:
        """The answer to a line that is answered with an error."""

    def identify(self, answer: dict[str, Any]) -> tuple[int, bool]:
        """Which line an answer is for, and whether it is an error.

        Raises:
            KeyError, ValueError, TypeError: it is no answer of this format and this run.
        """
