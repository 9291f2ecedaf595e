"""How a model's chats write what is no plain text: tool calls and reasoning.

A ``ChatFormat`` is the model's, an ``AnswerFormat`` one request's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Final, TypeAlias

from fastdecode.core.errors import Given, RequestError
from fastdecode.core.sequence import SamplingParams, ToolCall
from fastdecode.core.structured import StructuredOutputs, refuse
from fastdecode.text.calls import Call, CallReader, HarmonyParser, Part, Reasoning, ToolSchemas
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.chats import MessageStyle
from fastdecode.text.codec import TextCodec
from fastdecode.text.lark import calls_rules, harmony_grammar, json_rule
from fastdecode.text.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningSplitter,
    continued_state,
    prompt_state,
    reasoning_format,
)
from fastdecode.text.tools import CODE, TOOL_FORMATS, ToolFormat, Tools, tool_format

AUTO: Final = "auto"
NONE: Final = "none"
MAX_CALLS: Final = 1024
"""Of one answer."""
TOOL_PARSERS: Final = (AUTO, NONE, *TOOL_FORMATS)
REASONING_PARSERS: Final = (AUTO, NONE, *REASONING_FORMATS)
TOOL_PARSER_HELP: Final = "format of the model's tool calls; auto: the one in its chat template"
REASONING_PARSER_HELP: Final = (
    "marks of the model's reasoning, which answers have apart as reasoning_content; auto: those "
    "in its chat template"
)


@dataclass(frozen=True)
class ChatFormat:
    """A model's formats."""

    tools: ToolFormat | None = None
    """None: it writes no calls that are known."""
    reasoning: ReasoningFormat | None = None
    takes_tools: bool = False
    """Its chat template has a place for tools."""
    special: Mapping[str, int] = field(default_factory=dict)
    """Its special tokens, by name."""
    style: MessageStyle = field(default_factory=MessageStyle)

    @classmethod
    def of(
        cls,
        template: ChatTemplate | None,
        special: Mapping[str, int],
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        content_format: str = AUTO,
    ) -> ChatFormat:
        """Return the formats of a chat template. The parsers are names in ``TOOL_PARSERS`` and
        ``REASONING_PARSERS``; ``content_format`` is as of ``MessageStyle.of``."""
        if template is None:
            return cls()
        source = template.source
        tools = tool_format(source) if tool_parser == AUTO else TOOL_FORMATS.get(tool_parser)
        reasoning = REASONING_FORMATS.get(reasoning_parser)
        reasoning = reasoning_format(source) if reasoning_parser == AUTO else reasoning
        id_chars = 0 if tools is None else tools.id_chars
        style = MessageStyle.of(template, id_chars, content_format)
        return cls(tools, reasoning, template.takes_tools, special, style)

    def continuing(self, text: str) -> ChatFormat:
        """Return the formats of an answer whose beginning is ``text``, part of the prompt."""
        if self.reasoning is None or not text:
            return self
        state = continued_state(self.reasoning, text)
        return replace(self, reasoning=replace(self.reasoning, state=state))

    def answer(self, tools: Tools | None) -> AnswerFormat | None:
        """Return the format of one answer; None: it is plain text. Raises RequestError: (code
        ``no_tool_format``) If the model writes no calls."""
        if tools is None:
            return None if self.reasoning is None else AnswerFormat(self.reasoning)
        if not self.takes_tools:
            raise RequestError(
                Given("tools"),
                " need a chat template that has a place for them, and this model's has none: "
                "give one by chat_template",
                code="no_tool_format",
            )
        if self.tools is None:
            raise RequestError(
                Given("tools"),
                " need a format that calls are written in, and the chat template writes none that "
                f"is known: choose tool_parser, one of {', '.join(TOOL_FORMATS)}",
                code="no_tool_format",
            )
        schemas = {tool["name"]: tool.get("parameters") or {} for tool in tools.functions}
        return AnswerFormat(self.reasoning, self.tools, schemas, tools.most_one)

    def params(self, params: SamplingParams, tools: Tools | None) -> SamplingParams:
        """Return the parameters of a request with these tools: its text has the marks, and is what
        the tools and its structured outputs ask for. Raises RequestError: If these conflict."""
        structured = params.structured_outputs
        if tools is not None and (structured is not None or tools.must_call):
            structured = self._structured(tools, structured)
        elif structured is not None:
            structured = self._after_reasoning(structured)
        family = self.reasoning
        has_marks = tools is not None or (family is not None and family.has_special_marks)
        return replace(
            params,
            structured_outputs=structured,
            reasoning_marks=None if family is None else family.stop_marks,
            skip_special_tokens=params.skip_special_tokens and not has_marks,
        )

    def _structured(self, tools: Tools, structured: StructuredOutputs | None) -> StructuredOutputs:
        """Return what the text must be: calls, or either calls or what is asked for."""
        assert self.tools is not None, "answer refuses tools without a format"
        if tools.must_call and structured is not None:
            raise RequestError(
                Given("tool_choice"),
                " asks for a call, and structured outputs for something else: give one of them",
                code=CODE,
            )
        answer = None if structured is None else _answer_rule(structured)
        if self.tools.has_channels:
            return StructuredOutputs(grammar=harmony_grammar(tools.functions, self.special, answer))
        rules = calls_rules(self.tools, tools.functions, self.special, most_one=tools.most_one)
        start = "start: calls" if answer is None else f"start: calls | answer\nanswer: {answer}"
        return self._after_reasoning(StructuredOutputs(grammar=f"{start}\n{rules}"))

    def _after_reasoning(self, structured: StructuredOutputs) -> StructuredOutputs:
        if self.reasoning is None or self.reasoning.state == "after":
            return structured
        is_inside = self.reasoning.state == "inside"
        return replace(structured, reasoning=self.reasoning.name, in_reasoning=is_inside)


