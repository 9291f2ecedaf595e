"""Turns over HTTP: they say what ``LLM.chat`` says, come one after another, and
those that fail, or whose clients leave, change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')
pytest.importorskip("openai", reason="needs a client: pip install openai")

import openai
from server_process import CHECKPOINT, TALK, Server, model_server, scripted_server

from fastdecode.cli.main import main
from fastdecode.core.errors import FastDecodeError
from fastdecode.server.http.errors import refused

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Start a server without a model: each answer has ``max_tokens``."""
    with scripted_server("--step-s", "0.01") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=60) as client:
        yield client


def turn(client: Any, whose: str, prompt: list[int], **more: Any) -> Any:
    asked = {"model": "checkpoint", "max_tokens": 4, **more}
    extra = {"conversation_id": whose, **asked.pop("extra", {})}
    return client.completions.create(prompt=prompt, **asked, extra_body=extra)


def test_turns_streamed_and_whole_say_what_an_llm_says(tmp_path: Path) -> None:
    from fastdecode import LLM, SamplingParams

    template = tmp_path / "talk.jinja"
    template.write_text(TALK)
    said = ["My secret code is 5132.", "Do you remember it?", "And the day?"]
    messages = [[{"role": "user", "content": each}] for each in said]
    options: dict[str, Any] = {"dtype": "float32", "kv_memory_gb": 0.02, "prefix_cache": "on"}
    expected = []
    with LLM(str(CHECKPOINT), **options, block_size=16) as llm:
        for new in messages:
            params = SamplingParams(**GREEDY)
            (output,) = llm.chat([new], params, chat_template=template, conversation_id="c")
            assert output.error is None
            answered = output.completions[0].text, len(output.prompt_token_ids)
            expected.append((*answered, output.num_cached_tokens))
    assert expected[2][2] > expected[1][2] > 0
    got: dict[str, list[tuple[str, int, int]]] = {"whole": [], "streamed": []}
    words = "--chat-template", str(template), "--prefix-cache", "on", "--block-size", "16"
    with (
        model_server(*words) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=60) as client,
    ):
        for how, each in got.items():
            for place, new in enumerate(messages):
                # A cache of its own, or it would have what the other one has left.
                extra = {"conversation_id": how, "cache_salt": how}
                asked = {"model": "checkpoint", "messages": new, **GREEDY, "extra_body": extra}
                # A conversation may continue in either way.
                is_whole = (how == "whole") == (place != 2)
                each.append(_answer(client, asked, is_whole=is_whole))
    assert got == {"whole": expected, "streamed": expected}


def _answer(client: Any, asked: dict[str, Any], *, is_whole: bool) -> tuple[str, int, int]:
    """Text, tokens of the prompt, and of them those that were cached."""
    if is_whole:
        last = client.chat.completions.create(**asked)
        text = last.choices[0].message.content
    else:
        more = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.chat.completions.create(**asked, **more)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    details = last.usage.prompt_tokens_details
    return text, last.usage.prompt_tokens, 0 if details is None else details.cached_tokens


def test_turns_of_one_conversation_come_one_after_another(server: Server) -> None:
    async def ask() -> tuple[list[int], list[int]]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:
            ids = ["one"] * 5 + ["two"] * 2
            every = await asyncio.gather(*[turn(client, whose, [5, 6]) for whose in ids])
            lengths = [done.usage.prompt_tokens for done in every]
            return sorted(lengths[:5]), sorted(lengths[5:])

    # Each has all tokens of those before it: two asked, and four answered.
    assert asyncio.run(ask()) == ([2, 8, 14, 20, 26], [2, 8])


def test_a_turn_whose_client_leaves_changes_nothing(server: Server, client: Any) -> None:
    turn(client, "left", [5, 6])
    for _ in range(3):
        stream = turn(client, "left", [7, 8], max_tokens=4000, stream=True)
        next(iter(stream))
        stream.close()
        # It may arrive before the server knows that the other client has left.
        assert turn(client, "left", [7], max_tokens=1).usage.prompt_tokens % 2 == 1
    done = turn(client, "left", [9], max_tokens=1)
    assert done.usage.prompt_tokens == 6 + 3 * 2 + 1
    server.wait_until_idle()


def test_turns_that_fail_are_told_by_name_and_leave_everything_as_it_was(client: Any) -> None:
    turn(client, "f", [5, 6])
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"prompt": [5], "n": 2}, "invalid_conversation", "conversation_id"),
        ({"prompt": [[5], [6]]}, "invalid_conversation", "conversation_id"),
        ({"prompt": [5], "extra": {"conversation_id": 7}}, "invalid_conversation",
         "conversation_id"),
        ({"prompt": [5] * 4090}, "conversation_too_long", "conversation_id"),
        ({"prompt": [5, 9999]}, "invalid_token_id", "prompt"),
    ]  # fmt: skip
    for more, code, param in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            turn(client, "f", **more)
        assert (caught.value.code, caught.value.param) == (code, param)
    assert turn(client, "f", [7]).usage.prompt_tokens == 7


def test_a_turn_that_cannot_be_kept_is_told_with_the_file_and_the_reason() -> None:
    why = "can't write the conversations in cv/conversations.sqlite: No space left on device"
    shown = refused(FastDecodeError(why, code="output_failed"))
    assert (shown.status, shown.code) == (500, "conversation_not_kept") and why in str(shown)


def test_what_is_forgotten_never_begins_anew(client: Any) -> None:
    turn(client, "a/b", [5, 6])
    deleted = client.conversations.delete("a/b")
    assert (deleted.id, deleted.deleted) == ("a/b", True)
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.NotFoundError) as caught:
            turn(client, "a/b", [5, 6], **more)
        told = caught.value
        assert (told.code, told.param) == ("conversation_expired", "conversation_id")
    for whose in ("a/b", "nobody"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.conversations.delete(whose)
        assert caught.value.code == "conversation_not_found"
    assert turn(client, "nobody", [5]).usage.prompt_tokens == 1


def test_a_turn_that_is_forgotten_while_it_runs_is_answered_and_not_kept(client: Any) -> None:
    stream = iter(turn(client, "short", [5], max_tokens=40, stream=True))
    next(stream)
    client.conversations.delete("short")
    assert list(stream)[-1].choices[0].finish_reason == "length"
    with pytest.raises(openai.NotFoundError):
        turn(client, "short", [5])


def test_another_server_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept = ("--conversations", str(tmp_path / "kept"), "--max-conversations", "2")
    for expected in (2, 8):
        with (
            scripted_server(*kept) as server,
            openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client,
        ):
            assert turn(client, "c", [5, 6]).usage.prompt_tokens == expected
            for whose in ("d", "e") if expected == 8 else ():
                turn(client, whose, [5])
            if expected == 8:
                # Of three, the one that was idle for longest is over.
                with pytest.raises(openai.NotFoundError, match="conversation is over"):
                    turn(client, "c", [5, 6])
                assert main(["serve", str(CHECKPOINT), "--port", "0", *kept]) == 2
    assert "another process keeps conversations" in capfd.readouterr().err


def test_a_turn_that_reuses_nothing_is_answered_with_a_warning() -> None:
    asked = {"prompt": [5, 6], "max_tokens": 2}
    with model_server("--prefix-cache", "off") as server:
        for more in ({}, {"stream": True}):
            body = {**asked, **more, "conversation_id": "c"}
            status, headers, _ = server.ask("POST", "/v1/completions", body)
            assert status == 200 and "prefix_cache is off" in headers["x-fastdecode-warning"]
        assert "x-fastdecode-warning" not in server.ask("POST", "/v1/completions", asked)[1]
