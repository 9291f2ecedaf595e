"""Health that tells the truth, ends of a server of every kind, clients that go
away, queues that are full: each produced in truth, with real processes."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from server_process import Server, events, scripted_server

LONG = 4000
BREAKS, HANGS, NEVER_FITS, IS_WORDY = 1000, 1001, 1002, 1003
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


class Stream:
    """A stream that is being read."""

    def __init__(self, server: Server, **body: Any) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        said = {"prompt": [1, 2], "max_tokens": LONG, "stream": True, **body}
        headers = {"content-type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(said).encode(), headers)
        self.answer = self._connection.getresponse()

    def first(self) -> Any:
        return events(self.answer.readline() + b"\n" + self.answer.readline())[0]

    def rest(self) -> list[Any]:
        return events(self.answer.read())

    def leave(self) -> None:
        self._connection.close()
        self.answer.close()


def health(server: Server) -> tuple[int, str | None]:
    status, _, raw = server.ask("GET", "/health")
    return status, json.loads(raw).get("reason")


def test_it_starts_and_is_ready_only_then() -> None:
    with scripted_server("--never-ready", is_ready=False) as server:
        assert health(server) == (503, "starting")
        assert server.ask("GET", "/live")[0] == 200
        status, headers, raw = server.ask("POST", "/v1/completions", {"prompt": [1]})
        assert status == 503 and int(headers["retry-after"]) >= 1
        error = json.loads(raw)["error"]
        assert error["code"] == "starting" and "still loading" in error["message"]


def test_an_engine_that_is_stopped_is_stalled_and_comes_back() -> None:
    with scripted_server("--stall-s", "1") as server:
        engine = server.process("engine")
        engine.suspend()
        server.wait_until(lambda: health(server) == (503, "stalled"))
        engine.resume()
        server.wait_until(lambda: health(server) == (200, None))


def test_a_step_that_never_ends_is_a_stall() -> None:
    with scripted_server("--stall-s", "1") as server:
        stream = Stream(server)
        stream.first()
        server.wait_until(lambda: server.status()["state"] == "ready")
        hanging = socket.create_connection(("127.0.0.1", server.port))
        body = json.dumps({"prompt": [HANGS]}).encode()
        hanging.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
            b"\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        server.wait_until(lambda: health(server) == (503, "stalled"))
        assert server.complete(prompt=[1])[1]["error"]["code"] == "stalled"


def test_an_engine_that_breaks_down_ends_all_streams_and_the_server() -> None:
    with scripted_server() as server:
        streams = [Stream(server) for _ in range(3)]
        for stream in streams:
            stream.first()
        status, said = server.complete(prompt=[BREAKS])
        assert (status, said["error"]["type"]) == (500, "server_error")
        assert said["error"]["code"] == "engine_failed"
        assert "4711" not in json.dumps(said)
        for stream in streams:
            *_, last = stream.rest()
            assert last["error"]["message"] == "the engine has failed", "and no [DONE]"
        outcome = server.job.wait(120, grace_s=30)
        assert (outcome.exit_code, outcome.orphans) == (4, [])
        assert "4711" not in outcome.output


@pytest.mark.parametrize(("killed", "code"), [("engine", -signal.SIGKILL), ("http", 5)])
def test_either_process_is_killed(killed: str, code: int) -> None:
    with scripted_server() as server:
        stream = Stream(server)
        stream.first()
        server.process(killed).kill()
        if killed == "engine":
            assert stream.rest()[-1]["error"]["type"] == "server_error"
        else:
            with pytest.raises((http.client.HTTPException, OSError)):
                stream.rest()
        outcome = server.job.wait(120, grace_s=30)
        assert (outcome.exit_code, outcome.orphans) == (code, [])


def test_a_drain_finishes_what_runs() -> None:
    with scripted_server("--step-s", "0.02") as server:
        stream = Stream(server, max_tokens=150)
        stream.first()
        server.process("engine").terminate()
        server.wait_until(lambda: health(server) == (503, "draining"))
        status, headers, _ = server.ask("POST", "/v1/completions", {"prompt": [1]})
        assert status == 503 and int(headers["retry-after"]) >= 1
        said = stream.rest()
        assert said[-1] == "[DONE]" and said[-2]["choices"][0]["finish_reason"] == "length"
        outcome = server.job.wait(120, grace_s=30)
        assert (outcome.exit_code, outcome.orphans) == (0, [])
        assert "ended; all running requests were answered" in outcome.output


@pytest.mark.parametrize("second", [False, True])
def test_a_drain_that_takes_too_long_cuts(second: bool) -> None:
    timeout_s = "60" if second else "0.3"
    with scripted_server("--drain-timeout-s", timeout_s, "--step-s", "0.05") as server:
        stream = Stream(server)
        stream.first()
        engine = server.process("engine")
        engine.terminate()
        if second:
            server.wait_until(lambda: health(server) == (503, "draining"))
            engine.terminate()
        assert stream.rest()[-1]["error"]["code"] == "draining"
        outcome = server.job.wait(120, grace_s=30)
        assert outcome.exit_code == 3 and "ended; 1 request was cut off" in outcome.output


def half(server: Server) -> socket.socket:
    """A connection over which half a body has come."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
    return connection


