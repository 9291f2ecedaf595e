"""The request log: whatever its file does, requests are answered."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from server_process import scripted_server

from fastdecode.core.errors import ConfigError
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


def test_a_file_that_is_moved_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "logs"
    directory.mkdir()
    log = RequestLog(str(directory / "log"))
    log.write({"id": 1})
    directory.rename(tmp_path / "moved")
    with caplog.at_level(logging.ERROR):
        log.reopen()
    assert "the old file is written on" in caplog.text
    log.write({"id": 2})
    directory.mkdir()
    log.reopen()
    log.reopen()
    log.close()
    log.close()
    every = [*(tmp_path / "moved").iterdir(), *directory.iterdir()]
    lines = [json.loads(line)["id"] for file in every for line in file.read_text().splitlines()]
    assert lines == [1, 2], "wherever the thread was by then"


def test_lines_that_there_is_no_room_for_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="request_log"):
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
