"""The request log: whatever its file does, requests are answered."""

from __future__ import annotations

import fcntl
import io
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from mpi_launch import has_text
from server_process import scripted_server

from fastdecode.core.errors import ConfigError
from fastdecode.measure.serving.load import LoadShape, traced
from fastdecode.server.request_log import RequestLog

PIPE_BYTES = 4096


def test_a_pipe_that_nobody_reads_holds_up_no_request(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    num = PIPE_BYTES // 100  # more than it holds: a line has more than 100 bytes
    with scripted_server("--request-log", str(path)) as server:
        for _ in range(num):
            assert server.complete(prompt=[1], max_tokens=1)[0] == 200
        os.set_blocking(reader, True)
        with os.fdopen(reader, "rb") as lines:
            for _ in range(num):
                assert json.loads(lines.readline())["finish"] == "length"


def test_every_request_has_a_line_but_those_that_watch(tmp_path: Path) -> None:
    path = tmp_path / "log"
    asked: list[tuple[str, str, Any, int, str | None]] = [
        ("GET", "/health", None, 200, None),
        ("GET", "/metrics", None, 200, None),
        ("GET", "/nothing", None, 404, "not_found"),
        ("GET", "/v1/models", None, 200, None),
        ("GET", "/tokenize", None, 405, "bad_method"),
        ("POST", "/tokenize", {"prompt": "Once"}, 200, None),
        ("POST", "/tokenize", {"prompt": 1}, 400, "invalid_prompt"),
        ("POST", "/v1/completions", {"prompt": [1], "max_tokens": 3}, 200, "length"),
        ("POST", "/v1/completions", {"prompt": []}, 400, "invalid_prompt"),
    ]
    with scripted_server("--request-log", str(path)) as server:
        for method, route, body, status, _ in asked:
            assert server.ask(method, route, body)[0] == status
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n"
            connection.sendall(head + b"content-type: application/json\r\n\r\n{")
        server.wait_until(lambda: b"abort" in path.read_bytes())
        rejected = server.metric("fastdecode:rejected_requests_total", reason="invalid")
        assert rejected == 4
        assert server.metric("fastdecode:aborted_requests_total", stage="reading") == 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    seen = [(line["route"], line["status"], line["finish"]) for line in lines]
    assert seen[:-1] == [(route, status, code) for _, route, _, status, code in asked[2:]]
    assert (seen[-1], lines[-1]["stage"]) == (("/v1/completions", None, "abort"), "reading")
    assert all(line["e2e_s"] >= 0 and line["time"] > 1e9 and line["id"] for line in lines)
    (planned,) = traced(path, LoadShape(10, 5, 5))
    assert (planned.due_s, len(planned.prompt), planned.output_tokens) == (0.0, 1, 3)


def test_a_file_that_is_moved_away_is_opened_anew(tmp_path: Path) -> None:
    directory, moved = tmp_path / "logs", tmp_path / "moved"
    directory.mkdir()
    with scripted_server("--request-log", str(directory / "log")) as server:

        def ask(until: Callable[[], bool]) -> None:
            assert server.ask("GET", "/version")[0] == 200
            server.wait_until(until)

        ask(lambda: (directory / "log").stat().st_size > 0)
        directory.rename(moved)
        ask(lambda: "the request log can't be written" in server.job.output())
        directory.mkdir()
        ask(lambda: has_text(directory / "log"))
        for log in (moved / "log", directory / "log"):
            assert json.loads(log.read_text())["route"] == "/version"
            assert log.stat().st_mode & 0o077 == 0


def test_lines_that_there_is_no_room_for_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="--request-log"):
        RequestLog(str(path))
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = RequestLog(str(path), max_waiting_lines=4)
    for number in range(100):
        log.write({"id": number, "text": "x" * 100_000})
    assert caplog.text.count("lines are left out") == 1
    os.set_blocking(reader, True)
    with os.fdopen(reader, "rb") as lines:
        assert json.loads(lines.readline())["id"] == 0
    log.close()


def test_output_that_takes_nothing_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    output = io.StringIO()
    output.close()
    monkeypatch.setattr("sys.stdout", output)
    log = RequestLog("-")
    for _ in range(3):
        log.write({"status": 200})
    log.close()
    assert caplog.text.count("can't be written") == 1
