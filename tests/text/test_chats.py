"""Conversations of callers: what is refused, and what templates get."""

from __future__ import annotations

import copy
from datetime import datetime
from typing import Any

import pytest

from fastdecode.core.errors import RequestError
from fastdecode.openai.body_errors import BodyError
from fastdecode.openai.messages import read_messages
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.chats import MessageStyle, as_chats, for_template

NOW = datetime(2026, 2, 3)
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize("calls", [5, {"id": "c"}, "f()", [5]])
def test_calls_that_are_no_list_of_objects_are_refused(calls: Any) -> None:
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    with pytest.raises(RequestError, match=r"^messages\[1\]\.tool_calls must be a list") as one:
        as_chats(chat)
    assert one.value.code == "invalid_messages"
    with pytest.raises(RequestError, match=r"^messages\[1\]\[1\]\.tool_calls must be"):
        as_chats([[USER], chat])


def test_parts_that_are_no_text_are_refused() -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(
        RequestError, match=r"messages\[0\]\.content has a part of type 'image_url'"
    ):
        as_chats(image)
    other = [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}, 5]}]
    assert as_chats(other) == [other]


def test_messages_without_calls_are_taken() -> None:
    for calls in (None, []):
        chat = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
        assert as_chats(chat) == [chat]
        assert for_template(chat, MessageStyle(9)) == [USER, {"role": "assistant", "content": ""}]


WRITES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}({% for name, value in call.function.arguments.items() %}"
    "{{ name }}={{ value }};{% endfor %}){% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": []}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "", "refusal": "No."}, "No."),
        ({"content": [], "refusal": "No."}, "No."),
        ({"content": "Yes.", "refusal": None, "audio": None, "function_call": None}, "Yes."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": None, "reasoning_content": "Hm"}, ""),
        ({"content": None, "tool_calls": None}, ""),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": None, "tool_calls": ['{"a": 1}']}, "(a=1;)"),
        ({"content": None, "tool_calls": [{"a": 1}]}, "(a=1;)"),
        ({"content": None, "tool_calls": [None]}, "()"),
        ({"content": None, "tool_calls": [""]}, "()"),
        ({"content": None, "tool_calls": [" "]}, "()"),
        ({"content": None, "tool_calls": ['{"a": ']}, '(arguments={"a": ;)'),
        ({"content": None, "tool_calls": ["[1]"]}, "(arguments=[1];)"),
        ({"content": None, "tool_calls": ["null", '{"a": 1}']}, "(arguments=null;)(a=1;)"),
    ],
)
def test_messages_that_clients_send_back_are_rendered(message: dict[str, Any], text: str) -> None:
    """Over HTTP and in Python; a null never becomes the text None."""
    message = {"role": "assistant", **message}
    if message.get("tool_calls"):
        message["tool_calls"] = [
            {"id": f"call-{i}", "type": "function", "function": {"name": "f", "arguments": each}}
            for i, each in enumerate(message["tool_calls"])
        ]
    template = ChatTemplate(WRITES, "x", {})
    style = MessageStyle.of(WRITES, 0)
    (chat,) = as_chats([USER, message])
    for written in (for_template(chat, style), read_messages([USER, message], style)):
        assert template.render(written, NOW) == f"<user>x<assistant>{text}"
    template.close()


@pytest.mark.parametrize(("id_chars", "call_id"), [(9, "123456789"), (0, "a-long-id-123456789")])
def test_templates_get_arguments_as_objects_and_short_ids(id_chars: int, call_id: str) -> None:
    long_id = "a-long-id-123456789"
    call = {"id": long_id, "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": long_id, "content": "4"},
    ]
    given = copy.deepcopy(chat)
    made = for_template(chat, MessageStyle(id_chars))
    assert made[0]["tool_calls"] == [
        {"id": call_id, "function": {"name": "f", "arguments": {"a": 1}}}
    ]
    assert made[1]["tool_call_id"] == call_id
    assert chat == given, "the caller's messages stay as they are"


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
REFUSED = [{"type": "refusal", "refusal": "No."}]
IMAGE = [{"type": "image"}, *PARTS]
LOOP = "{% for part in message['content'] %}{{ part.text }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "content_format", "given", "made"),
    [
        ("{{ message.content }}", "auto", PARTS, "a\nb"),
        ("{{ message.content }}", "auto", ["a", "b"], "a\nb"),
        ("{{ message.content }}", "auto", IMAGE, IMAGE),
        ("{{ message.content }}", "auto", None, ""),
        ("{{ message.content }}", "auto", [], ""),
        ("{{ message.content }}", "auto", REFUSED, "No."),
        (LOOP, "auto", REFUSED, [{"type": "text", "text": "No."}]),
        (LOOP, "auto", None, [{"type": "text", "text": ""}]),
        ("{{ message.content }}", "openai", "a", PARTS[:1]),
        (LOOP, "auto", "a", PARTS[:1]),
        (LOOP, "auto", PARTS, PARTS),
        (LOOP, "string", PARTS, "a\nb"),
        ("{% if message.content is string %}" + LOOP, "auto", "a", "a"),
        ("{% if message.content is string %}" + LOOP, "auto", PARTS, PARTS),
    ],
)
def test_contents_are_as_the_template_takes_them(
    source: str, content_format: str, given: Any, made: Any
) -> None:
    style = MessageStyle.of(source, 0, content_format)
    assert for_template([{"role": "user", "content": given}], style)[0]["content"] == made


def test_developers_are_the_system_where_the_template_knows_none() -> None:
    chat = [{"role": "developer", "content": "x"}]
    assert for_template(chat, MessageStyle.of("{{ x }}", 0))[0]["role"] == "system"
    style = MessageStyle.of("{% if role == 'developer' %}", 0)
    assert for_template(chat, style)[0]["role"] == "developer"
    with pytest.raises(RequestError, match="auto, string, openai"):
        MessageStyle.of("", 0, "list")


def test_reasoning_has_the_names_that_templates_read() -> None:
    for name in ("reasoning_content", "reasoning"):
        (made,) = for_template([{"role": "assistant", "content": "x", name: "Hm"}], MessageStyle())
        assert (made["reasoning_content"], made["thinking"]) == ("Hm", "Hm")


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "user", "content": None}, "content"),
        ({"role": "user"}, "content"),
        ({"role": "system", "content": []}, "content"),
        ({"role": "assistant", "content": 0}, "content"),
        ({"role": "assistant", "content": {}}, "content"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "content"),
        ({"role": "assistant", "refusal": 5}, "refusal"),
        ({"role": "assistant", "mood": "glad"}, "mood"),
        ({"role": "assistant", "audio": {"id": "a"}}, "audio"),
    ],
)
def test_messages_that_say_nothing_or_more_are_refused(message: dict[str, Any], where: str) -> None:
    with pytest.raises(BodyError) as caught:
        read_messages([USER, message], MessageStyle())
    assert caught.value.param == f"messages[1].{where}"


def test_null_fields_of_tool_messages_are_nothing() -> None:
    for content in ({}, {"content": None}, {"content": []}):
        message = {"role": "tool", "tool_call_id": "c", **content, "mood": None, "refusal": None}
        (made,) = read_messages([message], MessageStyle())
        assert made == {"role": "tool", "tool_call_id": "c", "content": ""}
