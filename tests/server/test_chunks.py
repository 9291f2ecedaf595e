"""Chunks of streams, without a socket: what is held back, and what comes when."""

from __future__ import annotations

import json
from typing import Any

from small_tokenizers import TOKENIZERS

from fastdecode.core.delta import Delta
from fastdecode.core.sequence import SamplingParams, TokenLogprob
from fastdecode.openai.chunks import ChunkWriter
from fastdecode.openai.requests import BodyRequest, StreamOptions
from fastdecode.text.codec import TextCodec
from fastdecode.text.detokenizer import TokenText, Vocabulary


def writer(*, is_chat: bool, n: int = 1, detokenize: bool = True, **options: bool) -> ChunkWriter:
    params = SamplingParams(n=n, detokenize=detokenize)
    body = BodyRequest(("x",), params, is_chat, stream=StreamOptions(**options))
    return ChunkWriter(body, [(1, 2, 3)], TextCodec(None), answer_id="7", created_s=5, model='a"b')


def said(chunk: str) -> Any:
    return json.loads(chunk.removeprefix("data: "))


def test_the_role_comes_with_the_first_token_of_every_choice() -> None:
    chats = writer(is_chat=True, n=2)
    first = said(chats.events(0, Delta("r", 1, "a", (4,))))
    assert first["object"] == "chat.completion.chunk" and first["model"] == 'a"b'
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
    assert first["choices"][0]["index"] == 1 and "usage" not in first
    assert said(chats.events(0, Delta("r", 1, "b", (4,))))["choices"][0]["delta"] == {
        "content": "b"
    }
    held = said(chats.events(0, Delta("r", 0, "", (4,))))
    assert held["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    last = said(chats.events(0, Delta("r", 0, "", (1,), finish_reason="stop")))
    assert last["choices"][0]["finish_reason"] == "stop" and last["choices"][0]["delta"] == {}
    assert chats.end() == "data: [DONE]\n\n"


def test_usage_is_null_but_in_the_last_chunk_or_in_every_one() -> None:
    once = writer(is_chat=False, include_usage=True)
    assert said(once.events(0, Delta("r", 0, "a", (4,))))["usage"] is None
    last = said(once.end().removesuffix("data: [DONE]\n\n"))
    assert last["choices"] == []
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    counts = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    assert last["usage"] == {**counts, **details}
    always = writer(is_chat=False, continuous_usage=True)
    for num in (1, 2):
        chunk = said(always.events(0, Delta("r", 0, "", (4,))))
        assert chunk["usage"]["completion_tokens"] == num


def test_without_text_log_probabilities_wait_for_none() -> None:
    chunks = writer(is_chat=False, detokenize=False)
    chunks._writer.tokens = TokenText(Vocabulary(TOKENIZERS["byte-level"]))
    for token in (40, 41):
        steps = (TokenLogprob(token, -0.5, ()),)
        chunk = said(chunks.events(0, Delta("r", 0, "", (token,), steps)))
        assert len(chunk["choices"][0]["logprobs"]["token_logprobs"]) == 1


def test_log_probabilities_wait_for_the_text_that_they_belong_to() -> None:
    """Without a tokenizer all tokens begin at 0."""
    steps = (TokenLogprob(4, -0.5, ((4, -0.5),)),)
    chunk = said(writer(is_chat=False).events(0, Delta("r", 0, "", (4,), steps)))
    assert chunk["choices"][0]["logprobs"] == {
        "tokens": ["token_id:4"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:4": -0.5}],
        "text_offset": [0],
    }
    assert chunk["choices"][0]["token_ids"] == [4], "there is no text to tell them by"
