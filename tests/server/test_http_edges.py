"""What comes over raw sockets: slow, oversized, malformed and hostile requests
cost their sender an error, and other clients nothing."""

from __future__ import annotations

import http.client
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from server_process import Server, events, scripted_server

MAX_BODY = 100 * 1024


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = ("--header-timeout-s", "1", "--body-timeout-s", "1", "--max-body-mb")
    with scripted_server(*limits, str(MAX_BODY / 2**20), "--max-connections", "40") as server:
        yield server


def exchange(server: Server, *pieces: bytes, closes: bool = False) -> bytes:
    """What comes back for some bytes, until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        for piece in pieces:
            connection.sendall(piece)
        if closes:
            connection.shutdown(socket.SHUT_WR)
        said = b""
        while piece := connection.recv(65536):
            said += piece
    return said


def head(*lines: str, path: str = "/v1/completions", length: int | None = None) -> bytes:
    every = [f"POST {path} HTTP/1.1", "host: localhost", "connection: close", *lines]
    every += [] if length is None else [f"content-length: {length}"]
    return "\r\n".join([*every, "content-type: application/json", "", ""]).encode()


def code_of(raw: bytes) -> tuple[int, str]:
    """Status and code of the error, in an answer that has an id."""
    assert b"\r\nx-request-id: req_" in raw
    return int(raw.split()[1]), json.loads(raw.split(b"\r\n\r\n", 1)[1])["error"]["code"]


def test_slow_headers_and_bodies_are_cut_off(server: Server) -> None:
    assert code_of(exchange(server, b"POST /v1/comp")) == (408, "header_timeout")
    assert code_of(exchange(server, b"")) == (408, "header_timeout")
    assert code_of(exchange(server, head(length=50), b'{"prompt"')) == (408, "body_timeout")


def test_oversized_requests_are_refused(server: Server) -> None:
    assert code_of(exchange(server, head(length=MAX_BODY + 1))) == (413, "body_too_large")
    assert code_of(exchange(server, head(length=10**15))) == (413, "body_too_large")
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    chunked = exchange(server, head("transfer-encoding: chunked"), chunk, chunk)
    assert code_of(chunked) == (413, "body_too_large")
    long = head(*[f"x-{i}: {'y' * 1000}" for i in range(80)])[:-2]
    assert code_of(exchange(server, long))[0] == 431
    assert server.complete(prompt=[1], max_tokens=1)[0] == 200


BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "invalid_json"),
    (b"{", 400, "invalid_json"),
    (b"[]", 400, "invalid_body"),
    (b'{"prompt": [1], "temperature": NaN}', 400, "invalid_json"),
    (b'{"prompt": [1], "temperature": 1e999}', 400, "invalid_json"),
    (b'{"prompt": [1], "seed": ' + b"9" * 5000 + b"}", 400, "invalid_json"),
    (b'{"prompt": [1], "seed": 18446744073709551616}', 400, "invalid_sampling_params"),
    (b'{"a":' * 100 + b"1" + b"}" * 100, 400, "invalid_json"),
    (b"[" * 40_000, 400, "invalid_json"),
    (b'{"prompt": "\\ud800"}', 400, "invalid_prompt"),
    (b'\xff\xfe{"prompt": [1]}', 400, "invalid_json"),
    (b'{"prompt": [1], "n": 100000000}', 400, "invalid_sampling_params"),
    (b'{"prompt": [1], "max_tokens": true}', 400, "invalid_sampling_params"),
    (b'{"prompt": [99999]}', 400, "invalid_token_id"),
    (b'{"prompt": [1], "frobnicate": 1}', 400, "unknown_field"),
    (b'{"prompt": [1], "\\ud800": 1}', 400, "unknown_field"),
    (b'{"prompt": [1], "echo": true}', 400, "unsupported_field"),
    (b'{"prompt": [1], "stream_options": {}}', 400, "invalid_value"),
    (b'{"prompt": [1], "model": "gpt-5"}', 404, "model_not_found"),
    (b'{"prompt": [' + b"1," * 5000 + b"1]}", 400, "context_length_exceeded"),
    (b'{"prompt": [1002]}', 400, "exceeds_capacity"),
]


@pytest.mark.parametrize(("body", "status", "code"), BODIES)
def test_bodies_that_are_refused(server: Server, body: bytes, status: int, code: str) -> None:
    got, headers, raw = server.ask("POST", "/v1/completions", body)
    error = json.loads(raw)["error"]
    assert (got, error["code"]) == (status, code), error
    assert "int_max_str_digits" not in error["message"], "clients don't have Python's settings"
    assert set(error) == {"message", "type", "param", "code"}
    assert headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/completions", {"prompt": [1, 2, 99999]}, "prompt", "token 2 of the prompt, 99999,"),
        ("/v1/completions", {"prompt": []}, "prompt", "that isn't empty"),
        ("/v1/completions", {"prompt": ""}, "prompt", "is empty"),
        ("/v1/completions", {"prompt": [1] * 5000}, "prompt", "shorten the prompt"),
        ("/v1/completions", {"prompt": [1], "stop_token_ids": [99999]}, "stop_token_ids", "99999"),
        ("/v1/completions", {"messages": []}, "messages", "belongs to /v1/chat/completions"),
        ("/v1/chat/completions", {"prompt": "x"}, "prompt", "belongs to /v1/completions"),
        ("/v1/completions", {"prompt": "x", "max_completion_tokens": 3}, "max_completion_tokens",
         "belongs to /v1/chat/completions"),
        ("/detokenize", {"tokens": [99999]}, "tokens", "99999"),
        ("/v1/completions", {"prompt": [1], "frobnicate": 1}, "frobnicate",
         "stream, stream_options, user, metadata"),
        ("/v1/completions", {"prompt": [1], "streem": True}, "streem", "'stream'"),
        ("/v1/completions", {"prompt": [1], "stream": True,
                             "stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation", "is not supported"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_and_the_mend(
    server: Server, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    status, said = server.post(path, body)
    assert (status, said["error"]["param"]) == (400, param)
    assert words in said["error"]["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_tokens_of_another_model_are_not_told(server: Server, path: str) -> None:
    asked = {"prompt": "x"} if path == "/tokenize" else {"tokens": [1]}
    status, said = server.post(path, {"model": "other", **asked})
    error = said["error"]
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")


def test_a_stream_that_is_not_obfuscated_may_be_asked_for(server: Server) -> None:
    options = {"include_obfuscation": False, "include_usage": True}
    body = {"prompt": [1], "max_tokens": 2, "stream": True, "stream_options": options}
    status, _, raw = server.ask("POST", "/v1/completions", body)
    assert status == 200 and events(raw)[-1] == "[DONE]"


def test_a_template_never_comes_from_a_request(server: Server) -> None:
    for more in (
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"bos_token": "x"}},
        {"chat_template_kwargs": {"raise_exception": 1}},
        {"chat_template_kwargs": {"x": {"y": 1}}},
    ):
        body = {"messages": [{"role": "user", "content": "x"}], **more}
        assert server.post("/v1/chat/completions", body)[0] == 400


def test_only_plain_json_is_read(server: Server) -> None:
    for headers in (
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-encoding": "gzip"},
    ):
        status, _, raw = server.ask("POST", "/v1/completions", {"prompt": [1]}, **headers)
        assert (status, json.loads(raw)["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:1"}, 200),
        ({"host": "[::1]:80"}, 200),
        ({"host": "127.9.9.9"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "evil@localhost"}, 403),
        ({"host": "2130706433"}, 403),
        ({"host": ""}, 403),
        ({"host": "localhost:1", "origin": "http://localhost:1"}, 200),
        ({"host": "localhost:1", "origin": "http://localhost:2"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://evil.example"}, 403),
    ],
)
def test_other_sites_are_kept_out(server: Server, headers: dict[str, str], status: int) -> None:
    got, answered, _ = server.ask("GET", "/v1/models", **headers)
    assert got == status
    assert not [name for name in answered if name.startswith("access-control")]


def test_bodies_are_coded_by_chunks_alone(server: Server) -> None:
    raw = b'{"prompt": [1], "max_tokens": 1}'
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(raw), raw)
    for coding, start in (("chunked", b"HTTP/1.1 200"), ("gzip, chunked", b"HTTP/1.1 415")):
        assert exchange(server, head(f"transfer-encoding: {coding}"), body).startswith(start)


def test_two_hosts_are_none(server: Server) -> None:
    hosts = b"host: localhost\r\n" * 2
    raw = exchange(server, b"GET /v1/models HTTP/1.1\r\nconnection: close\r\n" + hosts + b"\r\n")
    assert raw.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400"))


def test_request_ids(server: Server) -> None:
    for given, is_kept in (("a.B:c-9_", 1), ("x" * 128, 1), ("x" * 129, 0), ("a b", 0)):
        _, headers, _ = server.ask("GET", "/live", x_request_id=given)
        assert (headers["x-request-id"] == given) == is_kept


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET http://localhost/live HTTP/1.1", 200),
        ("HEAD /live HTTP/1.1", 200),
        ("OPTIONS /v1/completions HTTP/1.1", 405),
        ("GET /v1/completions HTTP/1.1", 405),
        ("GET /v1/models/ HTTP/1.1", 404),
        ("GET /v1/models/%00%0d%0aset-cookie:x HTTP/1.1", 404),
        ("GET /../../etc/passwd HTTP/1.1", 404),
        ("GET /page.js%0A HTTP/1.1", 404),
        ("CONNECT evil:443 HTTP/1.1", 400),
        ("GET /%ff HTTP/1.1", 404),
        ("GET /\x01 HTTP/1.1", 400),
        ("NONSENSE", 400),
    ],
)
def test_request_lines(server: Server, request_line: str, status: int) -> None:
    raw = exchange(
        server, f"{request_line}\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode("latin-1")
    )
    assert raw.startswith(f"HTTP/1.1 {status}".encode()), raw
    assert b"set-cookie" not in raw.split(b"\r\n\r\n")[0]


def test_old_http_and_pipelined_requests(server: Server) -> None:
    assert exchange(server, b"GET /live HTTP/1.0\r\nhost: localhost\r\n\r\n").endswith(b"}")
    body = b'{"prompt": [1], "max_tokens": 3, "stream": true}'
    post = head(length=len(body)).replace(b"HTTP/1.1", b"HTTP/1.0") + body
    for old in (post, post.replace(b"connection: close", b"connection: keep-alive")):
        top, _, stream = exchange(server, old).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in top and top.count(b"connection: close") == 1
        assert stream.startswith(b"data: {") and stream.endswith(b"data: [DONE]\n\n")
    get = b"GET /live HTTP/1.1\r\nhost: localhost\r\n"
    raw = exchange(server, get + b"\r\n" + get + b"connection: close\r\n\r\n")
    assert raw.count(b"HTTP/1.1 200") == 2


def test_too_many_connections(server: Server) -> None:
    server.wait_until_idle()
    held = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(60)]
    answers = [connection.recv(4096) for connection in held]  # the others are late with a header
    for connection in held:
        connection.close()
    codes = [code_of(raw) for raw in answers if raw]
    assert (503, "too_many_connections") in codes
    server.wait_until(lambda: is_live(server))


def is_live(server: Server) -> bool:
    """It may still close connections as soon as they are made."""
    try:
        return server.ask("GET", "/live")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def _mangled(random_: random.Random) -> Any:
    """A body that is nearly right, or not at all."""
    values: list[Any] = [
        None, True, -1, 0, 1, 2**31, 2**70, 1.5, "", "x", "\ud800", [], [[]], [1], [-1], {},
        {"0": 1}, {"a": []}, [None], ["a", 1], "\x00",
    ]  # fmt: skip
    names = [
        "prompt", "max_tokens", "n", "temperature", "top_p", "top_k", "stop", "seed", "logprobs",
        "logit_bias", "stream", "stream_options", "user", "model", "best_of", "messages", "tools",
        "min_tokens", "stop_token_ids", "response_format", "", "x",
    ]  # fmt: skip
    body: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 1}
    for _ in range(random_.randrange(4)):
        body[random_.choice(names)] = random_.choice(values)
    return body


def count_statuses(server: Server, num: int, seed: int) -> dict[int, int]:
    random_ = random.Random(seed)
    counts: dict[int, int] = {}
    for _ in range(num):
        raw = json.dumps(_mangled(random_)).encode()
        if random_.random() < 0.3:
            at = random_.randrange(len(raw))
            raw = raw[:at] + random_.randbytes(random_.randrange(3)) + raw[at + 1 :]
        paths = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
        path = random_.choice(paths)
        status, _, said = server.ask("POST", path, raw, timeout_s=20)
        counts[status] = counts.get(status, 0) + 1
        assert status in (200, 400, 404), (status, raw, said)
    return counts


def test_mangled_bodies_never_break_it(server: Server) -> None:
    counts = count_statuses(server, 400, seed=5)
    assert counts[200] > 20 and counts[400] > 100
    server.wait_until_idle()


def test_a_stream_whose_request_fails_says_so_without_done(server: Server) -> None:
    status, _, _ = server.ask("POST", "/v1/completions", {"prompt": [1002], "stream": True})
    assert status == 400, "nothing was said yet, so the status still could be"
    said = events(server.ask("POST", "/v1/completions", {"prompt": [1], "stream": True})[2])
    assert said[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", "/v1/embeddings is not supported: models generate text"),
        ("/v1/rerank", "/v1/rerank is not supported"),
        ("/v1/images/generations", "/v1/images is not supported: prompts and answers are text"),
        ("/v1/audio/speech", "/v1/audio is not supported"),
        ("/v1/files", "fastdecode run-batch"),
        ("/v1/batches/b1/cancel", "fastdecode run-batch"),
        ("/v1/responses/resp_1", "nothing is stored"),
        ("/v1/threads/t/runs", "nothing is stored"),
        ("/v1/messages", "use /v1/chat/completions"),
        ("/api/chat", "use /v1/chat/completions"),
        ("/v1/load_lora_adapter", "no adapters"),
        ("/chat/completions", "use /v1/chat/completions"),
        ("/v1/chat/completions/", "use /v1/chat/completions"),
        ("/v1/v1/completions", "use /v1/completions"),
        ("/models", "use /v1/models"),
        ("/v1/embeddingsx", "paths are /v1/completions, /v1/chat/completions"),
        ("/x" * 500, "paths are /v1/completions"),
    ],
)
def test_path_that_is_not_there_is_named_with_what_is(
    server: Server, path: str, words: str
) -> None:
    for method in ("POST", "GET"):
        status, _, raw = server.ask(method, path, {} if method == "POST" else None)
        error = json.loads(raw)["error"]
        assert (status, error["code"]) == (404, "not_found")
        assert words in error["message"] and len(error["message"]) < 300


@pytest.mark.parametrize(
    ("method", "path", "takes"),
    [("GET", "/v1/completions", "POST"), ("DELETE", "/v1/models", "GET, HEAD"),
     ("PUT", "/health", "GET, HEAD")],
)  # fmt: skip
def test_method_that_a_path_does_not_take_is_told_those_it_takes(
    server: Server, method: str, path: str, takes: str
) -> None:
    status, headers, raw = server.ask(method, path)
    assert (status, sorted(headers["allow"].split(", "))) == (405, takes.split(", "))
    assert json.loads(raw)["error"]["message"].endswith(headers["allow"])