def test_a_body_that_never_ends_neither_delays_a_drain_nor_hides_what_is_cut() -> None:
    with scripted_server("--drain-timeout-s", "0.3", "--step-s", "0.05") as server, half(server):
        stream = Stream(server)
        stream.first()
        server.process("engine").terminate()
        assert stream.rest()[-1]["error"]["code"] == "draining"
        assert server.job.wait(120, grace_s=30).exit_code == 3
    with scripted_server("--drain-timeout-s", "600") as server, half(server):
        server.process("engine").terminate()
        outcome = server.job.wait(120, grace_s=30)
    assert (outcome.exit_code, outcome.orphans) == (0, [])
    assert "Traceback" not in outcome.output


def test_an_http_process_that_is_stopped_holds_up_no_end() -> None:
    """More waits for it than their socket takes."""
    with scripted_server("--drain-timeout-s", "0.3", "--step-s", "0.02") as server:
        stream = Stream(server, prompt=[IS_WORDY], n=64)
        stream.first()
        server.process("http").suspend()
        server.process("engine").terminate()
        outcome = server.job.wait(120, grace_s=30)
    assert (outcome.exit_code, outcome.orphans) == (3, [])


def test_an_http_process_that_is_stopped_costs_its_requests_and_comes_back() -> None:
    with scripted_server("--write-timeout-s", "1", "--step-s", "0.05") as server:
        stream = Stream(server)
        stream.first()
        http_process = server.process("http")
        http_process.suspend()
        said = "the HTTP process has read nothing for 1 s: its requests are cancelled"
        server.wait_until(lambda: said in server.job.output())
        http_process.resume()
        assert stream.rest()[-1]["error"]["code"] == "http_stopped"
        server.wait_until(lambda: "the HTTP process reads again" in server.job.output())
        server.wait_until_idle()
        assert server.complete(prompt=[1], max_tokens=3)[0] == 200
        assert health(server) == (200, None)


@pytest.fixture(scope="module")
def slow_server() -> Iterator[Server]:
    """Two run at once; the others wait."""
    limits = ("--max-queued-requests", "2", "--width", "2", "--step-s", "0.01")
    with scripted_server(*limits) as server:
        yield server


