"""A run watched while it goes on, and drawn afterwards."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from fastdecode.cli.main import main
from fastdecode.measure.live_view import LiveView
from fastdecode.measure.plot import trace_series
from fastdecode.server.serving import ActivityLines
from fastdecode.wire.instances import StatusReport

MODEL = Path(__file__).parents[2] / "examples/model/checkpoint"
WORKER = {"name": "r0", "lost": None, "kv_blocks": 10, "kv_blocks_used": 5, "load_tokens": 77}
STATUS: dict[str, Any] = {
    "command": "generate", "model": "m", "state": "ready", "time_s": 100.0, "uptime_s": 50.0,
    "unit": "lines", "done": 25, "total": 100, "num_failed": 1, "eta_s": 150.0,
    "num_running": 8, "num_waiting": 16, "num_r_workers": 1, "num_live_r_workers": 1,
    "generation_tokens": 1000, "prompt_tokens": 800, "cached_tokens": 200, "kv_used": 0.5,
    "figures": {"s_compute_s": 30.0, "wait_s": 10.0, "r_busy_s": 20.0, "lanes": 2,
                "num_prompt_tokens": 600,
                "r_workers": [WORKER]},
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what a run has left."""
    out = tmp_path_factory.mktemp("run")
    lines = [{"id": i, "prompt": "Once upon a time"} for i in range(6)]
    (out / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"--input": "in.jsonl", "--output": "out.jsonl", "--summary": "summary.json",
             "--trace": "trace.json", "--status": "status.json"}  # fmt: skip
    named = [word for option, name in files.items() for word in (option, str(out / name))]
    length = ["--max-tokens", "12", "--ignore-eos"]
    assert main(["generate", str(MODEL), *named, *length, "--kv-memory-gb", "0.05"]) == 0
    return out


def test_the_status_file_says_how_a_run_ended(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["done"], status["total"]) == ("ended", 6, 6)
    assert status["eta_s"] == 0 and status["generation_tokens"] == 72
    summary = json.loads((run / "summary.json").read_text())
    assert status["figures"]["num_steps"] == summary["steps"], "it counts the last steps, too"
    assert main(["top", str(run / "status.json")]) == 0
    told = capsys.readouterr().out
    assert "fastdecode generate" in told and "6/6, 0 failed, ETA 0:00:00" in told
    assert [path.name for path in run.glob("*.part")] == [], "nothing is left half written"


def test_a_view_tells_rates_and_shares_of_the_last_minute() -> None:
    view = LiveView()
    view.add(STATUS)
    assert "tokens/s 20 generated, 12 of prompts; 1000 generated in all" in view.lines()
    figures = {**STATUS["figures"], "s_compute_s": 75.0, "wait_s": 15.0, "r_busy_s": 45.0}
    later = {**STATUS, "time_s": 150.0, "generation_tokens": 6000, "figures": figures}
    view.add(later)
    lines = view.lines()
    assert lines[1] == "lines [#####...............] 25/100, 1 failed, ETA 0:02:30"
    assert "tokens/s 100 generated, 0 of prompts; 6000 generated in all" in lines
    assert "sequences 8 running, 16 waiting; 25% of prompt tokens from the cache" in lines
    assert lines[4].startswith("S-part [##################..] 90%  R-part [##########..........]")
    assert max(map(len, lines)) <= 80
    assert "50% reserved" in lines[5] and lines[6] == "R-workers 1/1"
    assert lines[7].split()[0] == "r0" and lines[7].endswith("50%  77 tokens")
    for second in range(51, 200):
        view.add({**later, "time_s": 100.0 + second})
    assert "tokens/s 0 generated, 0 of prompts; 6000 generated in all" in view.lines()
    view.add(STATUS)  # another process
    assert "tokens/s 20 generated, 12 of prompts; 1000 generated in all" in view.lines()


