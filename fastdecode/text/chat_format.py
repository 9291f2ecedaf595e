"""How a model's chats write tool calls and reasoning.

A ``ChatFormat`` is the model's, an ``AnswerFormat`` one request's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Final, TypeAlias

from fastdecode.core.config.options import option
from fastdecode.core.errors import Given, RequestError
from fastdecode.core.sequence import SamplingParams, ToolCall
from fastdecode.core.structured import StructuredOutputs, refuse
from fastdecode.text.calls import Call, CallReader, HarmonyParser, Part, Reasoning, ToolSchemas
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.chats import CONTENT_FORMATS, MessageStyle
from fastdecode.text.codec import TextCodec
from fastdecode.text.lark import calls_rules, harmony_grammar, json_rule
from fastdecode.text.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningSplitter
from fastdecode.text.tools import CODE, TOOL_FORMATS, ToolFormat, Tools, tool_format

AUTO: Final = "auto"
NONE: Final = "none"
MAX_CALLS: Final = 1024  # of one answer
TOOL_PARSERS: Final = (AUTO, NONE, *TOOL_FORMATS)
REASONING_PARSERS: Final = (AUTO, NONE, *REASONING_FORMATS)


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What a user may choose about how chats are written, and answers read."""

    chat_template: str | None = option(None, "use this template instead", metavar="FILE")
    chat_template_content_format: str = option(
        AUTO, "content: a string, or parts; auto: what the template reads", choices=CONTENT_FORMATS
    )
    tool_parser: str = option(AUTO, "format of calls; auto: the template's", choices=TOOL_PARSERS)
    reasoning_parser: str = option(
        AUTO, "marks of reasoning_content; auto: the template's", choices=REASONING_PARSERS
    )


CHAT: Final = ChatOptions()


@dataclass(frozen=True)
class ChatFormat:
    tools: ToolFormat | None = None  # None if it writes no known calls
    reasoning: ReasoningFormat | None = None
    takes_tools: bool = False  # the chat template has a place for tools
    special: Mapping[str, int] = field(default_factory=dict)  # ids of special tokens, by name
    style: MessageStyle = field(default_factory=MessageStyle)

    @classmethod
    def of(
        cls, template: ChatTemplate | None, special: Mapping[str, int], options: ChatOptions = CHAT
    ) -> ChatFormat:
        """Return the formats of a model's chats. ``special``: ids of special tokens, by name."""
        if template is None:
            return cls()
        tools = TOOL_FORMATS.get(options.tool_parser)
        reasoning = REASONING_FORMATS.get(options.reasoning_parser)
        if options.tool_parser == AUTO:
            tools = tool_format(template.source)
        if options.reasoning_parser == AUTO:
            reasoning = ReasoningFormat.of(template.source)
        id_chars = 0 if tools is None else tools.id_chars
        style = MessageStyle.of(template.probe, id_chars, options.chat_template_content_format)
        return cls(tools, reasoning, "tools" in template.source, special, style)

    def continuing(self, text: str) -> ChatFormat:
        """Return the formats of an answer whose beginning is ``text``, part of the prompt."""
        if self.reasoning is None or not text:
            return self
        return replace(self, reasoning=self.reasoning.continuing(text))

    def answer(self, tools: Tools | None) -> AnswerFormat | None:
        """Return the format of one answer, or None for plain text. Raises RequestError: (code
        ``no_tool_format``) If the model writes no calls."""
        if tools is None:
            return None if self.reasoning is None else AnswerFormat(self.reasoning)
        if not self.takes_tools or self.tools is None:
            why = (
                " need a format that calls are written in, and the chat template writes none that "
                f"is known: choose tool_parser, one of {', '.join(TOOL_FORMATS)}"
                if self.takes_tools
                else " need a chat template that has a place for them, and this model's has none: "
                "give one by chat_template"
            )
            raise RequestError(Given("tools"), why, code="no_tool_format")
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
        assert self.tools is not None, "answer refuses tools without a format"
        answer = None
        if structured is not None:
            if tools.must_call:
                why = " asks for a call, structured outputs for something else: give one of them"
                raise RequestError(Given("tool_choice"), why, code=CODE)
            if structured.schema is None:
                why = " and structured outputs other than JSON exclude each other: leave one out"
                raise RequestError(Given("tools"), why, code=CODE)
            try:
                answer = json_rule(structured.schema)
            except ValueError as error:
                raise refuse(f".json can't be followed: {error}") from None
        if self.tools.has_channels:
            return StructuredOutputs(grammar=harmony_grammar(tools.functions, self.special, answer))
        rules = calls_rules(self.tools, tools.functions, self.special, most_one=tools.most_one)
        start = "start: calls" if answer is None else f"start: calls | answer\nanswer: {answer}"
        return self._after_reasoning(StructuredOutputs(grammar=f"{start}\n{rules}"))

    def _after_reasoning(self, structured: StructuredOutputs) -> StructuredOutputs:
        family = self.reasoning
        if family is None or family.state == "after":
            return structured
        return replace(structured, reasoning=family.name, in_reasoning=family.state == "inside")


