"""Chat templates render as transformers renders them, and can do nothing else."""

from __future__ import annotations

import copy
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import byte_level
from tokenizers.processors import TemplateProcessing

from fastdecode.core.errors import CheckpointError, ConfigError, RequestError
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.chats import MessageStyle, Rendering
from fastdecode.text.codec import TextCodec

NOW = datetime(2026, 2, 3, 4, 5)

TEMPLATES = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\\n' }}{% endif %}",
    "llama2": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = "
    "messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set "
    "loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in "
    "loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ "
    "raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if "
    "loop.index0 == 0 and system_message %}{% set content = '<<SYS>>\\n' + system_message + "
    "'\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% "
    "endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + content | trim + ' [/INST]' }}{% "
    "elif message['role'] == 'assistant' %}{{ ' ' + content | trim + ' ' + eos_token }}{% endif "
    "%}{% endfor %}",
    "blocks": """
{%- set ns = namespace(count=0) %}
{%- macro head(role) -%}
<|{{ role }}|>
{%- endmacro %}
    {% for message in messages %}
        {%- if message.role == 'system' %}{% continue %}{% endif %}
{{ head(message.role) }}
        {% generation %}
{{ message.content }}
        {% endgeneration %}
        {%- set ns.count = ns.count + 1 %}
    {% endfor %}
{{ {"n": ns.count, "text": "<é & 'x'>", "pad": pad_token is defined} | tojson(indent=1) }}
{%- if tools is not none or documents %}never{% endif %}
{{ "on" if thinking else "off" }}{{ messages | length }}""",
}

TAKES_PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
PARTS = [{"type": "text", "text": "It is "}, {"type": "text", "text": "so "}]

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello, <|im_end|> <s>world"}],
    [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "Who?  "},
        {"role": "assistant", "content": "  I."},
        {"role": "user", "content": "é — 漢字 & <b>"},
    ],
]


def save_tokenizer(directory: Path, chat_template: str | None) -> Any:
    """A model directory's tokenizer files as transformers writes them, and
    transformers' own tokenizer."""
    import transformers

    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>"],
    )
    theirs.chat_template = chat_template
    theirs.save_pretrained(directory)
    return theirs


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("ends_open", [True, False])
def test_text_and_tokens_equal_transformers(
    tmp_path: Path, name: str, chat: list[dict[str, str]], ends_open: bool
) -> None:
    theirs = save_tokenizer(tmp_path, TEMPLATES[name])
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    text = template.render(chat, NOW, Rendering(ends_open, variables={"thinking": True}))
    expected = {"add_generation_prompt": ends_open, "thinking": True}
    assert text == theirs.apply_chat_template(chat, tokenize=False, **expected)
    tokens = TextCodec.load(tmp_path).encode(text, add_special_tokens=False)
    assert tokens == theirs.apply_chat_template(chat, **expected)["input_ids"]


@pytest.mark.parametrize("name", [*sorted(TEMPLATES), "parts"])
@pytest.mark.parametrize("begun", ["Sure, ", "Sure,", " It is\n", PARTS])
def test_a_continued_message_equals_transformers(tmp_path: Path, name: str, begun: Any) -> None:
    theirs = save_tokenizer(tmp_path, {**TEMPLATES, "parts": TAKES_PARTS}[name])
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    chat = [CHATS[0][0], {"role": "assistant", "content": begun}]
    given = copy.deepcopy(chat)
    how = Rendering(False, continue_final_message=True, style=MessageStyle.of(template.probe))
    text = template.render(chat, NOW, how)
    assert chat == given, "the caller's messages stay as they are"
    if begun is PARTS and name != "parts":
        chat[1]["content"] = "\n".join(part["text"] for part in PARTS)
    assert text == theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "assistant", "content": None}], "a last message with text"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], "a last message with text"),
        ([{"role": "user", "content": "Hello"}], "does not write the last message"),
    ],
)
def test_a_message_without_text_is_not_continued(messages: Any, problem: str) -> None:
    template = ChatTemplate("{% if false %}{{ messages[0].content }}{% endif %}", "x", {})
    with pytest.raises(RequestError, match=f"^continue_final_message.*{problem}"):
        template.render(messages, NOW, Rendering.of(False, True, None, ()))
    with pytest.raises(RequestError, match="exclude each other"):
        Rendering.of(True, True, None, ())