@pytest.mark.parametrize("stage", ["header", "body", "waiting", "first", "decoding", "unread"])
@pytest.mark.parametrize("is_stream", [True, False])
def test_whoever_leaves_frees_what_he_held(
    slow_server: Server, stage: str, is_stream: bool
) -> None:
    slow_server.wait_until_idle()
    held = []
    if stage == "waiting":
        held = [Stream(slow_server) for _ in range(2)]
        for stream in held:
            stream.first()
    body = json.dumps({"prompt": [1], "max_tokens": LONG, "stream": is_stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    whole = head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    kept = {"header": len(head) - 5, "body": len(whole) - 5}.get(stage, len(whole))
    with socket.create_connection(("127.0.0.1", slow_server.port), timeout=120) as connection:
        connection.sendall(whole[:kept])
        if kept == len(whole):
            tokens = slow_server.status()["generation_tokens"]
            slow_server.wait_until(lambda: slow_server.status()["num_open"] == 1 + len(held))
            if stage != "waiting":
                wanted = {"first": 1, "decoding": 20, "unread": 60}[stage] + tokens
                slow_server.wait_until(lambda: slow_server.status()["generation_tokens"] >= wanted)
            if is_stream and stage in ("first", "decoding"):
                assert connection.recv(10)
    for stream in held:
        stream.leave()
    slow_server.wait_until_idle()


def test_a_prompt_that_cannot_be_answered_ends_the_others_of_its_body(slow_server: Server) -> None:
    slow_server.wait_until_idle()
    status, said = slow_server.complete(prompt=[[5], [NEVER_FITS]], max_tokens=LONG)
    assert (status, said["error"]["message"]) == (400, "it could never fit")
    slow_server.wait_until_idle()


def test_sequences_are_counted_not_bodies(slow_server: Server) -> None:
    """Each of them waits for its own first token."""
    slow_server.wait_until_idle()
    stream = Stream(slow_server, n=4)
    stream.first()
    assert slow_server.status()["num_queued"] == 4, "two run, and two haven't begun"
    status, said = slow_server.complete(prompt=[1], max_tokens=1)
    assert (status, said["error"]["code"]) == (429, "rate_limit_exceeded")
    status, said = slow_server.complete(prompt=[[1]] * 100, n=100)
    assert (status, said["error"]["code"]) == (400, "too_many_sequences")
    stream.leave()
    slow_server.wait_until_idle()


def _client(server: Server) -> Any:
    openai = pytest.importorskip("openai", reason="needs a client: pip install openai")
    return openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)


def test_a_full_queue_says_when_to_come_again(slow_server: Server) -> None:
    slow_server.wait_until_idle()
    streams = [Stream(slow_server) for _ in range(2)]
    for stream in streams:
        stream.first()
    connections = []
    for num_queued in (1, 2):
        connection = http.client.HTTPConnection("127.0.0.1", slow_server.port, timeout=120)
        body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        connections.append(connection)
        slow_server.wait_until(lambda num=num_queued: slow_server.status()["num_queued"] == num)
    status, headers, raw = slow_server.ask("POST", "/v1/completions", {"prompt": [1]})
    assert (status, json.loads(raw)["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(headers["retry-after"]) <= 60
    assert slow_server.complete(prompt=[1] * 5000)[0] == 400, "what never fits isn't put off"
    refused = slow_server.status()["num_rejected"]
    with concurrent.futures.ThreadPoolExecutor(1) as threads, _client(slow_server) as client:
        asked = {"model": "checkpoint", "prompt": [1], "max_tokens": 1}
        with pytest.raises(sys.modules["openai"].RateLimitError):
            client.completions.create(**asked)
        again = threads.submit(client.with_options(max_retries=20).completions.create, **asked)
        slow_server.wait_until(lambda: slow_server.status()["num_rejected"] >= refused + 2)
        for stream in streams:
            stream.leave()
        assert again.result(120).usage.completion_tokens == 1, "it was told when to try again"
    assert [connection.getresponse().status for connection in connections] == [200, 200]
    assert slow_server.complete(prompt=[1], max_tokens=1)[0] == 200


def test_time_limits() -> None:
    limits = ("--queue-timeout-s", "0.5", "--request-timeout-s", "3", "--width", "1")
    with scripted_server(*limits, "--step-s", "0.01") as server:
        stream = Stream(server)
        stream.first()
        body = {"prompt": [1], "max_tokens": 2}
        status, headers, raw = server.ask("POST", "/v1/completions", body)
        assert (status, json.loads(raw)["error"]["code"]) == (503, "queue_timeout")
        assert headers["x-should-retry"] == "false", "or OpenAI's clients would wait again"
        assert server.metric("fastdecode:rejected_requests_total", reason="queue_timeout") == 1
        assert stream.rest()[-1]["error"]["code"] == "request_timeout"
        server.wait_until_idle()
        status, headers, raw = server.ask("POST", "/v1/completions", {**body, "max_tokens": LONG})
        assert (status, json.loads(raw)["error"]["code"]) == (408, "request_timeout")
        assert headers["x-should-retry"] == "false"


def test_a_reader_that_stops_is_cut_off_and_holds_up_nobody() -> None:
    with scripted_server("--write-timeout-s", "1", "--step-s", "0") as server:
        body = json.dumps({"prompt": [IS_WORDY], "max_tokens": LONG, "stream": True})
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        with connection:
            connection.sendall(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
            server.wait_until(lambda: server.status()["num_open"] == 1)
            assert server.complete(prompt=[2], max_tokens=50)[0] == 200
            server.wait_until_idle()
            aborted = "fastdecode:aborted_requests_total"
            server.wait_until(lambda: server.metric(aborted, stage="decoding") == 1)