@dataclass(frozen=True)
class AnswerFormat:
    """What one request's answer may have besides plain text."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None
    schemas: ToolSchemas = field(default_factory=dict)  # of the tools that may be called
    most_one: bool = False

    def parser(self, codec: TextCodec, prompt_token_ids: Sequence[int]) -> PartsParser:
        """Return what divides one answer to this prompt."""
        most_calls = 1 if self.most_one else MAX_CALLS
        family, tools, splitter = self.reasoning, self.tools, None
        prompt_end = "" if family is None else codec.prompt_end(prompt_token_ids)
        state = "after" if family is None else family.prompt_state(prompt_end)
        is_apart = family is not None and family.has_channels
        has_calls = tools is not None and tools.has_channels
        if is_apart or has_calls:
            most_calls = most_calls if has_calls else 0
            return HarmonyParser(most_calls, is_apart, is_inside=state == "inside")
        if family is not None and state != "after":
            splitter = ReasoningSplitter(family, state, tools.begin if tools else "")
        calls = None if tools is None else CallReader.of(tools, self.schemas, most_calls)
        return AnswerParser(splitter, calls)

    def parsed(
        self, text: str, codec: TextCodec, prompt_token_ids: Sequence[int], name: str
    ) -> ParsedAnswer:
        """Return the parts of an answer. ``name`` is for the ids of its calls."""
        parser, parsed, content = self.parser(codec, prompt_token_ids), ParsedAnswer(), ""
        for part in [*parser.feed(text), *parser.finish()]:
            if isinstance(part, Reasoning):
                parsed.reasoning = (parsed.reasoning or "") + part.text
            elif isinstance(part, str):
                content += part
            else:
                parsed.calls.append(self.call(part, name))
        parsed.content = None if parsed.calls and not content.strip() else content
        return parsed

    def call(self, call: Call, answer: str) -> ToolCall:
        return ToolCall(self.call_id(answer, call.index), call.name, call.arguments)

    def call_id(self, answer: str, index: int) -> str:
        """Return the id of one call of an answer with this name: the same every time."""
        digest = sha256(f"{answer}/{index}".encode()).hexdigest()
        num_chars = 0 if self.tools is None else self.tools.id_chars
        return digest[:num_chars] if num_chars else f"call_{digest[:24]}"


@dataclass
class AnswerParser:
    """Divides one answer's text into reasoning, text and calls."""

    reasoning: ReasoningSplitter | None
    calls: CallReader | None

    @property
    def has_calls(self) -> bool:
        return self.calls is not None and self.calls.has_calls

    @property
    def num_reasoning_chars(self) -> int:
        """Characters at the beginning of the text so far that are reasoning and its marks."""
        return 0 if self.reasoning is None else self.reasoning.num_chars

    def feed(self, text: str) -> list[Part]:
        return self._divided(*(("", text) if self.reasoning is None else self.reasoning.feed(text)))

    def finish(self) -> list[Part]:
        """Return what was held back: no text follows."""
        parts: list[Part] = []
        open_call = ""
        if self.reasoning is not None:
            parts = self._divided(*self.reasoning.finish())
            open_call = self.reasoning.open_call
        rest = self._divided("", open_call)
        rest += [] if self.calls is None else self.calls.finish()
        if open_call:  # reasoning without an end: it has a call in it, or speaks of one
            rest = [Reasoning(each) if isinstance(each, str) else each for each in rest]
            rest = rest if self.has_calls else [Reasoning(open_call)]
        return parts + rest

    def _divided(self, reasoning: str, answer: str) -> list[Part]:
        parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
        if answer:
            parts += [answer] if self.calls is None else self.calls.feed(answer)
        return parts


PartsParser: TypeAlias = "AnswerParser | HarmonyParser"


@dataclass
class ParsedAnswer:
    content: str | None = ""  # the text, or None if there are calls alone
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.to_json() for call in self.calls]
        return message
