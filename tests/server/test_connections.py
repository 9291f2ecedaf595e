"""Connections whose clients pipeline, dawdle or stop reading: none outlives its
use, and none keeps anything of the engine."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from server_process import Server, scripted_server, serving

from fastdecode.core.errors import ConfigError
from fastdecode.server.frontend import SPARE_FILES, _listen
from fastdecode.server.http.connection import MAX_HEADER_BYTES, MOST_UNREAD_BYTES
from fastdecode.server.options import ServeOptions

IS_WORDY = 1003
LIVE = b"GET /live HTTP/1.1\r\nhost: localhost\r\n"
LAST = LIVE + b"connection: close\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Its longest answer takes minutes."""
    limits = ("--header-timeout-s", "1", "--write-timeout-s", "1", "--step-s", "0.05")
    with scripted_server(*limits) as server:
        yield server


def connect(server: Server, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(30)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(("127.0.0.1", server.port))
    return connection


def completion(**more: object) -> bytes:
    body = json.dumps({"prompt": [1, 2], **more}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    return f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def until_closed(connection: socket.socket) -> bytes:
    """What comes until the server closes: it doesn't matter how."""
    said = b""
    try:
        while piece := connection.recv(65536):
            said += piece
    except ConnectionError:
        pass
    return said


def first_answer(connection: socket.socket) -> bytes:
    """Receive the answer to ``LIVE``."""
    said = b""
    while not said.endswith(b"}"):
        said += connection.recv(4096)
    return said


def test_who_sends_too_much_still_gets_the_answer(server: Server) -> None:
    """Clients that have no eye for an answer before they have sent all."""
    body = b" " * (9 << 20)
    status, _, said = server.ask("POST", "/v1/completions", body)
    assert (status, json.loads(said)["error"]["code"]) == (413, "body_too_large")
    status, _, said = server.ask("POST", "/v1/completions", body, content_type="text/plain")
    assert (status, json.loads(said)["error"]["code"]) == (415, "unsupported_media_type")
    status, _, said = server.ask("POST", "/v1/completions", body, host="a.example")
    assert (status, json.loads(said)["error"]["code"]) == (403, "forbidden")
    openai = pytest.importorskip("openai", reason="needs a client: pip install openai")
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.APIStatusError, match="larger than 8388608 bytes") as raised,
    ):
        client.completions.create(model="checkpoint", prompt="x" * (9 << 20))
    assert raised.value.status_code == 413


