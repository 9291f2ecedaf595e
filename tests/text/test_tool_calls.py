"""Tool calls and reasoning: found in answers however they are cut into pieces, and
written by grammars."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from small_tokenizers import byte_level

from fastdecode.core.errors import RequestError
from fastdecode.core.sequence import SamplingParams
from fastdecode.core.structured import StructuredOutputs
from fastdecode.text.calls import Call, CallReader, HarmonyParser, Reasoning
from fastdecode.text.chat_format import AnswerFormat, AnswerParser, ChatFormat, PartsParser
from fastdecode.text.codec import TextCodec
from fastdecode.text.detokenizer import Vocabulary
from fastdecode.text.grammars import GrammarMasks, check_structured
from fastdecode.text.lark import calls_rules, followable, types_of
from fastdecode.text.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningSplitter
from fastdecode.text.tools import TOOL_FORMATS, Tools, tool_format

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2]}},
    "required": ["city"],
    "x-guidance": {"whitespace_pattern": ""},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop", "description": "Ends it."}},
]
NAMES = frozenset({"weather", "stop"})
SCHEMAS: dict[str, Any] = {
    "weather": PARAMETERS, "stop": {}, "odd": {"properties": {"a b": {}, "a b>c": {}}},
}  # fmt: skip
CALL = ("weather", '{"city": "Wie}n\\""}')


def divided(
    family: str, pieces: Sequence[str], reasoning: str | None = None, *, is_inside: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """Text, reasoning and calls of an answer that comes in these pieces."""
    parser: PartsParser
    if TOOL_FORMATS[family].has_channels:
        parser = HarmonyParser(9, splits_reasoning=True)
    else:
        splitter = None if reasoning is None else ReasoningSplitter(
            REASONING_FORMATS[reasoning], "inside" if is_inside else "before"
        )  # fmt: skip
        parser = AnswerParser(splitter, CallReader.of(TOOL_FORMATS[family], SCHEMAS, 9))
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    text = "".join(part for part in parts if isinstance(part, str))
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls = [part for part in parts if isinstance(part, Call)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    return text, thought, [(call.name, call.arguments) for call in calls]


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Wie}n\\""}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Wie}n\\""}}'
CODER = (
    '<tool_call>\n<function=weather>\n<parameter=city>\nWie}n"\n</parameter>\n'
    "</function>\n</tool_call>"
)
GLM = '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Wie}n"</arg_value>\n</tool_call>'
DAYS = "<tool_call>\n<function=weather>\n<parameter=days>\n"
ONE_DAY = ("weather", '{"days": 1}')
CALL_HEAD = "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>"
ANSWERS: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    ("hermes", "No call, but 1 < 2 and <tool_box>.", "No call, but 1 < 2 and <tool_box>.", []),
    ("hermes", f"I look.\n{HERMES}\n{HERMES}\n", "I look.\n", [CALL, CALL]),
    ("hermes", f"{HERMES}\nDone.", "Done.", [CALL]),
    ("hermes", '<tool_call>\n{"arguments": {"a": [1]}, "name": "f"}\n</tool_call>', "",
     [("f", '{"a": [1]}')]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1</tool_call>', "",
     [("f", '{"a": [1]}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', "",
     [("f", '{"a": "</tool_call>"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>!', "!", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
     [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\nc\\ud83d"}}</tool_call>', "",
     [("f", '{"a": "b\\nc\\ud83d"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1234567890123456789}}</tool_call>',
     "", [("f", '{"a": 1234567890123456789}')]),
    ("hermes", "<tool_call>\n{'name': 'f', 'arguments': {}}\n</tool_call>", None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "x": [{}, "}"]}\n</tool_call>!', "!",
     [("f", "{}")]),
    ("hermes", "<tool_call> is a mark", "<tool_call> is a mark", []),
    ("hermes", "<tool_call>\n{not JSON}\n</tool_call>",
     "<tool_call>\n{not JSON}\n</tool_call>", []),
    ("hermes", "<tool_call>\n", "", []),
    ("hermes", '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool', "", [("stop", "{}")]),
    ("hermes", '<tool_call>{"name": "stop", "arguments": null}</tool_call>', "", [("stop", "{}")]),
    ("hermes", '<tool_call>{"arguments": null, "name": "stop"}</tool_call>', "", [("stop", "{}")]),
    ("hermes", "a <tool_", "a <tool_", []),
    ("llama3_json", LLAMA, "", [CALL]),
    ("llama3_json", f" {LLAMA}; {LLAMA}", "", [CALL, CALL]),
    ("llama3_json", f"<|python_tag|>{LLAMA}", "", [CALL]),
    ("llama3_json", '{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}',
     []),
    ("llama3_json", f"[{LLAMA}, {LLAMA}]", "", [CALL, CALL]),
    ("llama3_json", '[{"name": "nobody", "parameters": {}}]', None, []),
    ("llama3_json", "[[1], 2]", None, []),
    ("llama3_json", '{"name": "stop", "parameters": {}', "", [("stop", "{}")]),
    ("llama3_json", '{"name": "stop", "parameters": {"a": "b', None, []),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama3_json", "{}", "{}", []),
    ("llama3_json", 'Here: {"name": "weather"}', 'Here: {"name": "weather"}', []),
    ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Wie}n\\""}}, '
     '{"name": "stop", "arguments": {}}]', "", [CALL, ("stop", "{}")]),
    ("mistral", '[TOOL_CALLS] [{"name": "stop", "arguments": {}, "id": "abc"}]', "",
     [("stop", "{}")]),
    ("mistral", '[TOOL_CALLS]stop{}', "", [("stop", "{}")]),
    ("mistral_args", '[TOOL_CALLS]weather{"city": "Wie}n\\""}', "", [CALL]),
    ("mistral_args", '[TOOL_CALLS] [{"name": "stop", "arguments": {}}]', "", [("stop", "{}")]),
    ("mistral_args", '[TOOL_CALLS]stop[ARGS]{"a": 1', None, []),
    ("mistral_args", "[TOOL_CALLS]stop", None, []),
    ("mistral", "[1, 2] is a list", "[1, 2] is a list", []),
    ("mistral_args", 'Yes.[TOOL_CALLS]weather[ARGS]{"city": "Wie}n\\""}'
     '[TOOL_CALLS]stop[CALL_ID]a1b2[ARGS]{}', "Yes.", [CALL, ("stop", "{}")]),
    ("mistral_args", "[TOOL_CALLS] no name [ARGS]", "[TOOL_CALLS] no name [ARGS]", []),
    ("qwen3_coder", f"I look.\n{CODER}\n{CODER}\n", "I look.\n", [CALL, CALL]),
    ("qwen3_coder", "<tool_call>\n<function=stop>\n</function>\n</tool_call>Done.", "Done.",
     [("stop", "{}")]),
    ("qwen3_coder", "<tool_call><function=weather><parameter=days>2</parameter>"
     "<parameter=city>\n1 < 2\n\n</parameter><parameter=no>[1]</parameter></function></tool_call>",
     "", [("weather", '{"days": 2, "city": "1 < 2\\n", "no": [1]}')]),
    ("qwen3_coder", f"{DAYS}1", None, []),
    ("qwen3_coder", f"{DAYS}1\n</function>\n</tool_call>", "", [ONE_DAY]),
    ("qwen3_coder", f"{DAYS}1\n</tool_call>!", "!", [ONE_DAY]),
    ("qwen3_coder", f"{DAYS}1\n</parameter>\n", "", [ONE_DAY]),
    ("qwen3_coder", f"{DAYS}1\n</parameter>\n</function>\nDone.", "Done.", [ONE_DAY]),
    ("qwen3_coder", f"{DAYS}1\n<parameter=city>\na\n</parameter>\n</function>\n</tool_call>", "",
     [("weather", '{"days": 1, "city": "a"}')]),
    ("qwen3_coder", f"{DAYS}1\n</function>\n</tool_call>\n{CODER}", "", [ONE_DAY, CALL]),
    ("qwen3_coder", f"I look. {CODER.removeprefix('<tool_call>')}", "I look. \n", [CALL]),
    ("qwen3_coder", f"{DAYS}1\n</parameter>\n</function>\n{CODER}", "", [ONE_DAY, CALL]),
    ("qwen3_coder", "Write <function=weather> to look.", None, []),
    ("qwen3_coder", "<function=other>\n</function>", None, []),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\na</tool_call>b</parameter>c"
     "</function>\n</parameter>\n</function>\n</tool_call>", "",
     [("weather", '{"city": "a</tool_call>b</parameter>c</function>"}')]),
    ("qwen3_coder", "<tool_call><function=odd><parameter=a b>c>1</parameter><parameter=a b>2"
     "</parameter></function></tool_call>", "", [("odd", '{"a b>c": 1, "a b": 2}')]),
    ("qwen3_coder", "<tool_call>\n<function=stop>\n<b>?</b></function>\n</tool_call>", "",
     [("stop", "{}")]),
    ("qwen3_coder", "<tool_call><function=stop></function><function=stop></function></tool_call>",
     "", [("stop", "{}"), ("stop", "{}")]),
    ("qwen3_coder", "<tool_call> is a mark, <tool_", "<tool_call> is a mark, <tool_", []),
    ("qwen3_coder", "<tool_call>\n<function=a b>", "<tool_call>\n<function=a b>", []),
    ("qwen3_coder", "<tool_call>\n<func", "<tool_call>\n<func", []),
    ("glm45", f"I look.\n{GLM}\n{GLM}", "I look.\n", [CALL, CALL]),
    ("glm45", "<tool_call>stop\n</tool_call>", "", [("stop", "{}")]),
    ("glm45", "<tool_call>weather<arg_key>days</arg_key><arg_value>None</arg_value></tool_call>!",
     "!", [("weather", '{"days": null}')]),
    ("glm45", GLM.removesuffix("</tool_call>"), "", [CALL]),
    ("glm45", GLM.replace("</arg_value>\n", ""), "", [CALL]),
    ("glm45", f"{GLM.removesuffix('</tool_call>')}{GLM}", "", [CALL, CALL]),
    ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Wi", None, []),
    ("glm45", "<tool_call>a < b", None, []),
    ("glm45", "<tool_call>stop", None, []),
    ("glm45", "<tool_call> is a mark", "<tool_call> is a mark", []),
    ("pythonic", '[weather(city="Wie}n\\""), stop()]', "", [CALL, ("stop", "{}")]),
    ("pythonic", "Hm. <|python_start|>[weather(city='a\\'(', days=[1, -2.5, {'x': None}])]"
     "<|python_end|>!", "Hm. !",
     [("weather", '{"city": "a\'(", "days": [1, -2.5, {"x": null}]}')]),
    ("pythonic", ' [ weather (city = "\\ud83d\\ude00\\/", days=true) ; stop()', "",
     [("weather", '{"city": "😀/", "days": true}'), ("stop", "{}")]),
    ("pythonic", f"<|python_start|>{LLAMA}<|python_end|>", "", [CALL]),
    ("pythonic", f"<|python_start|>[{LLAMA}, {LLAMA}]<|python_end|>!", "!", [CALL, CALL]),
    ("pythonic", "<|python_start|>stop()<|python_end|>", "", [("stop", "{}")]),
    ("pythonic", "[stop()] weather is next", "weather is next", [("stop", "{}")]),
    ("pythonic", "[weather(days=1e999)]", None, []),
    ("pythonic", "[weather(days=...)]", None, []),
    ("pythonic", "[weather(days=[b'a'])]", None, []),
    ("pythonic", "[weather(**{'days': 1})]", None, []),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("pythonic", "[nobody(1)]", "[nobody(1)]", []),
    ("pythonic", "[weather(city)] is no call", "[weather(city)] is no call", []),
    ("pythonic", "[weather(city=open('x'))]", "[weather(city=open('x'))]", []),
    ("pythonic", "[stop(), weather(1)]", "weather(1)]", [("stop", "{}")]),
    ("pythonic", "<|python_start|>is a mark", "<|python_start|>is a mark", []),
    ("pythonic", '[weather(city="Ro', '[weather(city="Ro', []),
    ("harmony", "<|channel|>final<|message|>It is 1 < 2.", "It is 1 < 2.", []),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>"
     'commentary to=functions.weather <|constrain|>json<|message|>{"city": "Wie}n\\""}<|call|>',
     "I look.", [CALL]),
    ("harmony", " to=functions.stop<|channel|>commentary json<|message|>{}<|call|><|start|>"
     "assistant<|channel|>final<|message|>Done.<|return|>", "Done.", [("stop", "{}")]),
    ("harmony", f"{CALL_HEAD}{{'a': 1}}<|call|>", "{'a': 1}", []),
    ("harmony", f'{CALL_HEAD}{{"a": 1', '{"a": 1', []),
    ("harmony", f'{CALL_HEAD}{{"a": 1}}', "", [("stop", '{"a": 1}')]),
    ("harmony", "No channel at <|all", "No channel at <|all", []),
    ("harmony", "<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final"
     "<|message|>b", "a\nb", []),
    ("harmony", "<|chann", "<|chann", []),
]  # fmt: skip


@pytest.mark.parametrize(("family", "answer", "text", "calls"), ANSWERS)
def test_calls_are_found_however_the_text_is_cut(
    family: str, answer: str, text: str | None, calls: list[tuple[str, str]]
) -> None:
    """Without a ``text``, all of the answer is text."""
    rng = random.Random(5)
    text = answer if text is None else text
    cuts = [[answer], list(answer)]
    for _ in range(6):
        places = sorted(rng.sample(range(len(answer) + 1), 2))
        cuts.append([answer[: places[0]], answer[places[0] : places[1]], answer[places[1] :]])
    for pieces in cuts:
        said, _, found = divided(family, pieces)
        assert (said, found) == (text, calls), pieces


def test_a_schema_whose_references_branch_is_read_once() -> None:
    nodes: dict[str, Any] = {
        f"n{place}": {"anyOf": [{"$ref": f"#/$defs/n{place + 1}"}] * 50,
                      "allOf": [{"$ref": f"#/$defs/n{place + 1}"}] * 50}
        for place in range(60)
    }  # fmt: skip
    assert types_of({"$ref": "#/$defs/n0"}, {"$defs": nodes}) == set()
    assert followable({"oneOf": [{"const": place} for place in range(20_000)]})["anyOf"]


@pytest.mark.parametrize(
    ("family", "begin", "piece"),
    [
        ("hermes", '<tool_call>{"name": ', "["),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "b\\\\"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n", "b <c> "),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key><arg_value>", "b <c> "),
        ("pythonic", "[stop(a='", "b"),
    ],
)
def test_a_long_argument_is_read_once(family: str, begin: str, piece: str) -> None:
    """Twice the text takes twice the steps of Python, but for one in ten."""

    def num_steps(num_pieces: int) -> int:
        reader = CallReader.of(TOOL_FORMATS[family], SCHEMAS, 9)
        steps = 0

        def count(frame: Any, event: str, argument: object) -> Any:
            nonlocal steps
            steps += event == "line"
            return count

        sys.settrace(count)
        try:
            parts = [*reader.feed(begin)]
            for _ in range(num_pieces):
                parts += reader.feed(piece)
        finally:
            sys.settrace(None)
        assert not parts
        return steps

    num_steps(1)  # compiles patterns
    assert num_steps(400) < 2.2 * num_steps(200)


def test_an_unclosed_first_key_is_text_once_it_is_too_long_for_a_call() -> None:
    parser = CallReader.of(TOOL_FORMATS["llama3_json"], SCHEMAS, 9)
    answer = '{"' + "x" * 1200
    said = [piece for char in answer for piece in parser.feed(char)]
    assert "".join(map(str, said)) == answer


@pytest.mark.parametrize("num_chars", [1, 7, 5000])
def test_a_long_call_without_a_mark_is_found(num_chars: int) -> None:
    arguments = json.dumps({"city": "y" * 1500})
    answer = f'{{"parameters": {arguments}, "name": "weather"}}'
    pieces = [answer[at : at + num_chars] for at in range(0, len(answer), num_chars)]
    assert divided("llama3_json", pieces) == ("", "", [("weather", arguments)])


@pytest.mark.parametrize(
    ("answer", "is_inside", "reasoning", "text"),
    [
        ("<think>\nWell.</think>\n\nYes.", False, "\nWell.", "Yes."),
        ("Well.</thin</think>Yes.", True, "Well.</thin", "Yes."),
        ("Yes.", False, "", "Yes."),
        ("1 </think> 2", False, "", "1 </think> 2"),
        ("<think>cut of", False, "cut of", ""),
        ("<thin", False, "", "<thin"),
        (f"<think>a</think>\n{HERMES}", False, "a", ""),
    ],
)
def test_reasoning_is_apart(answer: str, is_inside: bool, reasoning: str, text: str) -> None:
    for pieces in ([answer], list(answer)):
        said, thought, calls = divided("hermes", pieces, "think", is_inside=is_inside)
        assert (said, thought) == (text, reasoning) and len(calls) == answer.count("tool_call>") / 2


def test_a_prompts_end_says_where_the_model_is() -> None:
    family = REASONING_FORMATS["think"]
    assert family.prompt_state("<|assistant|>\n<think>\n") == "inside"
    assert family.prompt_state("<|assistant|>\n<think>\n\n</think>\n\n") == "after"
    assert family.prompt_state("a <think> b") == "before"


def test_formats_are_known_by_the_template() -> None:
    for mark, name in (
        ("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama3_json"),
        ("[TOOL_CALLS] name [ARGS]", "mistral_args"), ("<tool_call><function=", "qwen3_coder"),
        ("<tool_call><arg_key>", "glm45"), ("[func_name1(params_name1=", "pythonic"),
        ("<|channel|>commentary", "harmony"),
    ):  # fmt: skip
        found = tool_format(f"{{% if tools %}}{mark}{{% endif %}}")
        assert found is not None and found.name == name
    assert tool_format("{{ messages }}") is None and ReasoningFormat.of("{{ messages }}") is None
    found = ReasoningFormat.of("{{ content.split('</think>') }}")
    assert found is not None and found.name == "think"
    found = ReasoningFormat.of("<|channel|>analysis<|message|>")
    assert found is not None and found.has_channels
    assert ReasoningFormat.of("{{ '<|user|>' + m.content + '<|end|>' }}") is None, "Phi-3"
    found = ReasoningFormat.of("<|end|>{{ content.split('</think>') }}")
    assert found is not None and found.name == "think", "Phi-4-mini-reasoning"


@pytest.mark.parametrize(
    ("schema", "said", "meant"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "number"}, " 12 ", 12),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "object"}, {"type": "string"}]}, '{"a": 1}', {"a": 1}),
        ({"type": "boolean"}, "True", True),
        ({"enum": [1, 2]}, "2", 2),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "integer"}, "many", "many"),
        ({"anyOf": 5}, "2", 2),
        ({"const": "12"}, "12", "12"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"$ref": "#/$defs/City"}, "12", "12"),
        ({"allOf": [{"$ref": "#/$defs/City"}], "description": "Where."}, "12", "12"),
        ({"anyOf": [{"$ref": "#/$defs/City"}, {"type": "null"}]}, "12", "12"),
        ({"anyOf": [{"$ref": "#/$defs/City"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"$ref": "#/$defs/Size"}, {"type": "boolean"}]}, "2", "2"),
        ({"$ref": "#/properties/y"}, "2", "2"),
        ({"$ref": "#/$defs/Self"}, "2", 2),
        ({"$ref": "#/$defs/no/0"}, "2", 2),
        ({"$ref": "#/$defs/a~1b%20c"}, "2", "2"),
        ({"type": "object"}, "{'a': [1, None, true]}", {"a": [1, None, True]}),
        ({"type": "array"}, "('a', 2)", ["a", 2]),
        ({"type": "string"}, "{'a': 1}", "{'a': 1}"),
        ({}, "'a'", "'a'"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": ["string", {}]}, "2", "2"),
        ({}, "[1]", [1]),
        (None, "x", "x"),
    ],
    ids=str,
)
def test_schemas_say_what_a_tagged_argument_means(schema: Any, said: str, meant: object) -> None:
    properties = {"y": {"type": "string"}} | ({} if schema is None else {"x": schema})
    definitions = {
        "City": {"type": "string"}, "Size": {"enum": ["2", "3"]}, "a/b c": {"type": "string"},
        "Self": {"anyOf": [{"$ref": "#/$defs/Self"}, {"type": "integer"}]},
    }  # fmt: skip
    schemas = {"f": {"properties": properties, "$defs": definitions}}
    parser = CallReader.of(TOOL_FORMATS["glm45"], schemas, 9)
    pieces = parser.feed(f"<tool_call>f\n<arg_key>x</arg_key><arg_value>{said}</arg_value>")
    pieces += parser.feed("</tool_call>")
    (call,) = pieces
    assert isinstance(call, Call) and json.loads(call.arguments) == {"x": meant}


def test_reasoning_of_channels_is_apart_and_counted() -> None:
    answer = (
        "<|channel|>analysis<|message|>Hm <|end|><|start|>assistant<|channel|>final<|message|>A"
    )
    for pieces in ([answer], list(answer)):
        assert divided(CHANNELS, pieces) == ("A", "Hm ", [])
    family = AnswerFormat(REASONING_FORMATS[CHANNELS])
    parser = family.parser(TextCodec(None), ())
    parser.feed(answer)
    assert answer[: parser.num_reasoning_chars].endswith("Hm <|end|>") and not parser.has_calls
    called = (
        answer + "<|end|><|start|>assistant to=functions.stop<|channel|>commentary<|message|>{}"
    )
    parsed = family.parsed(called, TextCodec(None), (), "a")
    assert parsed.content == "A\n{}" and not parsed.calls, "no tools, no calls"
    plain = AnswerFormat(None, TOOL_FORMATS[CHANNELS], SCHEMAS, most_one=True)
    twice = called + "<|call|><|start|>assistant" + called
    parsed = plain.parsed(twice, TextCodec(None), (), "a")
    assert [call.arguments for call in parsed.calls] == ["{}"] and parsed.reasoning is None


def function(name: str = "f", **fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, **fields}}]


def tools(choice: object = None, parallel: bool | None = None) -> Tools:
    made = Tools.of(TOOLS, choice, parallel)
    assert made is not None
    return made


def drawn(structured: StructuredOutputs, seed: int) -> str:
    """Return a text that a grammar allows, drawn at random."""
    masks, rng, token_ids = grammar_masks(), random.Random(seed), list[int]()
    state = masks.state(structured)
    while not (state.is_complete or token_ids[-1:] == [1]):
        bits = state.mask().tolist()
        token_ids.append(rng.choice([t for t in range(400) if bits[t // 32] >> (t % 32) & 1]))
        state.observe(token_ids[-1])
    masks.close()
    return Vocabulary(byte_level(), skips_special=False).text(token_ids)


def grammar_masks() -> GrammarMasks:
    pytest.importorskip("llguidance", reason="needs the extra 'structured'")
    return GrammarMasks(TextCodec(byte_level()), 400, (1,))


def checked(structured: StructuredOutputs | None) -> None:
    pytest.importorskip("llguidance", reason="needs the extra 'structured'")
    assert structured is not None
    check_structured(structured, {})


def required(family: str, *functions: Any, special: Any = None, one: bool = False) -> Any:
    """Return structured outputs that are calls of these functions."""
    rules = calls_rules(TOOL_FORMATS[family], functions, special or {}, most_one=one)
    return StructuredOutputs(grammar=f"start: calls\n{rules}")


TAGGED = ("qwen3_coder", "glm45")
CHANNELS = "harmony"


@pytest.mark.parametrize("family", [name for name in TOOL_FORMATS if name != CHANNELS])
@pytest.mark.parametrize("seed", range(3))
def test_what_a_required_call_may_be_is_read_as_calls(family: str, seed: int) -> None:
    special = {"[TOOL_CALLS]": 0} if family == "mistral" else {}
    one = seed == 2
    functions = tools("required").functions
    if family in TAGGED:  # a random text has no end
        city = {"city": {"enum": ["Rom", "Wien"]}, "days": PARAMETERS["properties"]["days"]}
        functions[0] = {"name": "weather", "parameters": {**PARAMETERS, "properties": city}}
    answer = drawn(required(family, *functions, special=special, one=one), seed)
    text, _, calls = divided(family, [answer.replace("<s>", "[TOOL_CALLS]")])
    assert text.strip() in ("", "</s>") and calls and (len(calls) == 1 or not one)
    for name, arguments in calls:
        assert name in NAMES and isinstance(json.loads(arguments), dict)
        assert name == "stop" or set(json.loads(arguments)) <= {"city", "days"}


THOUGHT = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
CALLED = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
FINAL = "<|channel|>final<|message|>"


def is_whole(structured: StructuredOutputs | None, text: str) -> bool | None:
    """Return True if a text is complete, or None if the grammar forbids it."""
    assert structured is not None
    masks = grammar_masks()
    state = masks.state(structured, byte_level().encode(text, add_special_tokens=False).ids)
    state.mask()
    masks.close()
    return None if state.error is not None else state.is_complete


@pytest.mark.parametrize(
    ("choice", "form", "text", "whole"),
    [
        ("required", None, CALLED.format("stop", "{}"), True),
        ("required", None, THOUGHT + CALLED.format("weather", '{"city":"Wien"}'), True),
        ("required", None, FINAL, None),
        ("auto", '{"const": 5}', THOUGHT + FINAL + "5", True),
        ("auto", '{"const": 5}', CALLED.format("stop", "{}"), True),
        (None, '{"const": 5}', THOUGHT + FINAL + "5", True),
        (None, '{"const": 5}', "5", None),
    ],
)
def test_structured_answers_in_channels(
    choice: str | None, form: str | None, text: str, whole: bool | None
) -> None:
    model = ChatFormat(TOOL_FORMATS[CHANNELS], REASONING_FORMATS[CHANNELS], takes_tools=True)
    wanted = None if form is None else StructuredOutputs(json=form)
    params = SamplingParams(structured_outputs=wanted)
    made = model.params(params, None if choice is None else tools(choice))
    assert not made.skip_special_tokens
    assert is_whole(made.structured_outputs, text) is whole


@pytest.mark.parametrize(
    ("family", "text"), [("qwen3_coder", CODER), ("glm45", GLM), ("pythonic", "[stop(), stop()]")]
)
def test_a_required_call_may_have_any_text(family: str, text: str) -> None:
    wanted = required(family, *tools("required").functions)
    assert is_whole(wanted, text) is not None
    assert is_whole(wanted, "x" + text) is None


@pytest.mark.parametrize("family", [name for name in TOOL_FORMATS if name != CHANNELS])
def test_a_required_call_may_have_arguments_of_any_kind(family: str) -> None:
    checked(required(family, {"name": "f", "parameters": {"properties": {"x": True, "y": {}}}}))


JSON_FAMILIES = ("hermes", "llama3_json", "mistral", "mistral_args")
REFERRING = {
    "$defs": {"Size": {"enum": ["s", "m"]}, "Name": {"type": "string"}},
    "properties": {
        "a": {"$ref": "#/$defs/Size"},
        "b": {"allOf": [{"$ref": "#/$defs/Name"}], "description": "Who."},
        "c": {"type": "integer"},
        "d": {"$ref": "#/properties/c"},
    },
    "required": ["a", "b", "d"],
}


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {}}, {"type": "object"}], ids=str)
@pytest.mark.parametrize("family", JSON_FAMILIES)
def test_required_call_of_a_tool_without_parameters_has_none(family: str, parameters: Any) -> None:
    tool = {"name": "stop", **({} if parameters is None else {"parameters": parameters})}
    for seed in range(3):
        _, _, calls = divided(family, [drawn(required(family, tool, one=True), seed)])
        assert calls == [("stop", "{}")]


@pytest.mark.parametrize("family", JSON_FAMILIES)
def test_required_calls_have_no_more_than_one_blank(family: str) -> None:
    parameters = {"properties": {"a": {"const": 1}}, "required": ["a"]}
    wanted = required(family, {"name": "stop", "parameters": parameters}, one=True)
    for seed in range(3):
        assert not re.search(r"[ \t]\s|\s[ \t]|\n\n", drawn(wanted, seed))


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("qwen3_coder", "<tool_call>\n<function=stop>\n<parameter=a>\nm\n</parameter>\n"
         "<parameter=b>\nAnn\n</parameter>\n<parameter=d>\n5\n</parameter>\n</function>\n"
         "</tool_call>"),
        ("glm45", "<tool_call>stop\n<arg_key>a</arg_key>\n<arg_value>m</arg_value>\n"
         "<arg_key>b</arg_key>\n<arg_value>Ann</arg_value>\n<arg_key>d</arg_key>\n"
         "<arg_value>5</arg_value>\n</tool_call>"),
        ("pythonic", '[stop(a="m", b="Ann", d=5)]'),
        ("hermes", '<tool_call>\n{"name": "stop", "arguments": {"a": "m", "b": "Ann", "d": 5}}\n'
         "</tool_call>"),
    ],
)  # fmt: skip
def test_required_calls_follow_references(family: str, call: str) -> None:
    wanted = required(family, {"name": "stop", "parameters": REFERRING}, one=True)
    checked(wanted)
    assert is_whole(wanted, call) is not None
    assert is_whole(wanted, call.replace("5", '"x"')) is None
    assert divided(family, [call])[2] == [("stop", '{"a": "m", "b": "Ann", "d": 5}')]


@pytest.mark.parametrize("family", TOOL_FORMATS)
@pytest.mark.parametrize(
    ("schema", "why"),
    [({"not": {"type": "null"}}, "not"), ({"items": {"const": 1 << 60}}, str(1 << 60))],
)
def test_tool_whose_schema_cannot_be_followed_is_named(
    family: str, schema: dict[str, Any], why: str
) -> None:
    odd = function("odd", parameters={"properties": {"a": schema}})
    given = Tools.of([TOOLS[0], *odd], "required", None)
    model = ChatFormat(TOOL_FORMATS[family], takes_tools=True)
    with pytest.raises(RequestError) as refusal:
        checked(model.params(SamplingParams(), given).structured_outputs)
    assert "tools: the parameters of 'odd' can't be followed" in str(refusal.value)
    assert why in str(refusal.value) and "%json" not in str(refusal.value)
    assert refusal.value.code == "invalid_tools"


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize(
    "given", [{"regex": "[ab]{2}"}, {"choice": ["ab"]}, {"grammar": 'start: "a" "b"'}], ids=str
)
def test_structured_output_begins_after_the_reasoning(
    is_inside: bool, given: dict[str, Any]
) -> None:
    wanted = StructuredOutputs(**given, reasoning="think", in_reasoning=is_inside)
    said = ("" if is_inside else "<think>") + 'Hm {"a": </thin</think>\n\n'
    assert is_whole(wanted, said + "ab")
    assert is_whole(wanted, "ab") != is_inside


@pytest.mark.parametrize(
    ("given", "choice", "words"),
    [
        ("x", None, "tools must be a list"),
        ([{"type": "web_search"}], None, "tools[0] must have the type"),
        ([{"type": "function"}], None, 'tools[0] must have a "function"'),
        (function("a b"), None, "1 to 64"),
        ([TOOLS[0], TOOLS[0]], None, "two tools named 'weather'"),
        (function(parameters=[]), None, "parameters must be a JSON schema"),
        (function(parametres={}), None, "unknown field 'parametres'"),
        (function(parameters={"properties": [1]}), None, "parameters.properties must be an object"),
        (function(parameters={"required": 1}), None, "parameters.required must be a list"),
        (function(parameters={"type": ["null"]}), None, 'parameters.type must be "object"'),
        (TOOLS * 65, None, "at most 128"),
        (function(description="x" * (1 << 20)), None, "characters in all"),
        (TOOLS, "always", "none, auto, required"),
        (None, "required", "needs tools"),
        (TOOLS, {"type": "function", "function": {"name": "no"}}, "names 'no'"),
        (TOOLS, {"type": "custom"}, "or name a function"),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, '"tools"'),
    ],
)
def test_what_is_no_tool_is_refused(given: Any, choice: Any, words: str) -> None:
    with pytest.raises(RequestError) as refusal:
        Tools.of(given, choice, None)
    assert words in str(refusal.value) and refusal.value.code == "invalid_tools"
    with pytest.raises(RequestError, match="parallel_tool_calls must be true or false"):
        Tools.of(TOOLS, None, "no")


def test_who_may_be_called() -> None:
    assert Tools.of(TOOLS, "none", None) is None and Tools.of([], None, None) is None
    listed = {"name": "f", "parameters": {"type": ["object"], "required": []}}
    assert Tools.of([{"type": "function", "function": listed}], None, None) is not None
    named = tools({"type": "function", "function": {"name": "stop"}})
    assert named.callable_names == ("stop",) and named.must_call and len(named.definitions) == 2
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    allowed = tools({"type": "allowed_tools", "allowed_tools": some}, False)
    assert allowed.callable_names == ("weather",) and allowed.must_call and allowed.most_one


def test_only_one_call_is_kept_where_only_one_is_wanted() -> None:
    family = AnswerFormat(None, TOOL_FORMATS["hermes"], SCHEMAS, most_one=True)
    answer = family.parsed(HERMES + HERMES, TextCodec(None), (), "a/0")
    assert answer.content is None and [call.name for call in answer.calls] == ["weather"]
    assert answer.calls[0].id == family.call_id("a/0", 0) != family.call_id("a/0", 1)


def test_a_model_without_a_format_refuses_tools() -> None:
    for model in (ChatFormat(takes_tools=True), ChatFormat(TOOL_FORMATS["hermes"])):
        with pytest.raises(RequestError) as refusal:
            model.answer(tools())
        assert refusal.value.code == "no_tool_format"
