"""Reasoning is not the answer: stop strings, prefills, and calls within it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from small_tokenizers import TOKENIZERS, byte_level

from fastdecode.core.errors import RequestError
from fastdecode.core.sequence import SamplingParams
from fastdecode.core.structured import StructuredOutputs
from fastdecode.text.chat_format import ChatFormat
from fastdecode.text.codec import TextCodec
from fastdecode.text.reasoning import REASONING_FORMATS
from fastdecode.text.tools import TOOL_FORMATS, Tools

CODEC = TextCodec(byte_level())
THINK, MISTRAL, HARMONY = (REASONING_FORMATS[name] for name in ("think", "mistral", "harmony"))
HERMES = ChatFormat(TOOL_FORMATS["hermes"], THINK, takes_tools=True)
CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
HEAD = "<|channel|>analysis<|message|>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"


def written(answer: str, params: SamplingParams, prompt: str = "Hello") -> tuple[str, str | None]:
    """The text of an answer up to its stop, which is the same taken at once or in pieces."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode(answer, add_special_tokens=False).ids
    text = CODEC.sequence_text(params, tokenizer.encode(prompt).ids)
    taken = ""
    for token in ids:
        is_over = text.append(token)
        taken += text.take()
        if is_over:
            break
    whole = text.finish()
    assert taken + text.take() == whole
    return whole, text.stopped_by


@pytest.mark.parametrize(
    ("family", "prompt", "answer", "text", "stop"),
    [
        (THINK, "x", "<think>END</think>a END b", "<think>END</think>a ", "END"),
        (THINK, "x", " <think>\nThe END</think>\n\nTh", " <think>\nThe END</think>\n\nTh", None),
        (THINK, "x<think>\n", "The END.</think>a END", "The END.</think>a ", "END"),
        (THINK, "x<think>\n\n</think>\n", "The END.", "The ", "END"),
        (THINK, "x", "The END.", "The ", "END"),
        (THINK, "x", "<thEND", "<th", "END"),
        (THINK, "x", "END", "", "END"),
        (THINK, "x", "<think>EN</think>D END", "<think>EN</think>D ", "END"),
        (THINK, "x", "<think>E</think>END", "<think>E</think>", "END"),
        (THINK, "x", "<thi", "<thi", None),
        (MISTRAL, "x", "[THINK]END[/THINK]END", "[THINK]END[/THINK]", "END"),
        (HARMONY, "x", f"{HEAD}END{FINAL}a END", f"{HEAD}END{FINAL}a ", "END"),
        (HARMONY, "x", "No channel, the END", "No channel, the ", "END"),
    ],
)
def test_stop_strings_count_in_the_answer_alone(
    family: Any, prompt: str, answer: str, text: str, stop: str | None
) -> None:
    params = ChatFormat(reasoning=family).params(SamplingParams(stop=("END",)), None)
    assert written(answer, params, prompt) == (text, stop)
    kept = replace(params, include_stop_str_in_output=True)
    assert written(answer, kept, prompt) == (text + (stop or ""), stop)


def test_a_mark_of_reasoning_may_be_a_stop_string() -> None:
    for stop in ("<think>", "think", "</think>", "\n"):
        params = HERMES.params(SamplingParams(stop=(stop,)), None)
        assert written("<think>a\nb</think>x", params) == ("<think>a\nb</think>x", None)


@pytest.mark.parametrize("seed", range(20))
def test_stop_strings_are_found_as_in_the_answer_by_itself(seed: int) -> None:
    rng = random.Random(seed)
    answer = "".join(rng.choices("ab<", k=30)) + "."
    stop = tuple("".join(rng.choices("ab<", k=rng.randint(1, 4))) for _ in range(3))
    params = HERMES.params(SamplingParams(stop=stop), None)
    text, by = written(f"<think>{answer}</think>{answer}", params)
    assert (text, by) == (
        f"<think>{answer}</think>" + written(answer, SamplingParams(stop=stop))[0],
        written(answer, SamplingParams(stop=stop))[1],
    )


def test_reasoning_without_stop_strings_is_as_before() -> None:
    params = HERMES.params(SamplingParams(), None)
    assert written("<think>END</think>END", params) == ("<think>END</think>END", None)