def test_who_sends_for_ever_is_not_heard_out(server: Server) -> None:
    head = completion().split(b"content-length")[0] + b"transfer-encoding: chunked\r\n\r\n"
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    with connect(server) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(head)
        for _ in range(10 * MOST_UNREAD_BYTES // len(chunk)):
            connection.sendall(chunk)
        raise AssertionError("all of it was read")


def test_a_body_that_is_no_http_is_told_so(server: Server) -> None:
    head = completion().split(b"content-length")[0] + b"transfer-encoding: chunked\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(head + b"zz\r\n")
        said = until_closed(connection)
    assert said.startswith(b"HTTP/1.1 400")


def test_a_header_that_comes_all_at_once_is_bounded_too(server: Server) -> None:
    for size, status in ((MAX_HEADER_BYTES - 1000, b" 200 "), (MAX_HEADER_BYTES + 1000, b" 431 ")):
        with connect(server) as connection:
            connection.sendall(LIVE + b"x: " + b"y" * size + b"\r\nconnection: close\r\n\r\n")
            assert status in until_closed(connection)[:20]


def test_a_header_behind_a_body_that_nothing_reads_is_bounded_too(server: Server) -> None:
    unread = completion(max_tokens=2).replace(b"application/json", b"text/plain")
    with connect(server) as connection:
        connection.sendall(unread)
        answer = first_answer(connection)
        with contextlib.suppress(ConnectionError):
            connection.sendall(LIVE + b"x: " + b"y" * (4 * MAX_HEADER_BYTES) + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 415") and b" 200 " not in until_closed(connection)


def test_who_asks_for_another_protocol_is_answered_by_this_one(server: Server) -> None:
    """As Java's and curl's clients do, which could do with HTTP/2."""
    asks = b"\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(completion(max_tokens=2).replace(b"\r\n\r\n", asks, 1) + LAST)
        assert until_closed(connection).count(b"HTTP/1.1 200") == 2


def has_connection(server: Server, port: int) -> bool:
    """To a client at this port."""
    every = server.process("http").net_connections()
    return any(each.raddr and each.raddr.port == port for each in every)


def test_requests_that_wait_for_their_turn_are_answered(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(completion(max_tokens=60) + LIVE + b"\r\n")
        server.wait_until(lambda: server.status()["num_open"] == 1)
        connection.sendall(LAST)
        assert until_closed(connection).count(b"HTTP/1.1 200") == 3


def test_trailers_are_bounded(server: Server) -> None:
    chunked = LIVE + b"transfer-encoding: chunked\r\n\r\n0\r\n"
    with connect(server) as connection:
        connection.sendall(chunked)
        assert b" 200 OK" in first_answer(connection)
        try:
            connection.sendall(b"x: y\r\n" * (MAX_HEADER_BYTES // 6 + 1))
        except ConnectionError:
            return
        until_closed(connection)


@pytest.mark.parametrize(
    ("request_", "later"),
    [
        (LIVE + b"\r\n", b"\r\n"),
        (LIVE + b"content-length: 999999999\r\n\r\n", b"x"),
        (LIVE + b"transfer-encoding: chunked\r\n\r\n", b"0\r\nx: "),
        (LIVE + b"content-length: 1\r\n\r\n", b"x"),
    ],
)
def test_after_an_answer_a_connection_ends_too(
    server: Server, request_: bytes, later: bytes
) -> None:
    with connect(server) as connection:
        connection.sendall(request_)
        first_answer(connection)
        connection.sendall(later)
        until_closed(connection)


def test_the_last_bytes_are_not_offered_for_ever(server: Server) -> None:
    num_succeeded = server.status()["num_succeeded"]
    with connect(server, receive_buffer=4096) as connection:
        port = connection.getsockname()[1]
        connection.sendall(completion(prompt=[IS_WORDY], max_tokens=20, n=100))
        server.wait_until(lambda: server.status()["num_succeeded"] > num_succeeded)
        server.wait_until(lambda: not has_connection(server, port))
    server.wait_until_idle()


def test_open_files_bound_connections_and_their_limit_is_raised() -> None:
    few = SPARE_FILES + 12
    script = str(Path(__file__).parents[1] / "scripted_serving.py")
    limited = [
        "sh",
        "-c",
        f'ulimit -Sn {few - 20}; ulimit -Hn {few}; exec "$0" "$@"',
        sys.executable,
    ]
    with serving([*limited, script, "--port", "0"]) as server, contextlib.ExitStack() as stack:
        assert server.process("http").rlimit(psutil.RLIMIT_NOFILE) == (few, few)
        assert "at most 12 connections are accepted" in server.job.output()
        held = [stack.enter_context(connect(server)) for _ in range(20)]
        assert b"too_many_connections" in until_closed(held[-1])
        for connection in held:
            connection.close()
        server.wait_until(lambda: b" 200 " in live(server))


def live(server: Server) -> bytes:
    with connect(server) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(LAST)
        return until_closed(connection)
    return b""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_answers_do_not_wait_for_acks(host: str) -> None:
    """Without TCP_NODELAY an answer on a reused connection would be 40 ms late."""
    try:
        listener, address = _listen(ServeOptions(host=host, port=0))
    except ConfigError:
        pytest.skip(f"this host has no {host}")
    with listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert address.startswith("http://")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
