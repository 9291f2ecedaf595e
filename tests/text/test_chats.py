"""Conversations of callers: what is refused, and what templates get."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fastdecode.core.errors import RequestError
from fastdecode.text.chats import as_chats, for_template

USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize("calls", [5, {"id": "c"}, "f()", [5]])
def test_calls_that_are_no_list_of_objects_are_refused(calls: Any) -> None:
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    with pytest.raises(RequestError, match=r"^messages\[1\]\.tool_calls must be a list") as one:
        as_chats(chat)
    assert one.value.code == "invalid_messages"
    with pytest.raises(RequestError, match=r"^messages\[1\]\[1\]\.tool_calls must be"):
        as_chats([[USER], chat])


def test_messages_without_calls_are_taken() -> None:
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": None}]
    assert as_chats(chat) == [chat] and for_template(chat, 9) == chat


@pytest.mark.parametrize(("id_chars", "call_id"), [(9, "123456789"), (0, "a-long-id-123456789")])
def test_templates_get_arguments_as_objects_and_short_ids(id_chars: int, call_id: str) -> None:
    long_id = "a-long-id-123456789"
    call = {"id": long_id, "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": long_id, "content": "4"},
    ]
    given = copy.deepcopy(chat)
    made = for_template(chat, id_chars)
    assert made[0]["tool_calls"] == [
        {"id": call_id, "function": {"name": "f", "arguments": {"a": 1}}}
    ]
    assert made[1]["tool_call_id"] == call_id
    assert chat == given, "the caller's messages stay as they are"
