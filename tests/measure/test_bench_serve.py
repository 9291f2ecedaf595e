"""``fastdecode bench-serve``: loads, figures, and runs against a server whose
delays are scripted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason='needs the client: pip install ".[bench]"')

from cost_model.goodput.slo import Slo
from fastdecode.cli.main import main
from fastdecode.core.errors import ConfigError
from fastdecode.measure.serving.client import Endpoint, Record, run_closed
from fastdecode.measure.serving.load import LoadShape, arriving, closed, traced
from fastdecode.measure.serving.report import as_text, find_goodput, report

SHAPE = LoadShape(num_requests=4000, prompt_tokens=5, output_tokens=7)


def test_loads_are_what_was_asked_and_the_same_again() -> None:
    load = arriving(SHAPE, rate=20.0)
    assert load == arriving(SHAPE, rate=20.0)
    assert load[-1].due_s == pytest.approx(200, rel=0.1)
    faster = arriving(SHAPE, rate=40.0)
    assert [each.due_s for each in faster] == pytest.approx([each.due_s / 2 for each in load])
    clock = arriving(SHAPE, rate=10.0, cv=0.0)
    assert clock[10].due_s == pytest.approx(1.0)
    for cv in (1.0, 3.0):
        due = [each.due_s for each in arriving(SHAPE, rate=10.0, cv=cv)]
        gaps = [later - earlier for earlier, later in itertools.pairwise(due)]
        assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.15)
    wide = closed(LoadShape(4000, 100, 50, spread=0.5, seed=3))
    lengths = [len(each.prompt) for each in wide]
    assert sum(lengths) / 4000 == pytest.approx(100, rel=0.1) and len(set(lengths)) > 50
    assert all(10 <= token < 1000 for token in wide[0].prompt)


def test_a_request_log_is_a_load(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    line = {"time": 100.5, "prompt_tokens": 3, "output_tokens": 2, "status": 200}
    lines = [{**line, "time": 102.5}, line, {"time": 101, "status": 400}]
    log.write_text("".join(json.dumps(each) + "\n" for each in lines))
    load = traced(log, SHAPE, speed=2.0)
    assert [each.due_s for each in load] == [0.0, 1.0] and load[0].output_tokens == 2
    for bad in ("[]\n", '{"output_tokens": 3}\n', "", "x\n"):
        log.write_text(bad)
        with pytest.raises(ConfigError, match="--trace"):
            traced(log, SHAPE)


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Where ``scripted`` answers, from a thread of its own."""
    address: Future[str] = Future()
    over = threading.Event()

    async def run() -> None:
        server = await asyncio.start_server(scripted, "127.0.0.1", 0)
        async with server:
            address.set_result(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            await asyncio.get_running_loop().run_in_executor(None, over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield address.result(30)
    finally:
        over.set()
        thread.join()


def test_the_command_runs_loads_of_every_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, figures = tmp_path / "log.jsonl", tmp_path / "figures.json"
    line = {"time": 100.0, "prompt_tokens": 3, "output_tokens": 3}
    log.write_text("".join(json.dumps({**line, "time": i / 100}) + "\n" for i in range(7)))
    slo = ["--slo", "ttft=60s,tpot=60s"]
    with serving() as url:
        for options, num in (
            (["--concurrency", "2", "--requests", "5", "--spread", "0.5"], 5),
            (["--rate", "500", "--cv", "3", "--requests", "5", *slo], 5),
            (["--trace", str(log), "--speed", "10", *slo], 7),
            (["--trace", str(log), "--requests", "2"], 2),
        ):
            files = ["--json", str(figures)]
            assert main(["bench-serve", "--base-url", url, *files, *options]) == 0
            told_of = json.loads(figures.read_text())
            assert (told_of["answered"], told_of["output_tokens"]) == (num, 3 * num)
            assert told_of["without_usage"] == 0 and told_of["tpot_s"]["mean"] > 0
            assert told_of.get("attainment") == (1.0 if slo[0] in options else None)
        never = ["--rate", "500", "--find-goodput", "--slo", "ttft=0.001ms", "--requests", "2"]
        assert main(["bench-serve", "--base-url", url, "--json", str(figures), *never]) == 0
        assert json.loads(figures.read_text())["greatest_rate"] == 0
        lost = ["--requests", "1", "--json", str(tmp_path / "nowhere" / "figures.json")]
        said = capsys.readouterr()
        assert main(["bench-serve", "--base-url", url, *lost]) == 2
        assert "1 of 1 requests answered" in capsys.readouterr().out, "what took hours isn't lost"
    assert "0.0% kept the SLO" in said.err
    assert "no rate was found at which 90.0% of requests keep the SLO" in said.out


def test_the_client_says_when_it_was_the_limit() -> None:
    on_time = [Record(1.0, 1.002, [1.1, 1.2], 4, 2) for _ in range(99)]
    late = [*on_time, *[Record(1.0, 1.03, [1.1, 1.2], 4, 2) for _ in range(3)]]
    assert not report(on_time, None)["client_was_the_limit"]
    figures = report(late, None)
    assert figures["client_was_the_limit"] and figures["client_lag_s"]["p99"] == pytest.approx(0.03)
    assert "the client itself was the limit: it sent 30 ms late (p99)" in as_text(figures)


def record(ttft_s: float, tpot_s: float, num: int = 3, error: str | None = None) -> Record:
    chunks = [1.0 + ttft_s + tpot_s * i for i in range(num)]
    return Record(1.0, 1.0, chunks, 4, num, error)


def test_figures_and_goodput() -> None:
    records = [record(0.1, 0.01), record(0.3, 0.02), record(0.1, 0.05), record(0, 0, 1, "x")]
    slo = Slo.parse("ttft=200ms,tpot=0.03s")
    figures = report(records, slo)
    assert (figures["answered"], figures["errors"]) == (3, {"x": 1})
    assert figures["attainment"] == 0.25 and not figures["client_was_the_limit"]
    assert figures["ttft_s"]["p50"] == pytest.approx(0.1)
    assert figures["tpot_s"]["p99"] == pytest.approx(0.05)
    assert figures["output_tokens"] == 9 and figures["itl_s"]["mean"] == pytest.approx(0.08 / 3)


@pytest.mark.parametrize("limit", [0.07, 3.3, 47.0])
def test_the_greatest_good_rate_is_found(limit: float) -> None:
    def measure(rate: float) -> dict[str, Any]:
        return {"attainment": float(rate <= limit), "client_was_the_limit": False}

    def alone() -> dict[str, Any]:
        return measure(0)

    rate, figures = find_goodput(measure, alone, 2.0, 0.9, lambda text: None)
    assert limit * 0.97 <= rate <= limit and figures is not None
    rates, bad = list[float](), {"attainment": 0.5, "client_was_the_limit": False}

    def never(rate: float) -> dict[str, Any]:
        rates.append(rate)
        return bad

    assert find_goodput(never, alone, 2.0, 0.9, print) == (0.0, None)
    rates.clear()
    assert find_goodput(never, lambda: bad, 2.0, 0.9, print) == (0.0, bad)
    assert rates == [2.0], "a hundred requests at a thousandth of a rate take a day"


def test_several_prompts_and_choices_of_a_log_are_requests_of_their_own(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    line = {"time": 7, "prompt_tokens": 40, "output_tokens": 48, "n": 3, "prompts": 4}
    log.write_text(json.dumps(line) + "\n")
    load = traced(log, SHAPE)
    assert [(len(each.prompt), each.output_tokens) for each in load] == [(10, 4)] * 12
    for bad in (0, 1 << 60, "x"):
        log.write_text(json.dumps({**line, "n": bad}) + "\n")
        with pytest.raises(ConfigError, match=r"line 1: .*`\$\.n`|choices"):
            traced(log, SHAPE)


async def scripted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Three tokens for every request; a model called m."""
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    if head.startswith(b"GET"):
        writer.write(b'{"data": [{"id": "m"}]}')
    else:
        for _ in range(3):
            writer.write(b'data: {"choices": [{"text": "x"}], "usage": null}\n\n')
            await writer.drain()
        writer.write(b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n')
        writer.write(b"data: [DONE]\n\n")
    await writer.drain()
    writer.close()


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def ran_against(raw: bytes, *, hangs: bool = False, key: str | None = None) -> tuple[Record, str]:
    """What becomes of a request that is answered with these bytes, and of the question for a
    model."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        if hangs:
            await reader.read()  # until the client has gone
        writer.close()

    async def run() -> tuple[Record, str]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        endpoint = Endpoint(f"http://127.0.0.1:{port}", key, 0.3 if hangs else 30.0)
        (record,) = await run_closed(endpoint, "m", closed(LoadShape(1, 3, 2)), 1)
        try:
            model = await endpoint.model()
        except ConfigError as error:
            model = str(error)
        server.close()
        await server.wait_closed()
        return record, model

    return asyncio.run(run())


@pytest.mark.parametrize("num_answers", [100, 1])
def test_connections_are_used_again_and_may_be_closed_between(num_answers: int) -> None:
    """By a server that answers so many requests over each."""
    opened = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        for _ in range(num_answers):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
            writer.write(chunked(b'data: {"choices": [{"text": "x"}]}\n\n', b"data: [DONE]\n\n"))
        await reader.read(1)  # it is asked once more
        writer.close()

    async def run() -> list[Record]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            endpoint = Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            return await run_closed(endpoint, "m", closed(LoadShape(20, 5, 3)), 2)

    records = asyncio.run(run())
    assert [record.error for record in records] == [None] * 20
    assert len(opened) == 2 if num_answers > 20 else len(opened) >= 20


def test_chunks_of_http_end_where_they_like_and_are_tokens_where_none_are_counted() -> None:
    event = b'data: {"choices": [{"text": "10"}]}\n\n'
    parts = event[:9], event[9:] + event[:-1], b"\n", b"data: [DONE]\n\n"
    record, _ = ran_against(chunked(*parts))
    assert (record.error, record.num_tokens, len(record.chunk_s)) == (None, 2, 2)
    assert record.tpot_s is not None and not record.has_usage
    figures = report([record], Slo.parse("tpot=30s", needs_both=False))
    assert (figures["without_usage"], figures["attainment"]) == (1, 1.0)
    assert "answers without usage: 1;" in as_text(figures)


@pytest.mark.parametrize(
    ("raw", "kind", "message"),
    [
        (b"HTTP/1.1 401 No\r\n\r\n" + b'{"error": {"message": "a key"}}', "status 401",
         "401: a key (set OPENAI_API_KEY)"),
        (b"HTTP/1.1 404 No\r\ncontent-length: 3\r\n\r\nno\x1b", "status 404", "404: no?"),
        (chunked(b'data: {"error": {"message": "gone"}}\n\n'), "error event", "gone"),
        (chunked(b"data: [1]\n\n"), "malformed", "ValueError: an event is no JSON object"),
        (chunked(b'data: {"usage": {"x": 1}}\n\n'), "malformed", "KeyError: 'completion_tokens'"),
        (chunked(b'data: {"choices": [1]}\n\n'), "cut off", ""),
        (HEAD + b"ff\r\nabc", "cut off", ""),
        (b"220 mail.example ESMTP\r\n", "malformed", "ClientResponseError: 400, message="),
    ],
)  # fmt: skip
def test_servers_that_err_are_quoted(raw: bytes, kind: str, message: str) -> None:
    record, _ = ran_against(raw)
    assert record.error == kind and record.message.startswith(message)
    text = as_text(report([record], None))
    assert f"errors: {kind}: 1" in text and message in text


def test_a_server_that_says_nothing_is_given_up() -> None:
    record, model = ran_against(b"", hangs=True)
    assert record.error == "timeout" and "--timeout-s" in record.message
    assert "it doesn't answer" in model


def test_the_question_for_a_model_says_what_is_wrong() -> None:
    raw = b"HTTP/1.1 401 No\r\n\r\n" + b'{"error": {"message": "a key"}}'
    assert "401: a key (set OPENAI_API_KEY)" in ran_against(raw)[1]
    for none in (b'{"data": []}', b"[]"):
        assert "Is this a server" in ran_against(chunked(none))[1]
    assert ran_against(chunked(b'{"data": [{"i', b'd": "m"}]}'))[1] == "m"
    many = json.dumps({"data": [{"id": f"model-{i}"} for i in range(400)]}).encode()
    pieces = [many[i : i + 900] for i in range(0, len(many), 900)]
    assert ran_against(chunked(*pieces))[1] == "model-0"


def test_options_that_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["bench-serve", "--base-url"]
    for words, match in (
        *(([*base, url], "--base-url") for url in ("ftp://h", "http://[::1", "http://h:99999")),
        ([*base, "http://127.0.0.1:1"], "nothing answers at 127.0.0.1:1: Connection refused"),
        (
            [*base, "http://127.0.0.1:1", "--model", "m"],
            "nothing answers at 127.0.0.1:1: Connection refused",
        ),
        ([*base, "http://x", "--timeout-s", "0"], "--timeout-s"),
        ([*base, "http://x", "--rate", "-1"], "--rate"),
        ([*base, "http://x", "--find-goodput"], "--find-goodput needs"),
        ([*base, "http://x", "--cv", "2"], "--cv changes nothing without --rate"),
        ([*base, "http://x", "--rate", "2", "--speed", "2"], "nothing without --trace"),
        ([*base, "http://x", "--trace", "f", "--output-tokens", "2"], "nothing with --trace"),
    ):
        assert main(words) == 2
        assert match in capsys.readouterr().err
