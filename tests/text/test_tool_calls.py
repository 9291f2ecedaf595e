"""Tool calls and reasoning: found in answers however they are cut into pieces, and
written by grammars."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from small_tokenizers import TOKENIZERS, byte_level

from fastdecode.core.errors import RequestError
from fastdecode.core.structured import StructuredOutputs
from fastdecode.text.chat_format import (
    AnswerFormat,
    AnswerParser,
    ChatFormat,
    ParsedAnswer,
    Reasoning,
)
from fastdecode.text.codec import TextCodec
from fastdecode.text.detokenizer import Vocabulary
from fastdecode.text.grammar_masks import GrammarMasks
from fastdecode.text.reasoning import (
    REASONING_FORMATS,
    ReasoningSplitter,
    prompt_state,
    reasoning_format,
)
from fastdecode.text.tool_calls import (
    TOOL_FORMATS,
    CallPiece,
    ToolCallParser,
    calls_rules,
    tool_format,
)
from fastdecode.text.tools import Tools

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
CALL = ("weather", '{"city": "Wie}n\\""}')


def divided(
    family: str, pieces: Sequence[str], reasoning: str | None = None, *, is_inside: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """Text, reasoning and calls of an answer that comes in these pieces."""
    splitter = None if reasoning is None else ReasoningSplitter(
        REASONING_FORMATS[reasoning], is_inside
    )  # fmt: skip
    parser = AnswerParser(splitter, ToolCallParser(TOOL_FORMATS[family], NAMES), 9)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    calls: dict[int, list[str]] = {}
    text = thought = ""
    for part in parts:
        if isinstance(part, CallPiece):
            assert (part.index in calls) == (part.name is None), "its first piece has the name"
            calls.setdefault(part.index, [part.name or "", ""])[1] += part.arguments
        elif isinstance(part, Reasoning):
            thought += part.text
        else:
            text += part
    return text, thought, [(name, arguments) for name, arguments in calls.values()]


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Wie}n\\""}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Wie}n\\""}}'
ANSWERS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "No call, but 1 < 2 and <tool_box>.", "No call, but 1 < 2 and <tool_box>.", []),
    ("hermes", f"I look.\n{HERMES}\n{HERMES}\n", "I look.\n", [CALL, CALL]),
    ("hermes", f"{HERMES}\nDone.", "Done.", [CALL]),
    ("hermes", '<tool_call>\n{"arguments": {"a": [1]}, "name": "f"}\n</tool_call>', "",
     [("f", '{"a": [1]}')]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "x": [{}, "}"]}\n</tool_call>!', "!",
     [("f", "{}")]),
    ("hermes", "<tool_call> is a mark", "<tool_call> is a mark", []),
    ("hermes", "<tool_call>\n{not JSON}\n</tool_call>",
     "<tool_call>{not JSON}\n</tool_call>", []),
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
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama3_json", "{}", "{}", []),
    ("llama3_json", 'Here: {"name": "weather"}', 'Here: {"name": "weather"}', []),
    ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Wie}n\\""}}, '
     '{"name": "stop", "arguments": {}}]', "", [CALL, ("stop", "{}")]),
    ("mistral", '[TOOL_CALLS] [{"name": "stop", "arguments": {}, "id": "abc"}]', "",
     [("stop", "{}")]),
    ("mistral", "[1, 2] is a list", "[1, 2] is a list", []),
    ("mistral_args", 'Yes.[TOOL_CALLS]weather[ARGS]{"city": "Wie}n\\""}'
     '[TOOL_CALLS]stop[CALL_ID]a1b2[ARGS]{}', "Yes.", [CALL, ("stop", "{}")]),
    ("mistral_args", "[TOOL_CALLS] no name [ARGS]", "[TOOL_CALLS] no name [ARGS]", []),
]  # fmt: skip


@pytest.mark.parametrize(("family", "answer", "text", "calls"), ANSWERS)
def test_calls_are_found_however_the_text_is_cut(
    family: str, answer: str, text: str, calls: list[tuple[str, str]]
) -> None:
    rng = random.Random(5)
    cuts = [[answer], list(answer)]
    for _ in range(6):
        places = sorted(rng.sample(range(len(answer) + 1), 2))
        cuts.append([answer[: places[0]], answer[places[0] : places[1]], answer[places[1] :]])
    for pieces in cuts:
        said, _, found = divided(family, pieces)
        assert (said, found) == (text, calls), pieces


def test_a_long_object_without_a_name_is_read_once() -> None:
    parser = ToolCallParser(TOOL_FORMATS["hermes"], NAMES)
    parser.feed('<tool_call>{"name": ')
    for _ in range(2000):
        parser.feed("[")
    assert parser._json._depth == 2001 and parser._num_scanned == len(parser._text)


def test_an_unclosed_first_key_is_text_once_it_is_too_long_for_a_call() -> None:
    parser = ToolCallParser(TOOL_FORMATS["llama3_json"], NAMES)
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
    assert prompt_state(family, "<|assistant|>\n<think>\n") == "inside"
    assert prompt_state(family, "<|assistant|>\n<think>\n\n</think>\n\n") == "after"
    assert prompt_state(family, "a <think> b") == "before"


def test_formats_are_known_by_the_template() -> None:
    for mark, name in (
        ("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"), ("<|python_tag|>", "llama3_json"),
        ("[TOOL_CALLS] name [ARGS]", "mistral_args"),
    ):  # fmt: skip
        found = tool_format(f"{{% if tools %}}{mark}{{% endif %}}")
        assert found is not None and found.name == name
    assert tool_format("{{ messages }}") is None and reasoning_format("{{ messages }}") is None
    found = reasoning_format("{{ content.split('</think>') }}")
    assert found is not None and found.name == "think"


def tools(choice: object = None, parallel: bool | None = None) -> Tools:
    made = Tools.of(TOOLS, choice, parallel)
    assert made is not None
    return made


def drawn(structured: StructuredOutputs, seed: int) -> str:
    """A text that a grammar allows, drawn at random."""
    codec = TextCodec(byte_level())
    vocabulary = codec.vocabulary
    assert vocabulary is not None
    masks, rng = GrammarMasks(vocabulary, 400, (1,)), random.Random(seed)
    token_ids: list[int] = []
    state = masks.state(structured)
    while True:
        bits = state.mask().tolist()
        allowed = [t for t in range(400) if bits[t // 32] >> (t % 32) & 1]
        token_ids.append(rng.choice(allowed))
        if token_ids[-1] == 1:
            break
        state.observe(token_ids[-1])
        if state.is_complete:
            break
    masks.close()
    return Vocabulary(vocabulary.tokenizer, skips_special=False).text(token_ids)


@pytest.mark.parametrize("family", TOOL_FORMATS)
@pytest.mark.parametrize("seed", range(3))
def test_what_a_required_call_may_be_is_read_as_calls(family: str, seed: int) -> None:
    pytest.importorskip("llguidance", reason="needs the extra 'structured'")
    special = {"[TOOL_CALLS]": 0} if family == "mistral" else {}
    one = seed == 2
    rules = calls_rules(TOOL_FORMATS[family], tools("required").functions, special, most_one=one)
    answer = drawn(StructuredOutputs(grammar=f"start: calls\n{rules}"), seed)
    text, _, calls = divided(family, [answer.replace("<s>", "[TOOL_CALLS]")])
    assert text.strip() in ("", "</s>") and calls and (len(calls) == 1 or not one)
    for name, arguments in calls:
        assert name in NAMES and isinstance(json.loads(arguments), dict)
        assert name == "stop" or set(json.loads(arguments)) <= {"city", "days"}


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize(
    "given", [{"regex": "[ab]{2}"}, {"choice": ["ab"]}, {"grammar": 'start: "a" "b"'}], ids=str
)
def test_structured_output_begins_after_the_reasoning(
    is_inside: bool, given: dict[str, Any]
) -> None:
    pytest.importorskip("llguidance", reason="needs the extra 'structured'")
    masks = GrammarMasks(Vocabulary(byte_level()), 400, (1,))
    wanted = StructuredOutputs(**given, reasoning="think", in_reasoning=is_inside)
    encode = TextCodec(byte_level())._vocabulary.tokenizer.encode  # type: ignore[union-attr]
    said = ("" if is_inside else "<think>") + 'Hm {"a": </thin</think>\n\n'
    state = masks.state(wanted, encode(said + "ab", add_special_tokens=False).ids)
    state.mask()
    assert state.error is None and state.is_complete
    other = masks.state(wanted, encode("ab", add_special_tokens=False).ids)
    other.mask()
    assert other.is_complete != is_inside
    masks.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("x", None, None), "tools must be a list"),
        (([{"type": "web_search"}], None, None), "tools[0] must have the type"),
        (([{"type": "function"}], None, None), 'tools[0] must have a "function"'),
        (([{"type": "function", "function": {"name": "a b"}}], None, None), "1 to 64"),
        (([TOOLS[0], TOOLS[0]], None, None), "two tools named 'weather'"),
        (([{"type": "function", "function": {"name": "f", "parameters": []}}], None, None),
         "parameters must be a JSON schema"),
        (([{"type": "function", "function": {"name": "f", "parametres": {}}}], None, None),
         "unknown field 'parametres'"),
        ((TOOLS * 65, None, None), "at most 128"),
        (([{"type": "function", "function": {"name": "f", "description": "x" * (1 << 20)}}],
          None, None), "characters in all"),
        ((TOOLS, "always", None), "none, auto, required"),
        ((None, "required", None), "needs tools"),
        ((TOOLS, {"type": "function", "function": {"name": "no"}}, None), "names 'no'"),
        ((TOOLS, {"type": "custom"}, None), "must be a string or name a function"),
        ((TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, None), '"tools"'),
        ((TOOLS, None, "no"), "parallel_tool_calls must be true or false"),
    ],
)  # fmt: skip
def test_what_is_no_tool_is_refused(given: tuple[Any, ...], words: str) -> None:
    with pytest.raises(RequestError) as refusal:
        Tools.of(*given)
    assert words in str(refusal.value) and refusal.value.code == "invalid_tools"


def test_who_may_be_called() -> None:
    assert Tools.of(TOOLS, "none", None) is None and Tools.of([], None, None) is None
    named = tools({"type": "function", "function": {"name": "stop"}})
    assert named.callable_names == ("stop",) and named.must_call and len(named.definitions) == 2
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    allowed = tools({"type": "allowed_tools", "allowed_tools": some}, False)
    assert allowed.callable_names == ("weather",) and allowed.must_call and allowed.most_one


def test_only_one_call_is_kept_where_only_one_is_wanted() -> None:
    family = AnswerFormat(None, TOOL_FORMATS["hermes"], NAMES, most_one=True)
    parser = family.parser(TextCodec(TOKENIZERS["byte-level"]), ())
    answer = ParsedAnswer.of(HERMES + HERMES, parser, family, "a/0")
    assert answer.content is None and [call.name for call in answer.calls] == ["weather"]
    assert answer.calls[0].id == family.call_id("a/0", 0) != family.call_id("a/0", 1)


def test_a_model_without_a_format_refuses_tools() -> None:
    for model in (ChatFormat(takes_tools=True), ChatFormat(TOOL_FORMATS["hermes"])):
        with pytest.raises(RequestError) as refusal:
            model.answer(tools())
        assert refusal.value.code == "no_tool_format"