def _answer_rule(structured: StructuredOutputs) -> str:
    schema = structured.schema
    if schema is None:
        raise RequestError(
            Given("tools"),
            " and structured outputs other than JSON can't be given together: leave one out",
            code=CODE,
        )
    try:
        return json_rule(schema)
    except ValueError as error:
        raise refuse(f".json can't be followed: {error}") from None


@dataclass(frozen=True)
class AnswerFormat:
    """What one request's answer may have besides plain text."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None
    schemas: ToolSchemas = field(default_factory=dict)
    """Of the tools that may be called."""
    most_one: bool = False
    """Calls after the first are left out."""

    def parser(self, codec: TextCodec, prompt_token_ids: Sequence[int]) -> PartsParser:
        """Return what divides one answer to this prompt."""
        most_calls = 1 if self.most_one else MAX_CALLS
        family, tools, splitter = self.reasoning, self.tools, None
        state = "after"
        if family is not None:
            state = prompt_state(family, codec.prompt_end(prompt_token_ids))
        is_apart = family is not None and family.has_channels
        has_calls = tools is not None and tools.has_channels
        if is_apart or has_calls:
            return HarmonyParser(
                splits_reasoning=is_apart,
                most_calls=most_calls if has_calls else 0,
                is_inside=state == "inside",
            )
        if family is not None and state != "after":
            splitter = ReasoningSplitter(family, state == "inside", tools.begin if tools else "")
        calls = None if tools is None else CallReader.of(tools, self.schemas)
        return AnswerParser(splitter, calls, most_calls)

    def call_id(self, answer: str, index: int) -> str:
        """Return the id of one call of an answer with this name: the same every time."""
        digest = sha256(f"{answer}/{index}".encode()).hexdigest()
        num_chars = 0 if self.tools is None else self.tools.id_chars
        return digest[:num_chars] if num_chars else f"call_{digest[:24]}"


class AnswerParser:
    """Divides one answer's text into reasoning, text and calls. Those after the first
    ``most_calls`` are left out."""

    def __init__(
        self, reasoning: ReasoningSplitter | None, calls: CallReader | None, most_calls: int
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._most_calls = most_calls

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    @property
    def num_reasoning_chars(self) -> int:
        """Characters at the beginning of the text so far that are reasoning and its marks."""
        return 0 if self._reasoning is None else self._reasoning.num_chars

    def feed(self, text: str) -> list[Part]:
        """Return what more text adds."""
        if self._reasoning is None:
            return self._divided(text)
        reasoning, answer = self._reasoning.feed(text)
        thought: list[Part] = [Reasoning(reasoning)] if reasoning else []
        return thought + self._divided(answer)

    def finish(self) -> list[Part]:
        """Return what was held back: no text follows."""
        parts: list[Part] = []
        open_call = ""
        if self._reasoning is not None:
            reasoning, answer = self._reasoning.finish()
            open_call = self._reasoning.open_call
            parts += [Reasoning(reasoning)] if reasoning else []
            parts += self._divided(answer)
        rest = self._divided(open_call)
        rest += [] if self._calls is None else self._kept(self._calls.finish())
        if open_call:  # reasoning without an end: it has a call in it, or speaks of one
            rest = [Reasoning(each) if isinstance(each, str) else each for each in rest]
            rest = rest if self.has_calls else [Reasoning(open_call)]
        return parts + rest

    def _divided(self, answer: str) -> list[Part]:
        if not answer:
            return []
        return [answer] if self._calls is None else self._kept(self._calls.feed(answer))

    def _kept(self, parts: list[Part]) -> list[Part]:
        most = self._most_calls
        return [part for part in parts if not isinstance(part, Call) or part.index < most]


PartsParser: TypeAlias = "AnswerParser | HarmonyParser"


@dataclass
class ParsedAnswer:
    """A whole answer."""

    content: str | None = ""
    """The text; None: there are calls alone."""
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(
        cls, text: str, parser: PartsParser, answer_format: AnswerFormat, name: str
    ) -> ParsedAnswer:
        """Return the parts of a text. ``name``: the answer's, for the ids of its calls."""
        parsed, content = cls(), ""
        for part in [*parser.feed(text), *parser.finish()]:
            if isinstance(part, Reasoning):
                parsed.reasoning = (parsed.reasoning or "") + part.text
            elif isinstance(part, str):
                content += part
            else:
                call_id = answer_format.call_id(name, part.index)
                parsed.calls.append(ToolCall(call_id, part.name, part.arguments))
        parsed.content = None if parsed.calls and not content.strip() else content
        return parsed


def message_of(parsed: ParsedAnswer) -> dict[str, Any]:
    """Return OpenAI's message of an assistant."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [call.to_json() for call in parsed.calls]
    return message
