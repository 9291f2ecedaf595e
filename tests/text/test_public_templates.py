"""Templates with the traits of public models': messages, formats, whole and streamed answers."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import byte_level

from fastdecode.core.errors import RequestError
from fastdecode.text.calls import Call, Reasoning
from fastdecode.text.chat_format import ChatFormat
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.chats import Rendering
from fastdecode.text.codec import TextCodec
from fastdecode.text.tools import Tools

NOW = datetime(2026, 2, 3)
TOKENIZER = byte_level()
CODEC = TextCodec(TOKENIZER)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "Hello there"}
ANSWER = {"role": "assistant", "content": "Good day"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
]


@dataclass(frozen=True)
class Public:
    """A template, and what is found out about it."""

    source: str
    reasoning: str | None = None  # the format's name
    tools: str | None = None
    """The format's name. None if it takes none."""
    answer: str = "Fine, thanks."
    """As the model writes it, with a call of ``f`` if it can."""
    system: str = "S"
    """What the model sees of the instructions S and then D. Empty if they are refused."""
    parts: tuple[str, ...] = ()  # roles that take parts
    refuses: tuple[str, ...] = ()  # roles that are refused by name


TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
PUBLIC = {
    name: Public((TEMPLATES / f"{name.replace(' ', '_')}.jinja").read_text(), **traits)
    for name, traits in json.loads((TEMPLATES / "traits.json").read_text()).items()
}
each_template = pytest.mark.parametrize("name", PUBLIC)


@pytest.fixture(scope="module")
def models() -> Iterator[Any]:
    @cache
    def model(name: str) -> tuple[ChatTemplate, ChatFormat]:
        template = ChatTemplate(PUBLIC[name].source, name, SPECIAL)
        return template, ChatFormat.of(template, {})

    yield model
    for name in PUBLIC:
        model(name)[0].close()


def rendered(model: tuple[ChatTemplate, ChatFormat], *messages: Any, **how: Any) -> str:
    template, chat_format = model
    return template.render(messages, NOW, Rendering(style=chat_format.style, **how))


def outcome(model: tuple[ChatTemplate, ChatFormat], *messages: Any, **how: Any) -> str:
    """The text, or the error's code."""
    try:
        return rendered(model, *messages, **how)
    except RequestError as error:
        return error.code


@each_template
def test_formats_are_found(name: str, models: Any) -> None:
    public, (_, chat_format) = PUBLIC[name], models(name)
    assert chat_format.takes_tools or public.tools is None
    found = chat_format.reasoning, chat_format.tools
    assert [each and each.name for each in found] == [public.reasoning, public.tools]
    assert chat_format.style.parts == set(public.parts) | ({"developer"} if public.parts else set())


@each_template
def test_texts_come_out_in_turn(name: str, models: Any) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "one"}] * 2}
    text = rendered(models(name), USER, ANSWER, parts)
    assert re.search("Hello there.*Good day.*one.*one", text, re.DOTALL)
    assert "'text'" not in text and "None" not in text
    assert "Good day" not in rendered(models(name), USER)


@each_template
def test_a_plain_chat_equals_transformers(name: str, models: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), chat_template=PUBLIC[name].source, **SPECIAL
    )
    chat: list[Any] = [USER, ANSWER, USER]
    for many in (chat[:1], chat):
        given = many
        if PUBLIC[name].parts:
            given = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in many]
        theirs_says = theirs.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
        if "strftime_now" not in PUBLIC[name].source:
            assert rendered(models(name), *many) == theirs_says


@each_template
def test_instructions_come_out_or_are_refused(name: str, models: Any) -> None:
    public = PUBLIC[name]
    system, developer = ({"role": r, "content": f"{r} rule"} for r in ("system", "developer"))
    first = {
        "S|D": "system rule.+developer rule",
        "S+D": "system rule\n\ndeveloper rule",
        "SD": "system ruledeveloper rule",
        "user": "system rule\n\ndeveloper rule\n\nHello",
    }
    for chat in ([system, developer, USER], [developer, USER], [USER, ANSWER, system, USER]):
        text = outcome(models(name), *chat)
        if text == "chat_template_failed":
            assert not public.system or chat[0] is USER
            continue
        assert all(message["content"] in text for message in chat)
        if chat[0] is system:
            assert re.search(first[public.system], text, re.DOTALL)


@each_template
def test_results_of_tools_come_out_or_are_refused(name: str, models: Any) -> None:
    call = {"id": "a-long-id-1", "function": {"name": "f", "arguments": '{"a": "b"}'}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a-long-id-1", "content": "the result"}
    if "tool" in PUBLIC[name].refuses:
        with pytest.raises(RequestError, match="leaves out messages of the role 'tool'"):
            rendered(models(name), USER, calling, result)
        return
    text = outcome(models(name), USER, calling, result, tools=TOOLS)
    if text == "chat_template_failed":
        assert PUBLIC[name].tools is None
    else:
        assert "the result" in text and "None" not in text


def said(parts: list[Any]) -> tuple[str, str, list[tuple[str, str]]]:
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part for part in parts if isinstance(part, str))
    calls = [(part.name, part.arguments) for part in parts if isinstance(part, Call)]
    return reasoning.strip(), content.strip(), calls


def expected(public: Public) -> tuple[str, str, list[tuple[str, str]]]:
    if public.tools is None:
        content = "Fine <|end|>." if "Fine <|end|>" in public.answer else "Fine, thanks."
        content = public.answer if public.reasoning is None else content
        return "Hm." if public.reasoning else "", content, []
    text = "I look." if "I look." in public.answer else ""
    return "Hm." if public.reasoning else "", text, [("f", '{"a": "b"}')]


@each_template
@pytest.mark.parametrize("continues", [False, True])
def test_answers_are_divided_whole_and_streamed(name: str, continues: bool, models: Any) -> None:
    public, (_, chat_format) = PUBLIC[name], models(name)
    tools = Tools.of(TOOLS, None, None) if public.tools else None
    prompt = TOKENIZER.encode(rendered(models(name), USER)).ids
    answer, reasoning, content, calls = public.answer, *expected(public)
    mark = chat_format.reasoning and chat_format.reasoning.begin
    if continues and (mark is None or mark not in answer):
        return
    if continues:  # the answer's beginning, up to within its reasoning, is the prompt's end
        place = answer.index("Hm.") + 1
        prefill, answer = answer[:place], answer[place:]
        chat_format, reasoning = chat_format.continuing(prefill), reasoning[1:]
        prompt = TOKENIZER.encode(prefill).ids
    answer_format = chat_format.answer(tools)
    if answer_format is None:
        assert (reasoning, content, calls) == ("", answer, [])
        return
    for cut in (len(answer), 1, 7):
        parser = answer_format.parser(CODEC, prompt)
        pieces = [answer[at : at + cut] for at in range(0, len(answer), cut)]
        parts = [*itertools.chain.from_iterable(map(parser.feed, pieces)), *parser.finish()]
        assert said(parts) == (reasoning, content, calls)
    whole = answer_format.parsed(answer, CODEC, prompt, "a")
    assert [json.loads(call.arguments) for call in whole.calls] == [{"a": "b"} for _ in calls]
