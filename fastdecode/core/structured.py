"""What the text of an answer must look like: JSON, a regular expression, one of
some choices, or a grammar."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from fastdecode.core.errors import Given, RequestError
from fastdecode.core.words import is_unicode

MAX_CHARS = 1 << 20
"""Of a schema, an expression, a grammar, or all choices together."""

CODE = "invalid_structured_outputs"
KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")


_SWITCHES: Final = (
    "json_object", "in_reasoning", "disable_any_whitespace", "disable_additional_properties",
)  # fmt: skip
_NOT_SUPPORTED: Final = {
    "disable_additional_properties": 'give "additionalProperties": false in the schema',
    "structural_tag": "give a grammar, or tools",
}


def refuse(*words: str | Given) -> RequestError:
    """The error that names structured outputs that can't be had."""
    return RequestError(Given("structured_outputs"), *words, code=CODE)


@dataclass(frozen=True)
class StructuredOutputs:
    """What a text must be; exactly one of ``KINDS``. The names are vLLM's.

    Raises:
        RequestError: (code ``invalid_structured_outputs``) none or several are
            given, or one is of the wrong type. Whether a schema or a grammar
            makes sense is checked when a request is submitted.
    """

    json: str | None = None
    """A JSON schema, as text; an object is taken, too."""
    regex: str | None = None
    """The whole text matches it. No look-around, no back-references."""
    choice: tuple[str, ...] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A context-free grammar, as Lark or GBNF writes it; its first rule is
    ``start``, or ``root``."""
    json_object: bool = False
    """Any JSON object."""
    reasoning: str | None = None
    """The model may reason first, in this format (``text.reasoning``); the rest of the
    text is what it must be."""
    in_reasoning: bool = False
    """The prompt ends inside the reasoning."""
    disable_any_whitespace: bool = False
    """JSON has no blanks but those in strings."""
    whitespace_pattern: str | None = None
    """A regular expression of the blanks that may stand between JSON's tokens; None: up to
    20 of any."""
    disable_additional_properties: bool = False
    """Of vLLM; only false is supported."""
    structural_tag: str | None = None
    """Of vLLM; only None is supported."""

    def __post_init__(self) -> None:
        given = [name for name in self.to_json() if name in KINDS]
        if len(given) != 1:
            names = ", ".join(KINDS)
            what = "none" if not given else " and ".join(given)
            raise refuse(f" has {what}: give exactly one of {names}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_text(name, getattr(self, name))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise refuse(f".{name} must be true or false")
        for name, instead in _NOT_SUPPORTED.items():
            if getattr(self, name):
                raise refuse(f".{name} is not supported: {instead}")
        if self.in_reasoning and self.reasoning is None:
            raise refuse(".in_reasoning needs reasoning, the format's name")

    @classmethod
    def of(cls, given: object) -> StructuredOutputs | None:
        """Read the fields of a body or a line. Raises: RequestError."""
        if given is None or isinstance(given, StructuredOutputs):
            return given
        if not isinstance(given, Mapping):
            raise refuse(f" must be an object, not {type(given).__name__}")
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise refuse(f" has an unknown field {name!r:.80}: known are {', '.join(known)}")
        return cls(**given)

    @property
    def kind(self) -> str:
        return next(name for name in self.to_json() if name in KINDS)

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema of the text; None: it is not to be JSON."""
        if self.json_object:
            return {"type": "object"}
        schema: dict[str, Any] | None = None if self.json is None else json_text.loads(self.json)
        return schema

    def to_json(self) -> dict[str, Any]:
        return {
            f.name: value
            for f in fields(self)
            if (value := getattr(self, f.name)) is not None
            and (f.name not in _SWITCHES or value is not False)
        }


def _schema(schema: object) -> str:
    if isinstance(schema, str):
        try:
            schema = json_text.loads(schema)
        except (ValueError, RecursionError) as error:
            raise refuse(f".json is not valid JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise refuse(
            f".json must be a JSON schema, which is an object, not {type(schema).__name__}"
        )
    try:
        text = json_text.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise refuse(f".json is not JSON: {error}") from None
    _check_text("json", text)
    return text


def _check_text(name: str, text: object) -> None:
    if text is None:
        return
    if not isinstance(text, str) or not 0 < len(text) <= MAX_CHARS:
        raise refuse(f".{name} must be a text of 1 to {MAX_CHARS} characters")
    if not is_unicode(text):
        raise refuse(f".{name} has a lone surrogate: leave it out")


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise refuse(".choice must be a list of at least one text")
    for choice in choices:
        _check_text("choice", choice)
    if sum(map(len, choices)) > MAX_CHARS:
        raise refuse(f".choice may have {MAX_CHARS} characters in all")
    return tuple(choices)
