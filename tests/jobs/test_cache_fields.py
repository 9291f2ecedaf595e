"""What lines say about the KV cache, and what answers tell of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastdecode.core.delta import Delta
from fastdecode.core.sequence import (
    CacheUse,
    Completion,
    Request,
    RequestOutput,
    SamplingParams,
)
from fastdecode.jobs.formats import LineError, OpenAILines, SimpleLines, output_fields
from fastdecode.openai.answers import usage
from fastdecode.openai.requests import CHAT_URL, COMPLETIONS_URL, RequestReader
from fastdecode.server.link import Deltas, Submit, packed, parsed

SIMPLE = SimpleLines(SamplingParams())
OPENAI = OpenAILines(RequestReader({}, ("m",), True), "r1")


def simple(**said: object) -> CacheUse:
    return SIMPLE.parse(json.dumps({"id": "x", "prompt": "p", **said}).encode(), 1).cache


def completion(**said: object) -> CacheUse:
    return _posted(COMPLETIONS_URL, {"prompt": "p", **said})


def chat(**said: object) -> CacheUse:
    return _posted(CHAT_URL, {"messages": [{"role": "user", "content": "hi"}], **said})


def _posted(url: str, body: dict[str, Any]) -> CacheUse:
    line = {"custom_id": "x", "method": "POST", "url": url, "body": body}
    return OPENAI.parse(json.dumps(line).encode(), 1).cache


@pytest.mark.parametrize("said", [simple, completion, chat])
def test_lines_say_with_whom_they_share(said: Any) -> None:
    assert said() == said(cache=None, cache_salt=None) == said(cache="on") == CacheUse()
    assert said(cache="off") == CacheUse(is_off=True)
    assert said(cache_salt="tenant") == CacheUse(salt="tenant")
    for wrong, blamed in (
        ({"cache": False}, "cache"),
        ({"cache": "none"}, "cache"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
    ):
        with pytest.raises(LineError, match=f"^{blamed}") as caught:
            said(**wrong)
        assert caught.value.code == "invalid_cache" and caught.value.line_id == "x"
        assert said is simple or caught.value.param == blamed


def output(num_cached_tokens: int) -> RequestOutput:
    completions = (Completion(0, "a", (5, 6), "length"),)
    tokens = (1, 2, 3)
    return RequestOutput("x", None, tokens, completions, num_cached_tokens=num_cached_tokens)


def test_usage_counts_reused_tokens_also_when_there_are_none() -> None:
    counts = {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}
    for reused in ((0, 0), (2, 1)):
        details = {"prompt_tokens_details": {"cached_tokens": sum(reused)}}
        assert usage([output(each) for each in reused]) == {**counts, **details}
    assert "cached_tokens" not in output_fields(output(0))["usage"]
    assert output_fields(output(2))["usage"]["cached_tokens"] == 2


def test_a_servers_engine_is_told_and_tells_the_same() -> None:
    use = CacheUse(is_off=True, salt="tenant")
    asked = Submit((Request("x", (1, 2), SamplingParams(), 4, 7, use),))
    told = Deltas((Delta("x", 0, "a", (5,), finish_reason="stop", num_cached_tokens=3),))
    for message in (asked, told):
        assert parsed(packed(message)[4:]) == message
