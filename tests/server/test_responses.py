"""Bodies and answers of ``/v1/responses``, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from small_tokenizers import byte_level

from fastdecode.core.delta import Delta
from fastdecode.core.sequence import Completion, RequestOutput, SamplingParams
from fastdecode.openai.answers import AnswerHead
from fastdecode.openai.body_errors import BodyError
from fastdecode.openai.requests import BodyRequest
from fastdecode.openai.response_bodies import chat_of
from fastdecode.openai.responses import ResponseWriter, response_body
from fastdecode.text.chat_format import AnswerFormat
from fastdecode.text.codec import TextCodec
from fastdecode.text.detokenizer import detokenizer_for
from fastdecode.text.reasoning import REASONING_FORMATS

THINK = AnswerFormat(REASONING_FORMATS["think"])
HEAD = AnswerHead("a", 0, "m")


def call_item(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


@pytest.mark.parametrize("empty", [{"summary": []}, {"content": []}])
def test_an_empty_reasoning_item_does_not_divide_a_turn(empty: dict[str, Any]) -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}
    nothing = {"type": "reasoning", **empty}
    items = [thought, nothing, call_item("c1"), nothing, call_item("c2")]
    (message,) = chat_of({"input": items}, ())["messages"]
    assert [call["id"] for call in message["tool_calls"]] == ["c1", "c2"]
    assert message["reasoning_content"] == "t"


ANSWERS = [
    ("<think>Why? é</think>", "\n\nSo."),
    ("<think>Cut off", ""),
    ("", "No reasoning, no mark"),
]


@pytest.mark.parametrize(("thought", "answer"), ANSWERS)
@pytest.mark.parametrize("answer_format", [THINK, None])
def test_tokens_of_the_reasoning_are_counted(
    thought: str, answer: str, answer_format: AnswerFormat | None
) -> None:
    tokenizer = byte_level()
    codec, params = TextCodec(tokenizer), SamplingParams()
    num_thought = len(tokenizer.encode(thought).ids)
    token_ids = tokenizer.encode(thought).ids + tokenizer.encode(answer).ids
    request = BodyRequest(("x",), params, True, answer_format=answer_format, echo={})
    done = Completion(0, thought + answer, tuple(token_ids), "stop")
    whole = response_body(request, [RequestOutput("0", None, (1,), (done,))], codec, HEAD)
    counted = {"reasoning_tokens": num_thought if answer_format else 0}
    assert whole["usage"]["output_tokens_details"] == counted
    writer = ResponseWriter(request, [(1,)], codec, HEAD)
    vocabulary = codec.vocabulary_of(params)
    assert vocabulary is not None
    detokenizer = detokenizer_for(vocabulary, (1,))
    for token_id in token_ids:
        writer.add(Delta("0", 0, detokenizer.append(token_id), (token_id,)))
    writer.add(Delta("0", 0, "", (), finish_reason="stop"))
    assert writer.response()["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": []}, {"role": "assistant", "content": ""}),
        ({"type": None, "role": "user", "content": "x"}, {"role": "user", "content": "x"}),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": "No."},
        ),
        *(
            (
                {"type": "function_call_output", "call_id": "c", **output},
                {"role": "tool", "tool_call_id": "c", "content": ""},
            )
            for output in ({}, {"output": None}, {"output": []})
        ),
    ],
)
def test_items_that_clients_send_back_are_messages(
    item: dict[str, Any], message: dict[str, Any]
) -> None:
    assert chat_of({"input": [item]}, ())["messages"] == [message]


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": None},
        {"role": "assistant", "content": [{"type": "refusal"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": None}]},
        {"role": "user", "content": [{"type": "input_image"}]},
    ],
)
def test_items_without_text_are_refused(item: dict[str, Any]) -> None:
    with pytest.raises(BodyError):
        chat_of({"input": [item]}, ())
