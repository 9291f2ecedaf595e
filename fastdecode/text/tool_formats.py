"""Formats of tool calls, by model family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Tags:
    """Calls whose arguments stand in tags: strings as they are, other values as JSON.

    Args:
        lead: What stands before a call's name.
        head: Regular expression from the begin mark to the first argument. Its group is the name.
        key_lead, key_end: Around an argument's name, which may contain ``key_end``.
        value_lead: Regular expression between ``key_end`` and the value.
        end: What stands after the arguments. May be empty.
        written: What the model writes: a head, what stands before and after a value, and the end.
            ``{}`` stands for names.
        is_padded: Values stand on lines of their own.
    """

    lead: str
    head: str
    key_lead: str
    key_end: str
    value_lead: str
    value_end: str
    end: str
    written: tuple[str, str, str, str]
    is_padded: bool


QWEN3_CODER: Final = Tags(
    "<function=", r"\s*<function=\s*([\w.-]{1,256})\s*>",
    "<parameter=", ">", "", "</parameter>", "</function>",
    ("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n"),
    is_padded=True,
)  # fmt: skip
GLM45: Final = Tags(
    "", r"\s*([\w.-]{1,256})\s*(?=<arg_key>|</tool_call>)",
    "<arg_key>", "</arg_key>", r"\s*<arg_value>", "</arg_value>", "",
    ("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", ""),
    is_padded=False,
)  # fmt: skip


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls: JSON objects after a mark, unless a field says
    otherwise."""

    name: str
    begin: str
    """Before a call, or before all of them."""
    end: str = ""
    """After a call; may be empty."""
    arguments: str = "arguments"
    """The key of the arguments, after ``name``."""
    is_list: bool = False
    """The model writes all calls into one JSON list."""
    name_end: str = ""
    """If set, the name precedes the arguments' object, with this mark between them."""
    takes_name: bool = False
    """A name before the arguments' object is read, with or without ``[ARGS]``."""
    begins_bare: bool = False
    """An answer may begin with a call that has no mark."""
    id_chars: int = 0
    """Letters and digits in a call's id. 0 allows any number."""
    tags: Tags | None = None
    is_python: bool = False
    """Calls are a Python list. JSON objects are read, too."""
    has_channels: bool = False
    """Calls are messages of gpt-oss."""


TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    row.name: row
    for row in (
        ToolFormat("hermes", "<tool_call>", "</tool_call>"),
        ToolFormat("llama3_json", "<|python_tag|>", arguments="parameters", begins_bare=True),
        ToolFormat("mistral", "[TOOL_CALLS]", is_list=True, takes_name=True, id_chars=9),
        ToolFormat("mistral_args", "[TOOL_CALLS]", name_end="[ARGS]", takes_name=True, id_chars=9),
        ToolFormat("qwen3_coder", "<tool_call>", "</tool_call>", tags=QWEN3_CODER),
        ToolFormat("glm45", "<tool_call>", "</tool_call>", tags=GLM45),
        ToolFormat(
            "pythonic", "<|python_start|>", "<|python_end|>", begins_bare=True, is_python=True
        ),
        ToolFormat("harmony", "<|channel|>commentary to=functions.", has_channels=True),
    )
}
"""Qwen, Hermes and the models that follow them; Llama 3; Mistral's tokenizers 3 to 7, and from
11 on; Qwen3-Coder; GLM 4.5; Llama 3.2 and 4; gpt-oss."""

_IN_TEMPLATES: Final = (
    ("harmony", "<|channel|>"), ("qwen3_coder", "<tool_call>", "<function="),
    ("glm45", "<arg_key>"), ("hermes", "<tool_call>"), ("mistral_args", "[ARGS]"),
    ("mistral", "[TOOL_CALLS]"), ("pythonic", "[func_name1("), ("llama3_json", "<|python_tag|>"),
    ("llama3_json", "Environment: ipython"),
)  # fmt: skip
"""The format of a chat template whose source has these marks."""


def tool_format(template: str) -> ToolFormat | None:
    """Return the format that a chat template's source writes, or None if it is unknown."""
    for name, *marks in _IN_TEMPLATES:
        if all(mark in template for mark in marks):
            return TOOL_FORMATS[name]
    return None
