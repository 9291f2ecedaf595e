"""A run watched while it goes on, and drawn afterwards."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from fastdecode.cli.main import main
from fastdecode.measure.live_view import LiveView
from fastdecode.measure.run_plot import read_events, shares_over_time
from fastdecode.server.activity import Activity, ActivityLines

MODEL = Path(__file__).parents[2] / "examples/model/checkpoint"
WORKER = {"name": "r0", "lost": None, "kv_blocks": 10, "kv_blocks_used": 5, "load_tokens": 77}
STATUS: dict[str, Any] = {
    "command": "generate", "model": "m", "state": "ready", "time_s": 100.0, "uptime_s": 50.0,
    "unit": "lines", "done": 25, "total": 100, "num_failed": 1, "eta_s": 150.0,
    "num_running": 8, "num_waiting": 16, "num_r_workers": 1, "num_live_r_workers": 1,
    "generation_tokens": 1000, "prompt_tokens": 800, "cached_tokens": 200, "kv_used": 0.5,
    "figures": {"s_busy_s": 30.0, "s_wait_s": 10.0, "r_busy_s": 20.0, "lanes": 2,
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
    assert main(["top", str(run / "status.json")]) == 0
    told = capsys.readouterr().out
    assert "fastdecode generate" in told and "6/6, 0 failed, ETA 0:00:00" in told
    assert [path.name for path in run.glob("*.new")] == [], "nothing is left half written"


def test_a_view_tells_rates_and_shares_of_the_last_minute() -> None:
    view = LiveView()
    view.add(STATUS)
    assert "tokens/s 20 generated, 12 of prompts; 1000 generated in all" in view.lines()
    figures = {**STATUS["figures"], "s_busy_s": 75.0, "s_wait_s": 15.0, "r_busy_s": 45.0}
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


def test_a_lost_r_worker_is_named_with_its_reason() -> None:
    lost = {**WORKER, "lost": "it was killed"}
    view = LiveView()
    view.add({**STATUS, "figures": {**STATUS["figures"], "r_workers": [lost]}})
    assert view.lines()[-1].endswith("lost: it was killed")


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
        assert "is no status" in capsys.readouterr().err
    assert main(["top", str(tmp_path / "none")]) == 2


def test_pictures_of_a_summary_and_of_a_trace(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, says in (("summary.json", "output tokens/s"), ("trace.json", "R-workers compute")):
        picture = tmp_path / f"{name}.svg"
        assert main(["plot", str(run / name), "--output", str(picture)]) == 0
        assert picture.read_text().startswith("<?xml") and says in picture.read_text()
    (tmp_path / "other.json").write_text('{"a": 1}')
    assert main(["plot", str(tmp_path / "other.json")]) == 2
    assert "neither a summary nor a trace" in capsys.readouterr().err


def test_shares_of_a_trace_that_was_cut_off(tmp_path: Path) -> None:
    def span(pid: int, tid: int, start: float, length: float) -> str:
        return json.dumps({"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": length}) + ",\n"

    lines = [span(1, 1, 0, 100), span(1, 0, 50, 25), span(2, 0, 0, 50), span(2, 1, 25, 50)]
    (tmp_path / "trace").write_text("[\n" + "".join(lines) + '{"ph": "X", "pi')
    _, s_shares, r_shares = shares_over_time(list(read_events(tmp_path / "trace")), 4)
    assert s_shares == [1, 1, 0, 1] and r_shares == [0.5, 1, 0.5, 0]


def test_a_server_that_works_says_so_every_ten_seconds() -> None:
    now, state, told = [0.0], [Activity(0, 0, 0, (2, 2))], list[str]()
    lines = ActivityLines(lambda: state[0], told.append, lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        lines.turn()
    assert told == [], "it has nothing to do"
    state[0] = Activity(5, 3, 1200, (1, 2))
    for second in range(25, 35):
        now[0] = float(second)
        lines.turn()
    assert told == ["5 sequences run, 3 wait, 120 tok/s, R-workers 1/2"]
    state[0] = Activity(0, 0, 1300, (1, 2))
    now[0] = 45.0
    lines.turn()
    now[0] = 60.0
    lines.turn()
    assert told[1:] == ["0 sequences run, 0 wait, 7 tok/s, R-workers 1/2"], "once more, then quiet"
