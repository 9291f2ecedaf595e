"""OpenAI batch lines: what is understood, what is refused by name, and the shape of answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from fastdecode.core.errors import CapacityError, RequestError
from fastdecode.core.sequence import (
    CacheUse,
    Completion,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)  # fmt: skip
from fastdecode.jobs.formats import LineError, OpenAILines, SimpleLines, identifier, output_fields
from fastdecode.openai.answers import usage, usage_of
from fastdecode.openai.body_errors import BodyError
from fastdecode.openai.requests import (
    CHAT_URL,
    COMPLETIONS_URL,
    NOT_SUPPORTED,
    BodyRequest,
    RequestReader,
)
from fastdecode.openai.response_bodies import RESPONSES_URL
from fastdecode.text.chat_format import ChatFormat
from fastdecode.text.chats import Chat, MessageStyle, Rendering
from fastdecode.text.codec import TextCodec
from fastdecode.text.reasoning import REASONING_FORMATS
from fastdecode.text.tools import TOOL_FORMATS

USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "strict": True}}]
MISTRAL, THINK = TOOL_FORMATS["mistral"], REASONING_FORMATS["think"]
FORMAT = ChatFormat(MISTRAL, THINK, True, {"[TOOL_CALLS]": 9}, MessageStyle(9))
ENDED = {"logprobs": None, "finish_reason": "length", "stop_reason": None}


def lines(has_chat_template: bool = True, **given: Any) -> OpenAILines:
    reader = RequestReader(given, ("llama", "dir/llama"), has_chat_template)
    return OpenAILines(reader, "r1", clock=lambda: 1700000000.5)


def line(body: object, url: str = COMPLETIONS_URL, **rest: object) -> bytes:
    return json.dumps(
        {"custom_id": "x", "method": "POST", "url": url, "body": body, **rest}
    ).encode()


def completion(**body: object) -> BodyRequest:
    return lines().parse(line({"prompt": "p", **body}), 1)


def chat(**body: object) -> BodyRequest:
    return lines().parse(line({"messages": USER, **body}, CHAT_URL), 1)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1, 2], [3]], ([1, 2], [3])),
        ([[]], ([],)),  # refused later, with the engine's words
    ],
)
def test_the_four_kinds_of_prompt(prompt: object, prompts: tuple[object, ...]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt", [None, 5, [], [1, "a"], ["a", [1]], [True], {"a": 1}, [[1]] * 3000, [None]]
)
def test_other_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(LineError) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"
    assert caught.value.line_id == "x"


def test_openais_defaults_and_the_commands() -> None:
    assert completion().params == SamplingParams()
    assert completion().params.max_tokens == 16
    assert chat().params == SamplingParams(max_tokens=None)
    given = lines(temperature=0.5, max_tokens=7, logprobs=2)
    greedy = SamplingParams(temperature=0, max_tokens=7, logprobs=2)
    assert given.parse(line({"prompt": "p", "temperature": 0}), 1).params == greedy
    asked = given.parse(line({"messages": USER, "logprobs": False}, CHAT_URL), 1).params
    assert (asked.max_tokens, asked.logprobs) == (7, None)


def test_fields_reach_the_sampling_params() -> None:
    said = {
        "temperature": 0.5, "top_p": 0.9, "n": 3, "seed": 4, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "max_tokens": 9, "top_k": 5, "min_p": 0.01,
        "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
    }  # fmt: skip
    more = {"stop": ["a", "b"], "stop_token_ids": [3], "logit_bias": {"5": -1.5}, "logprobs": 2}
    made: Any = {"stop": ("a", "b"), "stop_token_ids": (3,), "logit_bias": {5: -1.5}, "logprobs": 2}
    assert completion(**said, **more).params == SamplingParams(**said, **made)
    assert chat(stop="x").params.stop == ("x",)
    assert chat(max_completion_tokens=5).params.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).params.max_tokens == 5
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params.logprobs == 4


@pytest.mark.parametrize("name", sorted(NOT_SUPPORTED))
@pytest.mark.parametrize("url", [COMPLETIONS_URL, CHAT_URL])
def test_what_isnt_supported_is_refused_by_name_unless_it_asks_for_nothing(
    name: str, url: str
) -> None:
    ask = completion if url == COMPLETIONS_URL else chat
    for nothing in (None, *NOT_SUPPORTED[name]):
        ask(**{name: nothing})
    with pytest.raises(LineError) as caught:
        ask(**{name: {"type": "json_object"}})
    assert (caught.value.code, caught.value.param) == ("unsupported_field", name)
    assert name in str(caught.value)


def test_best_of_may_be_n() -> None:
    assert completion(best_of=3, n=3).params.n == 3
    for body in ({"best_of": 3}, {"best_of": 1, "n": 2}):
        with pytest.raises(LineError, match="best_of"):
            completion(**body)


BOTH_LIMITS = {"max_tokens": 4, "max_completion_tokens": 5}
BOTH_ENDS = {"continue_final_message": True, "add_generation_prompt": True}


def one(**fields: object) -> dict[str, Any]:
    return {"messages": [{**USER[0], **fields}]}


@pytest.mark.parametrize(
    ("ask", "body", "param", "code"),
    [
        (completion, {"temprature": 1}, "temprature", "unknown_field"),
        (completion, {"messages": USER}, "messages", "unknown_field"),
        (completion, {"temperature": 3000}, "temperature", "invalid_sampling_params"),
        (completion, {"logprobs": True}, "logprobs", "invalid_sampling_params"),
        (completion, {"max_tokens": 0}, "max_tokens", "invalid_sampling_params"),
        (completion, {"model": "gpt-4"}, "model", "model_mismatch"),
        (completion, {"model": ["llama"]}, "model", "model_mismatch"),
        (completion, {"return_token_ids": 1}, "return_token_ids", "invalid_value"),
        (chat, {"prompt": "p"}, "prompt", "unknown_field"),
        (chat, {"logprobs": 2}, "logprobs", "invalid_value"),
        (chat, {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        (chat, {"logprobs": True, "top_logprobs": 1000}, "logprobs", "invalid_sampling_params"),
        (chat, BOTH_LIMITS, "max_completion_tokens", "invalid_value"),
        (chat, {"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_value"),
        (chat, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
        (chat, {"add_generation_prompt": 0}, "add_generation_prompt", "invalid_value"),
        (chat, {"continue_final_message": 1}, "continue_final_message", "invalid_value"),
        (chat, BOTH_ENDS, "continue_final_message", "invalid_messages"),
        (chat, {"add_special_tokens": True}, "add_special_tokens", "unsupported_field"),
        (completion, {"add_special_tokens": False}, "add_special_tokens", "unsupported_field"),
        (chat, {"reasoning_effort": 3}, "reasoning_effort", "invalid_value"),
        (chat, {"messages": []}, "messages", "invalid_messages"),
        (chat, {"messages": "hi"}, "messages", "invalid_messages"),
        (chat, {"messages": ["hi"]}, "messages[0]", "invalid_messages"),
        (chat, one(role=None), "messages[0].role", "invalid_messages"),
        (chat, one(content=None), "messages[0].content", "invalid_messages"),
        (chat, one(name=5), "messages[0].name", "invalid_messages"),
        (chat, one(mood="glad"), "messages[0].mood", "unknown_field"),
        (chat, one(tool_calls=[{}]), "messages[0].tool_calls", "invalid_messages"),
        (chat, one(role="tool"), "messages[0].tool_call_id", "invalid_messages"),
        (chat, one(content=[{"type": "image_url"}]), "messages[0].content", "unsupported_field"),
    ],
)
def test_bad_bodies_name_the_field(ask: Any, body: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(LineError) as caught:
        ask(**body)
    assert (caught.value.param, caught.value.code, caught.value.line_id) == (param, code, "x")


@pytest.mark.parametrize(
    ("raw", "code", "line_id"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b'"\xff"', "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (b"{}", "invalid_custom_id", None),
        (line({}, custom_id=5), "invalid_custom_id", None),
        (line({}, custom_id=""), "invalid_custom_id", None),
        (line({}, custom_id="x" * 2000), "invalid_custom_id", None),
        (line({}, custom_id="\ud800"), "invalid_text", None),
        (line({}, method="GET"), "invalid_method", "x"),
        (line({}, url="/v1/embeddings"), "url_mismatch", "x"),
        (line({}, url=["/v1/completions"]), "url_mismatch", "x"),
        (line([]), "invalid_body", "x"),
        (line({"prompt": "p"}, extra=1), "unknown_field", "x"),
    ],
)
def test_lines_that_are_no_requests(raw: bytes, code: str, line_id: str | None) -> None:
    with pytest.raises(LineError) as caught:
        lines().parse(raw, 4)
    assert (caught.value.code, caught.value.line_id) == (code, line_id)


def test_a_chat_needs_a_template() -> None:
    with pytest.raises(LineError, match="--chat-template") as caught:
        lines(has_chat_template=False).parse(line({"messages": USER}, CHAT_URL), 1)
    assert caught.value.code == "no_chat_template"


def test_messages_are_reduced_to_their_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "system", "content": parts},
        {"role": "user", "content": "", "name": "Ann", "tool_calls": None, "refusal": None},
    ]
    request = chat(
        messages=messages,
        chat_template_kwargs={"enable_thinking": False},
        add_generation_prompt=False,
    )
    assert request.prompts == (
        Chat(
            [{"role": "system", "content": parts}, {"role": "user", "content": "", "name": "Ann"}],
            Rendering(False, variables={"enable_thinking": False}, style=MessageStyle()),
        ),
    )


def test_a_chat_may_continue_its_last_message_and_say_its_effort() -> None:
    asked = chat(
        continue_final_message=True,
        add_generation_prompt=False,
        reasoning_effort="low",
        top_logprobs=0,
        add_special_tokens=False,
        spaces_between_special_tokens=True,
    )
    assert isinstance(asked.prompts[0], Chat)
    how = Rendering(False, True, {"reasoning_effort": "low"}, style=MessageStyle())
    assert asked.prompts[0].how == how
    completion(add_special_tokens=True, length_penalty=1.0, priority=0)


def simple(**body: object) -> BodyRequest:
    raw = json.dumps({"id": "x", "prompt": "p", **body}).encode()
    return SimpleLines(SamplingParams()).parse(raw, 1)


@pytest.mark.parametrize("ask", [simple, completion, chat])
def test_lines_say_with_whom_they_share(ask: Any) -> None:
    for same in ({}, {"cache": None, "cache_salt": None}, {"cache": "on"}):
        assert ask(**same).cache == CacheUse()
    assert ask(cache="off").cache == CacheUse(is_off=True)
    assert ask(cache_salt="tenant").cache == CacheUse(salt="tenant")
    for wrong, blamed in (
        ({"cache": False}, "cache"),
        ({"cache": "none"}, "cache"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
    ):
        with pytest.raises(LineError, match=f"^{blamed}") as caught:
            ask(**wrong)
        assert caught.value.code == "invalid_cache" and caught.value.line_id == "x"
        assert ask is simple or caught.value.param == blamed


def test_the_models_name_is_echoed_and_labels_are_no_matter() -> None:
    labels = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s"}
    assert completion(model="dir/llama", prompt_cache_key="k", **labels).model == "dir/llama"


# --- answers
# ------------------------------------------------------------------------------

LINES = lines()
IDENTIFY = identifier("openai", "r1")


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    alphabet = {token: place for place, token in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary = {**alphabet, "Ġa": 256, "bc": 257}
    tokenizer = Tokenizer(BPE(vocabulary, [("Ġ", "a"), ("b", "c")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<end>"])  # 258
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TextCodec.load(tmp_path)


def output(
    text: str, tokens: tuple[int, ...], *, index: int = 0, logprobs: bool = False
) -> RequestOutput:
    steps = tuple(TokenLogprob(t, -0.5, ((256, -0.25), (t, -0.5))) for t in tokens)
    done = Completion(index, text, tokens, "length", steps if logprobs else None)
    return RequestOutput("1.0", None, (1, 2, 3), (done,))


def test_a_completions_answer(codec: TextCodec) -> None:
    request = completion(prompt=["a", "b"], model="llama")
    answer = LINES.answer(7, request, [output(" a", (256,)), output("bcbc", (257, 257))], codec)
    assert answer == {
        "id": "batch_req_r1_7",
        "custom_id": "x",
        "response": {
            "status_code": 200,
            "request_id": "req_r1_7",
            "body": {
                "id": "cmpl-r1-7",
                "object": "text_completion",
                "created": 1700000000,
                "model": "llama",
                "choices": [
                    {"index": 0, "text": " a", **ENDED},
                    {"index": 1, "text": "bcbc", **ENDED},
                ],
                "usage": usage_of(6, 3, 0),
            },
        },
        "error": None,
    }
    assert IDENTIFY(answer) == (7, False)


def test_an_answer_tells_logprobs_of_its_prompt_in_vllms_shape(codec: TextCodec) -> None:
    step = TokenLogprob(257, -0.5, ((256, -0.25), (257, -0.5)), 2)
    told = [
        None,
        {
            "257": {"logprob": -0.5, "rank": 2, "decoded_token": "bc"},
            "256": {"logprob": -0.25, "rank": 1, "decoded_token": " a"},
        },
    ]
    for request in (chat(), LINES.parse(_prompt_line(), 1)):
        whole = replace(output("é", (1, 2)), prompt_logprobs=(None, step))
        body = LINES.answer(7, request, [whole], codec)["response"]["body"]
        where = body if "message" in body["choices"][0] else body["choices"][0]
        assert where["prompt_logprobs"] == told


def _prompt_line() -> bytes:
    body = {"prompt": [5, 6], "prompt_logprobs": 2}
    line = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line).encode()


def test_logprobs_of_a_prompt_are_not_streamed() -> None:
    reader = RequestReader({}, ("m",), False, is_online=True)
    with pytest.raises(BodyError, match="prompt_logprobs can't be streamed") as refused:
        reader.read("/v1/completions", {"prompt": "p", "prompt_logprobs": 1, "stream": True})
    assert refused.value.param == "prompt_logprobs"


def test_a_chats_answer_with_logprobs(codec: TextCodec) -> None:
    body = LINES.answer(
        7, chat(logprobs=True), [output("é", (128 + 0, 257), logprobs=True)], codec
    )["response"]["body"]
    names = [body[name] for name in ("id", "object", "model")]
    assert names == ["chatcmpl-r1-7", "chat.completion", "llama"]
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "é", "refusal": None}
    assert set(choice) == {"index", "message", "logprobs", "finish_reason", "stop_reason"}
    steps = choice["logprobs"]["content"]
    assert steps[1]["token"] == "bc"
    assert steps[1]["bytes"] == [98, 99]
    assert steps[1]["logprob"] == -0.5
    assert steps[1]["top_logprobs"][0] == {"token": " a", "logprob": -0.25, "bytes": [32, 97]}


def test_a_line_with_tools(codec: TextCodec) -> None:
    with_tools = OpenAILines(RequestReader({}, ("llama",), True, chat_format=FORMAT), "r1")
    call = {"id": "a-long-id-123456789", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "a-long-id-123456789", "content": "4"},
    ]
    body = {"messages": messages, "tools": TOOLS, "tool_choice": "required"}
    request = with_tools.parse(line(body, CHAT_URL), 1)
    (asked,) = request.prompts
    assert isinstance(asked, Chat) and asked.how.tools == (
        {"type": "function", "function": {"name": "f"}},
    )
    assert asked.how.style == MessageStyle(9)
    assert asked.messages[1] == {
        "role": "assistant", "content": "", "reasoning_content": "hm",
        "tool_calls": [{"id": "a-long-id-123456789", "type": "function",
                        "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }  # fmt: skip
    structured = request.params.structured_outputs
    assert structured is not None and structured.reasoning == "think"
    assert structured.grammar is not None and '<[9]> "[" call' in structured.grammar
    assert not request.params.skip_special_tokens
    said = '<think>Hm</think>[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'
    done = Completion(0, said, (1,), "stop")
    answer = with_tools.answer(7, request, [RequestOutput("1.0", None, (1,), (done,))], codec)
    (choice,) = answer["response"]["body"]["choices"]
    (made,) = choice["message"].pop("tool_calls")
    assert len(made["id"]) == 9 and made["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choice["message"] == {
        "role": "assistant", "content": None, "refusal": None, "reasoning_content": "Hm"
    }  # fmt: skip
    assert choice["finish_reason"] == "tool_calls"


def test_a_line_for_a_response(codec: TextCodec) -> None:
    body = {"input": "hi", "instructions": "Be brief.", "max_output_tokens": 5}
    request = LINES.parse(line(body, RESPONSES_URL), 1)
    (asked,) = request.prompts
    assert isinstance(asked, Chat) and [m["role"] for m in asked.messages] == ["system", "user"]
    assert request.params.max_tokens == 5
    answer = LINES.answer(7, request, [output("It is", (1, 2))], codec)
    shown = answer["response"]["body"]
    names = [shown[name] for name in ("object", "id", "created_at")]
    assert names == ["response", "resp_r1-7", 1700000000]
    assert shown["output"][0]["content"][0]["text"] == "It is"
    assert shown["usage"]["output_tokens"] == 2 and shown["status"] == "incomplete"
    for bad, param in (({"stream": True}, "stream"), ({"previous_response_id": "r"}, None)):
        with pytest.raises(LineError) as caught:
            LINES.parse(line({**body, **bad}, RESPONSES_URL), 1)
        assert caught.value.param == param or param is None


def test_completions_logprobs_are_by_text(codec: TextCodec) -> None:
    ids = codec.encode("é")
    assert len(ids) == 2
    tokens = (256, *ids, 257, 258)
    shown = LINES.answer(7, completion(logprobs=1), [output(" aébc", tokens, logprobs=True)], codec)
    logprobs = shown["response"]["body"]["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [" a", "bytes:\\xc3", "bytes:\\xa9", "bc", "<end>"]
    assert logprobs["text_offset"] == [0, 2, 2, 3, 5]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert logprobs["top_logprobs"][3] == {" a": -0.25, "bc": -0.5}
    assert logprobs["top_logprobs"][0] == {" a": -0.25}  # twice the same text: the likelier counts


def test_token_ids_are_given_when_asked_for_or_when_there_is_no_text(codec: TextCodec) -> None:
    done = output(" a", (256,), logprobs=True)
    for request, answering in (
        (completion(return_token_ids=True), codec),
        (completion(), TextCodec(None)),
    ):
        (choice,) = LINES.answer(1, request, [done], answering)["response"]["body"]["choices"]
        assert choice["token_ids"] == [256]
    assert choice["logprobs"]["tokens"] == ["token_id:256"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "param"),
    [
        (LineError("m", code="c", param="stream"), 400, "invalid_request_error", "stream"),
        (RequestError("m", code="prompt_too_long"), 400, "invalid_request_error", None),
        (RequestError("m", code="non_finite_logits"), 500, "server_error", None),
        (CapacityError("m"), 503, "server_error", None),
    ],
)
def test_an_error_is_a_response(
    error: RequestError, status: int, kind: str, param: str | None
) -> None:
    answer = LINES.refusal(3, None, error)
    assert answer["custom_id"] is None
    assert answer["error"] is None
    assert answer["response"]["status_code"] == status
    shown = answer["response"]["body"]["error"]
    assert shown == {"message": "m", "type": kind, "param": param, "code": error.code}
    assert IDENTIFY(answer) == (3, True)


def test_usage_counts_reused_tokens_also_when_there_are_none() -> None:
    def outputs(*cached: int) -> list[RequestOutput]:
        done = (Completion(0, "a", (5, 6), "length"),)
        return [RequestOutput("x", None, (1, 2, 3), done, num_cached_tokens=n) for n in cached]

    counts = {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}
    for reused in ((0, 0), (2, 1)):
        details = {"prompt_tokens_details": {"cached_tokens": sum(reused)}}
        assert usage(outputs(*reused)) == {**counts, **details}
    assert "cached_tokens" not in output_fields(*outputs(0))["usage"]
    assert output_fields(*outputs(2))["usage"]["cached_tokens"] == 2