@pytest.mark.parametrize("marks", ["<think>", ["a"], ["a", ""], ["a", 5], [5, "a"], "ab"])
def test_marks_that_are_no_pair_are_refused(marks: Any) -> None:
    with pytest.raises(RequestError, match="reasoning_marks"):
        SamplingParams(reasoning_marks=marks)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("Four", None),
        ("<think>", "inside"),
        ("<think>Let me see", "inside"),
        ("<think>a</think>\n\nFour", "after"),
        ("<think>\n\n</think>\n\nAnswer:", "after"),
        ("</think><think>again", "inside"),
        ("a </think>", "after"),
    ],
)
def test_the_last_mark_of_a_prefill_counts(text: str, state: str | None) -> None:
    formats = HERMES.continuing(text)
    assert formats.reasoning is not None and formats.reasoning.state == state
    structured = SamplingParams(structured_outputs=StructuredOutputs(choice=("yes",)), stop=("a",))
    params = formats.params(structured, None)
    wanted = params.structured_outputs
    assert wanted is not None
    assert wanted.in_reasoning == (state == "inside")
    assert wanted.reasoning == (None if state == "after" else "think")
    first = {"inside": "", None: "<think>"}
    assert params.reasoning_marks == (None if state == "after" else (first[state], "</think>"))


@pytest.mark.parametrize(
    ("family", "prefill", "answer", "reasoning", "content"),
    [
        (THINK, "<think>Let me see", ", so.</think>\n\nFour.", ", so.", "Four."),
        (THINK, "<think>a</think>\n\nFo", "ur <think>", None, "ur <think>"),
        (MISTRAL, "[THINK]Let", " me.[/THINK]Four.", " me.", "Four."),
        (HARMONY, f"{HEAD}Let", f" me.{FINAL}Four.", " me.", "Four."),
        (HARMONY, "<|channel|>final<|message|>Fo", "ur.", None, "ur."),
    ],
)
def test_answers_that_continue_a_prefill(
    family: Any, prefill: str, answer: str, reasoning: str | None, content: str
) -> None:
    answer_format = ChatFormat(reasoning=family).continuing(prefill).answer(None)
    assert answer_format is not None
    prompt = TOKENIZERS["byte-level"].encode(prefill).ids
    parsed = answer_format.parsed(answer, CODEC, prompt, "a")
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


STOP_TOOL = [{"type": "function", "function": {"name": "stop"}}]


@pytest.mark.parametrize(
    ("answer", "reasoning", "content", "num_calls"),
    [
        (f"<think>I call.\n{CALL}", "I call.\n", None, 1),
        (f"<think>I call.\n{CALL}\n{CALL}", "I call.\n", None, 2),
        (f"<think>I call.\n{CALL}\nand wait", "I call.\nand wait", None, 1),
        (f"<think>Like {CALL}?</think>\n\nNo.", f"Like {CALL}?", "No.", 0),
        (f"<think>Like {CALL}?</think>\n\n{CALL}", f"Like {CALL}?", None, 1),
        ("<think>A <tool_call> is a mark", "A <tool_call> is a mark", "", 0),
        ("<think>A <tool_", "A <tool_", "", 0),
        ("<think>A <tool_call>{</think>b", "A <tool_call>{", "b", 0),
    ],
)
def test_a_call_within_reasoning_that_never_ends_is_a_call(
    answer: str, reasoning: str, content: str | None, num_calls: int
) -> None:
    for pieces in ([answer], list(answer), [answer[:9], answer[9:]]):
        tools = Tools.of(STOP_TOOL, None, None)
        answer_format = HERMES.answer(tools)
        assert answer_format is not None
        parser = answer_format.parser(CODEC, ())
        parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
        made = _gathered(parts)
        assert made == (reasoning, content or "", num_calls), pieces
    whole = answer_format.parsed(answer, CODEC, (), "a")
    assert (whole.reasoning, whole.content, len(whole.calls)) == (reasoning, content, num_calls)
    assert all(json.loads(call.arguments) == {} for call in whole.calls)


def _gathered(parts: Sequence[Any]) -> tuple[str, str, int]:
    reasoning = content = ""
    calls = set()
    for part in parts:
        if isinstance(part, str):
            content += part
        elif hasattr(part, "index"):
            calls.add(part.index)
        else:
            reasoning += part.text
    return reasoning, content.strip(), len(calls)
