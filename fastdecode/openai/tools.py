"""What a chat's body says of tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastdecode.core.errors import RequestError
from fastdecode.core.sequence import SamplingParams
from fastdecode.openai.body_errors import BodyError, blamed
from fastdecode.text.chat_format import AnswerFormat, ChatFormat
from fastdecode.text.tools import Tools

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")


def read_tools(body: Mapping[str, Any]) -> Tools | None:
    """The tools that an answer may call; None: there are none. Raises BodyError."""
    with _blaming_a_field():
        return Tools.of(*(body.get(name) for name in TOOL_FIELDS))


def with_answer_format(
    model: ChatFormat, tools: Tools | None, params: SamplingParams
) -> tuple[AnswerFormat | None, SamplingParams]:
    """What a chat's answer has beside text, and its sampling parameters so that it
    has it. Raises BodyError."""
    with _blaming_a_field():
        answer = model.answer(tools)
        return answer, params if answer is None else model.params(params, tools)


@contextmanager
def _blaming_a_field() -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        param = blamed(error, TOOL_FIELDS)
        raise BodyError(str(error), code=error.code, param=param) from None