def test_messages_of_an_unknown_role_are_not_left_out() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, "x", {})
    assert template.render([{"role": "user", "content": "human"}], NOW) == "human"
    with pytest.raises(RequestError, match="'human': use one of system, developer, user"):
        template.render([{"role": "human", "content": "Hello"}], NOW)
    generic = ChatTemplate(f"{source}{{# human #}}", "x", {})
    with pytest.raises(RequestError, match="'human': use one of"):
        generic.render([{"role": "human", "content": "Hello"}], NOW)
    generic = ChatTemplate("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", "x", {})
    assert generic.render([{"role": "human", "content": "Hello"}], NOW) == "humanHello"


WITH_TOOLS = """
{%- if tools %}{{- "<|im_start|>system\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}
{{- tool | tojson }}{%- endfor %}{{- "\\n</tools><|im_end|>\\n" }}{%- endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}{{- "<tool_response>" + message.content + "</tool_response>" }}
{%- else %}{{- "<|im_start|>" + message.role + "\\n" + message.content }}
{%- for call in message.tool_calls %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- "}</tool_call>" }}{%- endfor %}{%- endif %}
{%- endfor %}
"""


def test_tools_and_calls_equal_transformers(tmp_path: Path) -> None:
    theirs = save_tokenizer(tmp_path, WITH_TOOLS)
    template = ChatTemplate.load(tmp_path)
    assert template is not None and "tools" in template.source
    call = {"id": "c", "type": "function",
            "function": {"name": "f", "arguments": {"é": "<a & b>"}}}  # fmt: skip
    chat: list[dict[str, Any]] = [
        CHATS[0][0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {
        "type": "object", "properties": {"é": {"type": "string"}}}}}]  # fmt: skip
    text = template.render(chat, NOW, Rendering(tools=tools))
    assert text == theirs.apply_chat_template(chat, tools=tools, tokenize=False)
    assert "<tools>" in text and '<tool_call>{"name": "f", "arguments": {"é"' in text


def test_a_template_is_found_where_transformers_finds_it(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"

    def rendered(override: Path | None = None) -> str:
        template = ChatTemplate.load(tmp_path, override)
        assert template is not None
        return template.render(CHATS[0], NOW)

    config.write_text(
        json.dumps({"bos_token": {"content": "<b>"}, "chat_template": "config {{ bos_token }}"})
    )
    assert rendered() == "config <b>"
    several = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "default"},
    ]
    config.write_text(json.dumps({"chat_template": several}))
    assert rendered() == "default"
    with_tools = ChatTemplate.load(tmp_path)
    assert with_tools is not None and "tools" in with_tools.source
    how = Rendering(tools=[{"type": "function"}])
    assert with_tools.render(CHATS[0], NOW, how) == "tools"
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<e>"}')
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}\n")
    assert rendered() == "file <e>"
    (tmp_path / "own.jinja").write_text("own")
    assert rendered(tmp_path / "own.jinja") == "own"
    config.write_text(json.dumps({"chat_template": several[:1]}))
    (tmp_path / "chat_template.jinja").unlink()
    assert ChatTemplate.load(tmp_path) is None


def test_the_date_is_the_runs() -> None:
    template = ChatTemplate(
        "{% macro d() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ d() }}", "x", {}
    )
    assert template.render(CHATS[0], NOW) == "03 Feb 2026"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ raise_exception('no system prompts') }}", "no system prompts"),
        ("{{ messages[0].nothing.at_all }}", "no attribute"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% for i in range(100000000) %}x{% endfor %}", "range"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_a_request_error(source: str, why: str) -> None:
    with pytest.raises(RequestError, match="chat template") as caught:
        ChatTemplate(source, "x", {}).render(CHATS[0], NOW)
    assert caught.value.code == "chat_template_failed"
    assert why in str(caught.value).lower()


def test_what_is_no_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="here is not a Jinja template"):
        ChatTemplate("{% for %}", "here", {})
    (tmp_path / "bad.jinja").write_text("{{")
    with pytest.raises(ConfigError, match=r"chat_template.*bad\.jinja"):
        ChatTemplate.load(tmp_path, tmp_path / "bad.jinja")
    with pytest.raises(ConfigError, match="missing"):
        ChatTemplate.load(tmp_path, tmp_path / "missing")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        ChatTemplate.load(tmp_path)