def test_a_lost_r_worker_has_no_room_for_kv() -> None:
    lost = {**WORKER, "lost": "it was killed", "kv_blocks_used": 0}
    for workers, used in (([WORKER, lost], 0.5), ([lost], 0.0)):
        assert StatusReport(state="ready", figures={"r_workers": workers}).kv_used == used


def test_r_workers_of_one_host_differ_by_their_ports() -> None:
    workers = [{**WORKER, "name": f"R-worker tcp://10.0.0.17:{port}"} for port in (7411, 7412)]
    view = LiveView()
    view.add({**STATUS, "figures": {**STATUS["figures"], "r_workers": workers}})
    assert [line.split()[0] for line in view.lines(80)[-2:]] == [
        "tcp://10.0.0.17:7411", "tcp://10.0.0.17:7412"
    ]  # fmt: skip


def test_a_lost_r_worker_is_named_with_its_reason() -> None:
    lost = {**WORKER, "lost": "it was killed"}
    view = LiveView()
    view.add({**STATUS, "figures": {**STATUS["figures"], "r_workers": [lost]}})
    assert view.lines()[-1] == "  r0 lost: it was killed"


@pytest.fixture
def server() -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_right = self.path == "/status.json" and self.headers["Authorization"] == "Bearer k"
            self.send_response(200 if is_right else 401)
            self.end_headers()
            self.wfile.write(json.dumps({**STATUS, "model": "a\x1bb"}).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    thread.join()
    http.server_close()


def test_a_server_is_asked_for_its_status(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("k\n")
    assert main(["top", server, "--once", "--api-key-file", str(tmp_path / "key")]) == 0
    told = capsys.readouterr().out
    assert "tokens/s 20 generated" in told and "\x1b" not in told
    assert main(["top", server, "--once"]) == 2
    assert "401" in capsys.readouterr().err


def test_what_is_no_status_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in ("{}", "[", '{"figures": {}}'):
        (tmp_path / "file").write_text(content)
        assert main(["top", str(tmp_path / "file")]) == 2
        assert "is not a status" in capsys.readouterr().err
    assert main(["top", str(tmp_path / "none"), "--once"]) == 2
    assert main(["top", str(tmp_path / "none" / "file")]) == 2, "nobody can write that file"


def test_a_file_that_is_not_there_yet_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, slept = tmp_path / "status.json", list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            path.write_text(json.dumps(STATUS))
        if len(slept) == 5:
            path.write_text(json.dumps({**STATUS, "state": "ended", "time_s": 101.0}))

    monkeypatch.setattr("fastdecode.cli.top.sleep", sleep)
    assert main(["top", str(path), "--every", "2"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"waiting: {path} does not exist yet") and slept == [2.0] * 5
    assert sum(line.startswith("waiting") for line in told) == 1
    assert sum(line.startswith("fastdecode generate") for line in told) == 3


@pytest.mark.parametrize("is_there", [False, True])
def test_ctrl_c_ends_watching(
    is_there: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    if is_there:
        (tmp_path / "status.json").write_text(json.dumps(STATUS))
    monkeypatch.setattr("fastdecode.cli.top.sleep", interrupt)
    assert main(["top", str(tmp_path / "status.json")]) == 0
    assert capsys.readouterr().err == "", "watching has no output to speak of"


def test_a_server_that_does_not_listen_yet_is_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    calls = list[float]()

    def sleep(seconds: float) -> None:
        calls.append(seconds)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("fastdecode.cli.top.sleep", sleep)
    assert main(["top", f"http://127.0.0.1:{port}"]) == 0
    assert f"no server listens at http://127.0.0.1:{port}" in capsys.readouterr().out
    assert main(["top", f"http://127.0.0.1:{port}", "--once"]) == 2


def test_a_status_that_is_no_longer_written_says_its_age() -> None:
    view = LiveView()
    view.add({**STATUS, "pid": 7, "written": 1000.0}, 1002.0)
    assert view.lines()[1].startswith("lines "), "it is two seconds old"
    view.add({**STATUS, "pid": 7, "written": 1000.0}, 1075.0)
    assert view.lines()[1].startswith("nothing was written for 0:01:15: process 7 was killed")
    view.add({**STATUS, "pid": 7, "written": 1000.0, "state": "ended"}, 91000.0)
    assert view.lines()[1] == "it ended 1 day, 1:00:00 ago"


def test_a_restarted_command_is_no_part_of_the_last_minute() -> None:
    view = LiveView()
    view.add({**STATUS, "pid": 7})
    view.add({**STATUS, "pid": 8, "time_s": 110.0, "uptime_s": 5.0, "generation_tokens": 50})
    assert "tokens/s 10 generated" in "\n".join(view.lines()), "50 tokens in its 5 s"


def test_a_picture_of_a_trace(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "trace.svg"
    assert main(["plot", str(run / "trace.json"), "--output", str(picture)]) == 0
    assert picture.read_text().startswith("<?xml") and "R-workers compute" in picture.read_text()
    for bad, why in (("{}", "is not a trace"), ("[\n", "has no spans")):
        (tmp_path / "other.json").write_text(bad)
        assert main(["plot", str(tmp_path / "other.json")]) == 2
        assert why in capsys.readouterr().err


def test_shares_and_counters_of_a_trace_that_was_cut_off(tmp_path: Path) -> None:
    def span(pid: int, tid: int, start: float, length: float) -> dict[str, Any]:
        return {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": length}

    def counter(at: float, running: int) -> dict[str, Any]:
        args = {"running": running, "waiting": 0}
        return {"ph": "C", "name": "sequences", "ts": at, "args": args}

    events = [span(1, 1, 0, 100), span(1, 0, 50, 25), span(2, 0, 0, 50), counter(0, 4)]
    events += [counter(30, 8), span(2, 1, 25, 50)]
    text = "[\n" + "".join(json.dumps(each) + ",\n" for each in events) + '{"ph": "X", "pi'
    (tmp_path / "trace").write_text(text)
    seconds, means = trace_series(tmp_path / "trace", 4)
    assert seconds == pytest.approx([12.5e-6, 37.5e-6, 62.5e-6, 87.5e-6])
    assert means["waited"] == pytest.approx([0, 0, 1, 0])
    assert means["attended"] == pytest.approx([0.5, 1, 0.5, 0])
    assert means["running"] == pytest.approx([4, 0.2 * 4 + 0.8 * 8, 8, 8])


def test_a_server_that_works_says_so_every_ten_seconds() -> None:
    def report(num_running: int, num_waiting: int, num_tokens: int) -> StatusReport:
        return StatusReport(
            num_unfinished=num_running + num_waiting, num_running=num_running, num_r_workers=2,
            num_live_r_workers=1, figures={"num_output_tokens": num_tokens},
        )  # fmt: skip

    now, told = [0.0], list[str]()
    lines = ActivityLines(told.append, lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        lines.turn(StatusReport())
    assert told == [], "it has nothing to do"
    for second in range(25, 35):
        now[0] = float(second)
        lines.turn(report(5, 3, 1200))
    assert told == ["5 running, 3 waiting, 120 tok/s, R-workers 1/2"]
    for second in (45, 60):
        now[0] = float(second)
        lines.turn(report(0, 0, 1300))
    assert told[1:] == ["0 running, 0 waiting, 7 tok/s, R-workers 1/2"], "once more, then quiet"


def test_a_pipe_gets_whole_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a-long-name-of-a-model-" * 8
    (tmp_path / "status").write_text(json.dumps({**STATUS, "model": name}))
    for words in (["--once"], []):
        state = "ready" if words else "ended"
        (tmp_path / "status").write_text(json.dumps({**STATUS, "model": name, "state": state}))
        assert main(["top", str(tmp_path / "status"), *words]) == 0
        assert f"{name}  {state}  up" in capsys.readouterr().out
