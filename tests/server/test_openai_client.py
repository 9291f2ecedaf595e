"""The ``openai`` package against a real server around the demo model; streams
say what whole answers and batch jobs say."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')
pytest.importorskip("openai", reason="needs a client: pip install openai")

import openai
from server_process import CHECKPOINT, TALK, Server, events, model_server

PROMPTS = [
    "Once upon a time",
    "The old map showed",
    "Mirorin: My best friend is",
    [5, 6, 7],
    "é 你好 😀",
]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "talk.jinja"
    path.write_text(TALK)
    return path


@pytest.fixture(scope="module")
def server(template: Path) -> Iterator[Server]:
    options = ("--chat-template", str(template), "--served-model-name", "<img src=x>")
    with model_server(*options, "--served-model-name", "demo", "--prefix-cache", "on") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=60) as client:
        yield client


def test_models(client: Any) -> None:
    first, second = client.models.list().data
    assert (first.id, second.id) == ("<img src=x>", "demo")
    assert first.root == str(CHECKPOINT) and first.max_model_len == 1024
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completions(client: Any) -> None:
    asked = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    done = client.completions.create(**asked)
    assert done.object == "text_completion" and done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 8 and done.usage.total_tokens == 17
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == done.choices[0].text
    assert all(chunk.usage is None for chunk in chunks)
    three = client.completions.create(**{**asked, "temperature": 1}, n=3, seed=4)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    again = client.completions.create(**{**asked, "temperature": 1}, n=3, seed=4)
    assert [c.text for c in again.choices] == [c.text for c in three.choices]
    both = client.completions.create(**{**asked, "prompt": ["Once upon a time", "x"]})
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == done.choices[0].text


@pytest.mark.parametrize("streams", [False, True])
def test_without_text_there_are_token_ids(client: Any, streams: bool) -> None:
    asked = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}
    ids = client.completions.create(**asked, extra_body={"return_token_ids": True})
    asked["logprobs"] = 0
    said = client.completions.create(**asked, stream=streams, extra_body={"detokenize": False})
    choices = [chunk.choices[0] for chunk in said] if streams else said.choices
    assert "".join(choice.text for choice in choices) == ""
    assert [token for choice in choices for token in choice.token_ids] == ids.choices[0].token_ids
    assert [len(choice.token_ids) for choice in choices] == [
        len(choice.logprobs.tokens) for choice in choices
    ], "no log-probability waits for text"


def test_chats(client: Any) -> None:
    messages = [{"role": "user", "content": "My secret code is 5132. Do you remember it?"}]
    asked = {
        "model": "demo", "messages": messages, "max_completion_tokens": 12, "temperature": 0,
        "logprobs": True, "top_logprobs": 2, "stop": ["\n"],
    }  # fmt: skip
    done = client.chat.completions.create(**asked)
    assert done.choices[0].message.role == "assistant"
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    *told, last = chunks
    assert last.choices == [] and last.usage == done.usage
    deltas = [chunk.choices[0].delta for chunk in told]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    text = "".join(delta.content or "" for delta in deltas)
    assert text == done.choices[0].message.content
    steps = [step for chunk in told for step in (chunk.choices[0].logprobs or _NONE).content]
    assert steps == done.choices[0].logprobs.content
    assert told[-1].choices[0].finish_reason == done.choices[0].finish_reason


class _NONE:
    content: tuple[Any, ...] = ()


def test_tokens_that_are_banned_or_forced(client: Any) -> None:
    asked = {"model": "demo", "prompt": [5, 6], "max_tokens": 3, "temperature": 0}
    forced = client.completions.create(
        **asked, logit_bias={"700": 100}, extra_body={"return_token_ids": True}
    )
    assert forced.choices[0].token_ids == [700] * 3
    banned = client.completions.create(**asked, logit_bias={"700": 100, "701": -100}, logprobs=2)
    assert len(banned.choices[0].logprobs.tokens) == 3


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"temperature": 7e9}, "BadRequestError"),
        ({"model": "gpt-5"}, "NotFoundError"),
        ({"prompt": "x " * 3000}, "BadRequestError"),
        ({"extra_body": {"guided_json": {"type": "objct"}}}, "BadRequestError"),
    ],
)
def test_errors_are_the_clients_own(client: Any, more: dict[str, Any], error: str) -> None:
    with pytest.raises(getattr(openai, error)) as caught:
        client.completions.create(**{"model": "demo", "prompt": "x", **more})
    assert caught.value.request_id.startswith("req_") and caught.value.code


def test_the_asynchronous_client_and_streams_that_are_closed(server: Server) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:
            asked = {"model": "demo", "prompt": "Once", "max_tokens": 900, "stream": True}
            streams = await asyncio.gather(
                *[client.completions.create(**asked, extra_body={"ignore_eos": True})
                  for _ in range(4)]
            )  # fmt: skip
            for stream in streams:
                async for _ in stream:
                    break
                await stream.close()
            done = await client.completions.create(model="demo", prompt="Once", max_tokens=2)
            return str(done.choices[0].finish_reason)

    assert asyncio.run(ask()) == "length"
    server.wait_until_idle()


def test_usage_in_every_chunk(server: Server) -> None:
    said = events(
        server.ask("POST", "/v1/completions", {
            "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "stream": True,
            "stream_options": {"continuous_usage_stats": True},
        })[2]
    )  # fmt: skip
    told = [chunk["usage"]["completion_tokens"] for chunk in said[:-1]]
    # Tokens that come faster than they are read come together.
    assert told == sorted(set(told)) and told[-1] == 4


def _bodies(num: int) -> list[dict[str, Any]]:
    """Random requests for completions; all have a seed."""
    random_ = random.Random(7)
    bodies = []
    for seed in range(num):
        body: dict[str, Any] = {
            "prompt": random_.choice(PROMPTS),
            "max_tokens": random_.choice((1, 3, 12)),
            "seed": seed,
            "n": random_.choice((1, 1, 3)),
            "temperature": random_.choice((0, 1, 1.7)),
            "ignore_eos": random_.random() < 0.5,
            "logprobs": random_.choice((None, None, 0, 2)),
            "stop": random_.choice((None, ["e t", "th", " a"], [".", "re "], "\n", ["é", "ing a"])),
        }
        bodies.append({name: value for name, value in body.items() if value is not None})
    return bodies


def _joined(said: list[Any], n: int) -> list[dict[str, Any]]:
    """The choices that chunks add up to."""
    choices: list[dict[str, Any]] = [
        {"index": i, "text": "", "logprobs": None, "finish_reason": None} for i in range(n)
    ]
    assert said[-1] == "[DONE]"
    for chunk in said[:-1]:
        for part in chunk["choices"]:
            choice = choices[part["index"]]
            assert choice["finish_reason"] is None, "nothing follows a choice's end"
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
            if "stop_reason" in part:
                choice["stop_reason"] = part["stop_reason"]
            if part["logprobs"] is not None:
                so_far = choice["logprobs"] or {name: [] for name in part["logprobs"]}
                choice["logprobs"] = {
                    name: so_far[name] + more for name, more in part["logprobs"].items()
                }
    return choices


def rounded(said: Any) -> Any:
    """Other batches round otherwise, in the last digits of log-probabilities."""
    if isinstance(said, float):
        return round(said, 3)
    if isinstance(said, dict):
        return {name: rounded(value) for name, value in said.items()}
    return [rounded(value) for value in said] if isinstance(said, list) else said


def test_streams_whole_answers_and_batch_jobs_say_the_same(server: Server, tmp_path: Path) -> None:
    from fastdecode.cli.main import main

    bodies = _bodies(24)
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["run-batch", "--model", str(CHECKPOINT), "-i", str(source), "-o", str(output)]
    assert main([*command, "--dtype", "float32", "--kv-memory-gb", "0.02"]) == 0
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    batch = {int(answer["custom_id"]): answer["response"]["body"] for answer in answers}
    for i, body in enumerate(bodies):
        status, whole = server.complete(**body)
        said = events(server.ask("POST", "/v1/completions", {**body, "stream": True})[2])
        assert status == 200
        assert rounded(whole["choices"]) == rounded(batch[i]["choices"])
        assert whole["usage"] == batch[i]["usage"]
        assert rounded(_joined(said, body.get("n", 1))) == rounded(whole["choices"]), body


NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_preemptions_total",
    "vllm:request_time_per_output_token_seconds_count", "vllm:request_prompt_tokens_sum",
    "fastdecode:r_workers", "fastdecode:r_worker_kv_blocks", "fastdecode:r_worker_load_tokens",
    "fastdecode:lanes", "fastdecode:s_busy_seconds_total", "fastdecode:s_wait_seconds_total",
    "fastdecode:recomputed_sequences_total", "fastdecode:rejected_requests_total",
    "fastdecode:aborted_requests_total",
}  # fmt: skip


def test_metrics_add_up(server: Server) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    server.wait_until_idle()

    def values() -> dict[str, float]:
        text = server.ask("GET", "/metrics")[2].decode()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        sums: dict[str, float] = {}
        for sample in samples:
            if "le" not in sample.labels:
                sums[sample.name] = sums.get(sample.name, 0) + sample.value
        return sums

    before = values()
    usages = []
    for i in range(5):
        body = {
            "prompt": [[5] * (i + 1), [6]],
            "max_tokens": i + 1,
            "n": 1 + i % 2,
            "ignore_eos": True,
        }
        usages.append(server.complete(**body)[1]["usage"])
        more = {"stream": True, "stream_options": {"include_usage": True}}
        said = events(server.ask("POST", "/v1/completions", {**body, **more})[2])
        assert all(chunk["usage"] is None for chunk in said[:-2]), "as OpenAI's API has it"
        usages.append(said[-2]["usage"])
        assert usages[-1] == usages[-2]
    server.wait_until_idle()  # KV blocks are as of the last report
    after = values()

    def gained(name: str) -> float:
        return after[name] - before[name]

    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    total = {name: sum(usage[name] for usage in usages) for name in names}
    assert gained("vllm:generation_tokens_total") == total["completion_tokens"]
    assert gained("vllm:prompt_tokens_total") == total["prompt_tokens"]
    assert gained("vllm:request_success_total") == 10
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert gained(f"vllm:{name}_count") == 10
    assert gained("vllm:request_generation_tokens_sum") == total["completion_tokens"]
    assert after["vllm:kv_cache_usage_perc"] == 0
    num_gaps = total["completion_tokens"] - 2 * sum(2 * (1 + i % 2) for i in range(5))
    # Tokens that arrive with the first one have no latency of their own.
    assert 0 < gained("vllm:inter_token_latency_seconds_count") <= num_gaps
    assert set(after) >= NAMES


def test_what_was_cached_is_told_and_only_shared_with_who_has_the_same_salt(
    server: Server, client: Any
) -> None:
    """The cache keeps whole blocks, of 64 tokens."""
    asked = {
        "model": "demo", "prompt": [9 + i % 50 for i in range(150)], "max_tokens": 3,
        "temperature": 0,
    }  # fmt: skip

    def cached(**extra: Any) -> tuple[str, int]:
        done = client.completions.create(**asked, extra_body=extra)
        assert done.usage.prompt_tokens == 150
        details = done.usage.prompt_tokens_details
        return done.choices[0].text, 0 if details is None else details.cached_tokens

    text, num_cached = cached()
    assert num_cached == 0
    for extra, expected in (
        ({}, 128),
        ({"cache_salt": "tenant-1"}, 0),
        ({"cache_salt": "tenant-1"}, 128),
        ({"cache_salt": "tenant-2"}, 0),
        ({"cache": "off"}, 0),
        ({"cache_salt": None, "cache": "on"}, 128),
    ):
        assert cached(**extra) == (text, expected), extra
    *_, last = client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage.prompt_tokens_details.cached_tokens == 128
    for extra, param in (({"cache_salt": 7}, "cache_salt"), ({"cache": "maybe"}, "cache")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**asked, extra_body=extra)
        assert caught.value.param == param


def test_tokens_and_text(server: Server) -> None:
    status, said = server.post("/tokenize", {"prompt": "Once upon a time"})
    assert (status, said["count"]) == (200, len(said["tokens"])) and said["max_model_len"] == 1024
    status, text = server.post("/detokenize", {"tokens": said["tokens"]})
    assert (status, text) == (200, {"prompt": "Once upon a time"})
    chat = {"messages": [{"role": "user", "content": "x"}], "return_token_strs": True}
    status, said = server.post("/tokenize", chat)
    assert status == 200 and said["token_strs"][0] == "<|begin|>"


def test_chats_without_max_tokens_run_together_where_few_whole_contexts_fit(template: Path) -> None:
    """Room for 4 contexts of 1024 tokens: 64 blocks of 64."""
    block_bytes = 64 * 6 * 2 * 2 * 32 * 4
    options = ("--kv-memory-gb", str(64.5 * block_bytes / 1e9), "--chat-template", str(template))
    with model_server(*options) as server:
        assert server.status()["num_live_r_workers"] == 1
        body = {"messages": [{"role": "user", "content": "Tell me"}], "ignore_eos": True}
        chat = json.dumps({**body, "stop": ["never said"], "stream": True}).encode()
        open_connections = []
        for _ in range(8):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", chat, headers)
            open_connections.append(connection)
        server.wait_until(lambda: server.status()["num_running"] == 8)
        for connection in open_connections:
            connection.close()
        server.wait_until_idle()
        assert server.status()["num_rejected"] == 0
