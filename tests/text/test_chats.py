"""Conversations of callers: what is refused, and what templates get."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from fastdecode.conversations.arguments import as_chats
from fastdecode.core.errors import RequestError
from fastdecode.openai.body_errors import BodyError
from fastdecode.openai.requests import read_messages
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.chats import MessageStyle, Rendering, for_template
from fastdecode.text.child import Limits

NOW = datetime(2026, 2, 3)
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize("calls", [5, {"id": "c"}, "f()", [5]])
def test_calls_that_are_no_list_of_objects_are_refused(calls: Any) -> None:
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    for given, where in ((chat, r"messages\[1\]"), ([[USER], chat], r"messages\[1\]\[1\]")):
        with pytest.raises(RequestError, match=rf"^{where}\.tool_calls must be a list") as one:
            as_chats(given)
        assert one.value.code == "invalid_messages"


def test_parts_that_only_a_template_knows_are_taken_in_python() -> None:
    chat = [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}, "x"]}]
    assert as_chats(chat) == [chat]
    with pytest.raises(BodyError, match="part of type 'thinking'"):
        read_messages(chat)


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
    how = Rendering(style=MessageStyle.of(template.probe))
    (chat,) = as_chats([USER, message])
    assert chat == [USER, message]
    for written in (chat, read_messages([USER, message])):
        assert template.render(written, NOW, how) == f"<user>x<assistant>{text}"
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
EACH = "{% for m in messages %}"
END = "{% endfor %}"
LOOP = EACH + "{% for part in m['content'] %}{{ part.text }}{% endfor %};" + END
EITHER = EACH + (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ part.text }}+{% endfor %}{% endif %}"
) + END  # fmt: skip
TEXT = EACH + "{{ m.role }}: {{ m.content }};" + END


@contextlib.contextmanager
def template_of(source: str) -> Iterator[ChatTemplate]:
    template = ChatTemplate(source, "x", {})
    try:
        yield template
    finally:
        template.close()


@pytest.mark.parametrize(
    ("source", "content_format", "given", "made"),
    [
        (TEXT, "auto", PARTS, "a\nb"),
        (TEXT, "auto", ["a", "b"], "a\nb"),
        (TEXT, "auto", IMAGE, IMAGE),
        (TEXT, "auto", None, ""),
        (TEXT, "auto", [], ""),
        (TEXT, "auto", REFUSED, "No."),
        (LOOP, "auto", REFUSED, [{"type": "text", "text": "No."}]),
        (TEXT, "openai", "a", PARTS[:1]),
        (LOOP, "auto", "a", PARTS[:1]),
        (LOOP, "auto", PARTS, PARTS),
        (EITHER, "auto", "a", "a"),
        (EITHER, "auto", PARTS, "a\nb"),
        (EITHER.replace("+", ""), "auto", PARTS, "ab"),
        ("{# for x in content is string #}" + TEXT, "auto", "a", "a"),
        (EACH + "{% set parts = m.content %}{% for c in parts %}{{ c.text }}{% endfor %}" + END,
         "auto", "a", PARTS[:1]),
        ("{% macro say(it) %}{% for c in it %}{{ c['text'] }}{% endfor %}{% endmacro %}"
         + EACH + "{{ say(m.content) }}" + END, "auto", "a", PARTS[:1]),
        (EACH + "{% for line in m.content.split('\\n') %}{{ line }}{% endfor %}" + END, "auto",
         PARTS, "a\nb"),
    ],
)  # fmt: skip
def test_contents_are_as_the_template_takes_them(
    source: str, content_format: str, given: Any, made: Any
) -> None:
    with template_of(source) as template:
        style = MessageStyle.of(template.probe, 0, content_format)
    assert for_template([{"role": "user", "content": given}], style)[0]["content"] == made


def test_each_role_has_its_own_contents() -> None:
    mixed = EACH + (
        "{% if m.role == 'system' %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    ) + END  # fmt: skip
    with template_of(mixed) as template:
        made = for_template([SYSTEM, USER], MessageStyle.of(template.probe))
        assert made == [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "x"}]}]


def test_an_unknown_content_format_is_refused() -> None:
    with template_of(TEXT) as template, pytest.raises(RequestError, match="auto, string, openai"):
        MessageStyle.of(template.probe, 0, "list")


SYSTEM = {"role": "system", "content": "S"}
LATER = {"role": "system", "content": "T"}
DEVELOPER = {"role": "developer", "content": "D"}
ANSWER = {"role": "assistant", "content": "A"}
TOOL = {"role": "tool", "tool_call_id": "abcdefghi", "content": "R"}
ONLY = EACH + "{% if m.role in known %}{{ m.role }}: {{ m.content }};{% endif %}" + END
TWO_ROLES = "{% set known = ['user', 'assistant'] %}" + ONLY
THREE_ROLES = "{# You help developers. #}{% set known = ['user', 'assistant', 'system'] %}" + ONLY
FIRST = (
    "{% if messages[0].role == 'system' %}system: {{ messages[0].content }};{% endif %}" + TWO_ROLES
)
FIRST_OR_REFUSE = EACH + (
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "{{ m.role }}: {{ m.content }};"
) + END  # fmt: skip
INSTRUCTS = (
    "{% if messages[0].role in ['system', 'developer'] %}developer: {{ messages[0].content }};"
    "{% endif %}" + TWO_ROLES
)


@pytest.mark.parametrize(
    ("source", "chat", "text"),
    [
        (TEXT, [SYSTEM, LATER, USER], "system: S;system: T;user: x;"),
        (TEXT, [DEVELOPER, USER], "system: D;user: x;"),
        (TEXT, [USER, ANSWER, SYSTEM, USER], "user: x;assistant: A;system: S;user: x;"),
        (TWO_ROLES, [SYSTEM, USER], "user: S\n\nx;"),
        (TWO_ROLES, [SYSTEM, DEVELOPER, USER], "user: S\n\nD\n\nx;"),
        (TWO_ROLES, [SYSTEM], "user: S;"),
        (TWO_ROLES, [USER, ANSWER, SYSTEM, USER], "user: x;assistant: A;user: S\n\nx;"),
        (THREE_ROLES, [DEVELOPER, USER], "system: D;user: x;"),
        (FIRST, [SYSTEM, LATER, USER], "system: S\n\nT;user: x;"),
        (FIRST, [SYSTEM, DEVELOPER, USER], "system: S\n\nD;user: x;"),
        (FIRST, [SYSTEM, USER, ANSWER, LATER, USER],
         "system: S;user: x;assistant: A;user: T\n\nx;"),
        (FIRST_OR_REFUSE, [SYSTEM, DEVELOPER, USER], "system: S\n\nD;user: x;"),
        (INSTRUCTS, [DEVELOPER, USER], "developer: D;user: x;"),
        (INSTRUCTS, [SYSTEM, DEVELOPER, USER], "developer: S\n\nD;user: x;"),
        (INSTRUCTS, [USER, ANSWER, DEVELOPER, USER], "user: x;assistant: A;user: D\n\nx;"),
    ],
)  # fmt: skip
def test_instructions_come_out(source: str, chat: list[Any], text: str) -> None:
    with template_of(source) as template:
        how = Rendering(style=MessageStyle.of(template.probe))
        assert template.render(chat, NOW, how) == text


def test_instructions_of_parts_are_joined() -> None:
    with template_of(LOOP) as template:
        how = Rendering(style=MessageStyle.of(template.probe))
        chat = [{"role": "system", "content": PARTS}, USER]
        assert template.render(chat, NOW, how) == "ab;x;"
    with template_of(FIRST) as template:
        how = Rendering(style=MessageStyle.of(template.probe))
        chat = [{"role": "system", "content": PARTS}, LATER, USER]
        assert template.render(chat, NOW, how) == "system: a\nb\nT;user: x;"


@pytest.mark.parametrize(
    ("source", "chat", "role"),
    [
        (TWO_ROLES, [USER, ANSWER, TOOL], "tool"),
        ("{{ messages[-1].content if messages[-1].role == 'user' }}", [USER, ANSWER], "assistant"),
        ("fine", [USER], "user"),
    ],
)
def test_a_role_that_is_left_out_is_refused(source: str, chat: list[Any], role: str) -> None:
    with template_of(source) as template:
        how = Rendering(style=MessageStyle.of(template.probe))
        with pytest.raises(RequestError, match=f"leaves out messages of the role '{role}'") as one:
            template.render(chat, NOW, how)
        assert one.value.code == "invalid_messages"


def test_contents_in_a_format_that_does_not_come_out_are_refused() -> None:
    with template_of(LOOP) as template:
        how = Rendering(style=MessageStyle.of(template.probe, 0, "string"))
        with pytest.raises(RequestError, match="leaves out messages of the role 'user'"):
            template.render([USER], NOW, how)


def test_a_template_that_never_ends_on_probes_is_stopped_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    limits = Limits(memory_bytes=512 << 20, cpu_s=1, open_cpu_s=5, slowness=30)
    source = "{% if messages[1:] %}" + loop + "{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(source, "x", {}, limits)
    style = MessageStyle.of(template.probe)
    assert style == MessageStyle(joins_system=True)
    assert template.render([USER], NOW, Rendering(style=style)) == "x"
    template.close()


def test_reasoning_has_the_names_that_templates_read() -> None:
    for name in ("reasoning_content", "reasoning"):
        (made,) = for_template([{"role": "assistant", "content": "x", name: "Hm"}], MessageStyle())
        assert (made["reasoning_content"], made["thinking"]) == ("Hm", "Hm")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "invalid_messages"),
        ([], "invalid_messages"),
        (0, "invalid_messages"),
        ({"a": 1}, "invalid_messages"),
        ([5], "invalid_messages"),
        ([None], "invalid_messages"),
        ([{"type": "text", "text": None}], "invalid_messages"),
        ([{"type": "refusal"}], "invalid_messages"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "unsupported_field"),
    ],
)
def test_content_without_text_is_refused_over_http_as_in_python(content: Any, code: str) -> None:
    role = "user" if not content else "assistant"
    chat = [USER, {"role": role, "content": content}]
    with pytest.raises(RequestError, match=r"messages\[1\]\.content ") as one:
        as_chats(chat)
    with pytest.raises(BodyError) as other:
        read_messages(chat)
    assert one.value.code == code and other.value.param == "messages[1].content"


@pytest.mark.parametrize(
    "field", [{"refusal": 5}, {"mood": "glad"}, {"audio": {"id": "a"}}], ids=lambda field: [*field]
)
def test_fields_that_a_message_does_not_have_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(BodyError) as caught:
        read_messages([USER, {"role": "assistant", "content": "", **field}])
    assert caught.value.param == f"messages[1].{next(iter(field))}"


def test_null_fields_of_tool_messages_are_nothing() -> None:
    for content in ({}, {"content": None}, {"content": []}):
        message = {"role": "tool", "tool_call_id": "c", **content, "mood": None, "refusal": None}
        (made,) = for_template(read_messages([message]), MessageStyle())
        assert made == {"role": "tool", "tool_call_id": "c", "content": ""}


@pytest.mark.parametrize("case", ["upper", "lower"])
def test_template_that_changes_case_keeps_its_messages(case: str) -> None:
    source = EACH + "{{ m.role }}: {{ m.content | " + case + " }};" + END
    with template_of(source) as template:
        assert not MessageStyle.of(template.probe).lost
