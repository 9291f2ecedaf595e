"""Structured outputs as grammars: what is refused, and what tokens they allow."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from messages_for_tests import in_one_piece
from random_schemas import schema
from small_tokenizers import TOKENIZERS, byte_ids, with_text

from fastdecode import SamplingParams
from fastdecode.core.errors import RequestError
from fastdecode.core.sequence import PromptRequest
from fastdecode.core.structured import StructuredOutputs
from fastdecode.engine.checker import RequestChecker
from fastdecode.text.codec import TextCodec
from fastdecode.text.detokenizer import Vocabulary
from fastdecode.text.grammars import GrammarMasks
from fastdecode.wire.codec import Codec
from fastdecode.wire.instances import Submit

pytest.importorskip("llguidance", reason="needs the extra 'structured'")


def checker(kind: str = "byte-level") -> RequestChecker:
    return RequestChecker(TextCodec(TOKENIZERS[kind]), 400, 100)


def refused(structured: Any) -> RequestError:
    with pytest.raises(RequestError) as refusal:
        submit(structured)
    return refusal.value


def submit(structured: Any) -> None:
    params = SamplingParams(structured_outputs=structured)
    checker().check(PromptRequest("x", [5], params), (5,))


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object"),
        ({"json": {}, "regex": "a"}, "json and regex"),
        ("a", "must be an object, not str"),
        ({"jsno": {}}, "unknown field 'jsno'"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": [1]}, "must be a JSON schema"),
        ({"json": {"type": "objct"}}, "objct"),
        ({"json": {"$ref": "#/$defs/no"}}, "does not exist"),
        ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: ["not"]'),
        ({"json": False}, "must be a JSON schema"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?<=a)b"}, "look-around"),
        ({"regex": ""}, "1 to"),
        ({"choice": []}, "at least one text"),
        ({"choice": "yes"}, "must be a list"),
        ({"choice": ["a", 1]}, "must be a text"),
        ({"choice": ["\ud800"]}, "lone surrogate"),
        ({"grammar": "what is this"}, "grammar can't be read"),
        ({"grammar": 'start: "a" nothing'}, "nothing"),
        ({"json_object": 1}, "true or false"),
        ({"regex": "a", "reasoning": "none"}, "reasoning 'none' is none of think, mistral"),
        ({"regex": "a", "in_reasoning": True}, "needs reasoning"),
        ({"json": {}, "disable_any_whitespace": 1}, "true or false"),
        ({"json": {}, "whitespace_pattern": 1}, "a text of"),
        ({"json": {}, "disable_additional_properties": True}, '"additionalProperties": false'),
        ({"json": {}, "structural_tag": "{}"}, "give a grammar, or tools"),
    ],
)
def test_what_cannot_be_followed_is_refused_at_submission(structured: Any, words: str) -> None:
    error = refused(structured)
    assert error.code == "invalid_structured_outputs"
    assert str(error).startswith("structured_outputs") and words in str(error)


@pytest.mark.parametrize(
    "other", [{"ignore_eos": True}, {"min_tokens": 1}, {"detokenize": False}], ids=str
)
def test_what_contradicts_the_end_of_the_text_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="beside structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, **other)  # type: ignore[arg-type]


def test_without_the_package_the_refusal_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    error = refused({"regex": "a"})
    assert error.code == "missing_extra" and "pip install" in str(error)
    assert "[structured]" in str(error)


def test_a_model_without_a_tokenizer_has_no_text() -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    with pytest.raises(RequestError) as refusal:
        RequestChecker(TextCodec(None), 400, 100).check(PromptRequest("x", [5], params), (5,))
    assert refusal.value.code == "no_tokenizer"


def test_they_travel_to_another_process() -> None:
    wanted = {"json": {"type": "object", "properties": {"é": {"enum": [1, "ü"]}}}}
    for more in ({}, {"reasoning": "think"}, {"disable_any_whitespace": True}):
        given: dict[str, Any] = {**wanted, **more}
        params = SamplingParams(structured_outputs=given)  # type: ignore[arg-type]
        request = checker().check(PromptRequest("x", [5], params), (5,))
        assert Codec().decode(in_one_piece(Submit((request,)))) == Submit((request,))


@pytest.mark.parametrize(
    ("more", "spaced", "wide"),
    [
        ({}, True, True),
        ({"disable_any_whitespace": True}, False, False),
        ({"whitespace_pattern": " "}, True, False),
    ],
    ids=str,
)
def test_blanks_of_json_may_be_chosen(
    masks: GrammarMasks, more: dict[str, Any], spaced: bool, wide: bool
) -> None:
    parts = {"a": {"const": 1}, "b": {"const": [2, "x y"]}}
    wanted = StructuredOutputs(
        json={"type": "object", "properties": parts, "required": ["a", "b"]},  # type: ignore[arg-type]
        disable_additional_properties=False, structural_tag=None, **more,
    )  # fmt: skip
    compact = '{"a":1,"b":[2,"x y"]}'
    said = (compact, '{ "a" : 1 , "b" : [ 2 , "x y" ] }', compact.replace(":", ":  "))
    for text, is_allowed in zip(said, (True, spaced, wide), strict=True):
        ids = TOKENIZERS["byte-level"].encode(text, add_special_tokens=False).ids
        state = masks.state(wanted, ids)
        state.mask()
        assert state.is_complete is is_allowed


@pytest.mark.parametrize(
    ("prompt", "reasoning", "in_reasoning"),
    [("a", "think", False), ("a<think>\n", "think", True), ("<think></think>\n", None, False)],
)
def test_reasoning_is_where_the_prompt_leaves_it(
    prompt: str, reasoning: str | None, in_reasoning: bool
) -> None:
    params = SamplingParams(structured_outputs={"regex": "a", "reasoning": "think"})  # type: ignore[arg-type]
    ids = tuple(TOKENIZERS["byte-level"].encode(prompt, add_special_tokens=False).ids)
    request = checker().check(PromptRequest("x", ids, params), ids)
    structured = request.params.structured_outputs
    assert structured is not None
    assert (structured.reasoning, structured.in_reasoning) == (reasoning, in_reasoning)


def allowed(masks: GrammarMasks, wanted: StructuredOutputs, token_ids: Sequence[int]) -> list[int]:
    return ids_of(masks.state(wanted, token_ids).mask())


def ids_of(mask: np.ndarray[Any, Any]) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.fixture
def masks() -> Any:
    made = GrammarMasks(TextCodec(TOKENIZERS["byte-level"]), 400, (1, 399))
    yield made
    made.close()


@with_text
def test_tokens_of_the_text_are_allowed_and_no_others(kind: str) -> None:
    vocabulary, byte = Vocabulary(TOKENIZERS[kind]), byte_ids(kind)
    masks = GrammarMasks(TextCodec(TOKENIZERS[kind]), 2000, (2,))
    wanted = StructuredOutputs(regex="a[0-9]?")
    first = allowed(masks, wanted, ())
    assert {vocabulary.text([token]).strip() for token in first} == {"a"}
    then = allowed(masks, wanted, (byte[ord("a")],))
    assert 2 in then  # the text may end
    assert {vocabulary.text([token]).strip() for token in then if token != 2} == set("0123456789")
    # Where no token is the character, its bytes are.
    char = allowed(masks, StructuredOutputs(regex="\u0416"), ())
    assert char == [byte[0xD0]]
    masks.close()


def test_every_eos_is_allowed_where_the_text_may_end(masks: GrammarMasks) -> None:
    a = byte_ids("byte-level")[ord("a")]
    wanted = StructuredOutputs(regex="a+")
    assert not {1, 399} & set(allowed(masks, wanted, ()))
    assert {1, 399} < set(allowed(masks, wanted, (a,)))


def test_a_model_without_eos_is_given_no_other_token_for_it() -> None:
    vocabulary, byte = Vocabulary(TOKENIZERS["byte-level"]), byte_ids("byte-level")
    size = vocabulary.tokenizer.get_vocab_size()
    masks = GrammarMasks(TextCodec(vocabulary.tokenizer), size, ())
    a = byte[ord("a")]
    assert [i for i in allowed(masks, StructuredOutputs(regex="a{2}"), (a,)) if i < size] == [a]
    masks.close()


def test_a_state_is_a_function_of_the_tokens(masks: GrammarMasks) -> None:
    """A resumed sequence depends on it. Random walks: one state
    that sees token by token, and one made of all of them."""
    for seed in range(5):
        rng = random.Random(seed)
        wanted = StructuredOutputs.of({"json": schema(rng)})
        assert wanted is not None
        state, drawn = masks.state(wanted), []
        for _ in range(25):
            ids = ids_of(state.mask())
            assert ids == allowed(masks, wanted, drawn)
            drawn.append(rng.choice([token for token in ids if token not in (1, 399)] or [1]))
            state.observe(drawn[-1])
            if state.is_complete or drawn[-1] == 1:
                break


GREAT = 1234567890123456789
INT64: dict[str, Any] = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"enum": [GREAT, "a"]}, [str(GREAT), '"a"'], [str(GREAT - 21), "1"]),
        ({"const": 12345678901234567890}, ["12345678901234567890"], ["12345678901234567000"]),
        ({"type": "integer", "enum": [-GREAT, "a"]}, [str(-GREAT)], [str(-GREAT + 21), '"a"']),
        (INT64, [str((1 << 63) - 1), "-9223372036854774784", "0"], [str(1 << 63), str(-1 << 64)]),
        ({"type": "array", "items": INT64}, [f"[{(1 << 63) - 1}]"], [f"[{1 << 63}]"]),
        ({"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1}, [str((1 << 64) - 1)], ["-1"]),
        ({"type": "integer", "exclusiveMaximum": 1 << 63}, [str((1 << 63) - 1)], [str(1 << 63)]),
        ({"type": "integer", "exclusiveMinimum": 1 << 53}, [str((1 << 53) + 2)], [str(1 << 53)]),
        ({"type": "integer", "minimum": (1 << 53) + 1}, [str((1 << 53) + 2)], [str(1 << 53)]),
        ({"type": "integer", "maximum": (1 << 60) + 1}, [str(1 << 60)], [str((1 << 60) + 2)]),
        ({**INT64, "type": "number"}, ["1.5"], [str(1 << 63)]),
        ({"type": "integer", "maximum": 10**400}, ["-1", "9"], ["1.5"]),
        ({"type": "number", "maximum": 1.7976931348623157e308}, ["1.5"], ["a"]),
        ({"oneOf": [{"const": 1, "title": "a"}, {"const": 2, "title": "b"}]}, ["1", "2"], ["3"]),
        ({"oneOf": [{"const": 1}, {"const": True}, {"enum": ["a", None]}]}, ["1", "true"], ["2"]),
        ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, ["1", "true"], ["1.5"]),
        ({"type": "string", "format": "uri-reference"}, ['"a"'], ["a"]),
        ({"type": "string", "format": "date"}, ['"2026-01-02"'], ['"a"']),
        ({"const": {"format": "byte", "oneOf": 1}}, ['{"format": "byte", "oneOf": 1}'], ["{}"]),
    ],
    ids=str,
)
def test_schemas_are_followed_exactly(
    masks: GrammarMasks, schema: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    submit({"json": schema})
    wanted = StructuredOutputs(json=schema)  # type: ignore[arg-type]
    for text in (*allowed, *refused):
        ids = TOKENIZERS["byte-level"].encode(text, add_special_tokens=False).ids
        state = masks.state(wanted, ids)
        may_end = 1 in ids_of(state.mask()) and state.error is None
        assert may_end is (text in allowed), text


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"const": GREAT}}}, f"const has the integer {GREAT}"),
        ({"items": {"enum": [{"a": [GREAT]}]}}, f"enum has the integer {GREAT}"),
        ({"type": "integer", "multipleOf": (1 << 53) + 1}, "9007199254740993"),
        ({"type": "integer", "minimum": 10**400}, "beyond the integers of 64 bits"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "oneOf"),
        ({"oneOf": [{"const": 2.0}, {"type": "integer"}]}, "oneOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ],
    ids=str,
)
def test_schemas_that_would_be_rounded_are_refused(schema: dict[str, Any], words: str) -> None:
    assert words in str(refused({"json": schema}))


@pytest.mark.parametrize("char", ["\x7f", "\x80", "\u2028", "\x00", "\\", '"', "\ufeff", "//"])
def test_choices_have_any_characters(masks: GrammarMasks, char: str) -> None:
    ids = TOKENIZERS["byte-level"].encode(f"a{char}", add_special_tokens=False).ids
    submit({"choice": [f"a{char}"]})
    state = masks.state(StructuredOutputs(choice=(f"a{char}",)), ids)
    state.mask()
    assert state.is_complete


def test_a_complete_text_is_known_at_its_last_token(masks: GrammarMasks) -> None:
    byte = byte_ids("byte-level")
    state = masks.state(StructuredOutputs(choice=("yes", "yesno")))
    for char in b"yesno":
        assert not state.is_complete and byte[char] in ids_of(state.mask())
        state.observe(byte[char])
    assert state.is_complete


def test_a_grammar_that_fails_on_the_way_allows_nothing_and_says_why(
    masks: GrammarMasks,
) -> None:
    """The engine does not rely on checks of the HTTP process."""
    state = masks.state(StructuredOutputs(regex="(a"))
    assert ids_of(state.mask()) == []
    assert state.error is not None and state.error.code == "structured_outputs_failed"
