"""``fastdecode serve`` whose R-workers are other processes: ranks of a real MPI
job, and addresses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from limited_steps import UNLIMITED, StepLimit
from mpi_launch import needs_mpi, running

from examples import TRIES_ALL

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from server_process import CHECKPOINT, Server, serving

SERVE = ["serve", str(CHECKPOINT), "--port", "0", "--dtype", "float32"]
BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0}


def long_request(server: Server, max_tokens: int, limit: StepLimit) -> Any:
    """A request that runs, and isn't over before the limit is lifted."""
    import http.client

    limit.allow(max_tokens // 4)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = {**BODY, "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
    server.wait_until(lambda: server.status()["num_running"] == 1)
    return connection


@needs_mpi
def test_launch_serves_loses_an_r_worker_and_drains(tmp_path: Path) -> None:
    limit = StepLimit(tmp_path, UNLIMITED)
    launch = [*limit.fastdecode, "launch", "--hosts", "localhost:2", "--r-threads", "1"]
    launch += ["--kv-memory-gb", "0.01", "--", *SERVE]
    with serving(launch) as server:
        said = server.complete(**BODY)[1]["choices"][0]["text"]
        connection = long_request(server, 100, limit)
        limit.lose(server.job.r_workers(2)[0], signal.SIGKILL)
        server.wait_until(lambda: server.status()["num_live_r_workers"] == 1)
        assert "degraded" in server.get("/health")
        server.wait_until(lambda: any(w["lost"] for w in server.status()["figures"]["r_workers"]))
        assert server.complete(**BODY)[1]["choices"][0]["text"] == said
        # launch hands SIGTERM on so that mpirun doesn't kill the R-workers first.
        os.kill(server.job.pid, signal.SIGTERM)
        answer = connection.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read())["usage"]["completion_tokens"] == 100
        outcome = server.job.wait(120, grace_s=30)
        assert (outcome.exit_code, outcome.orphans) == (0, []), outcome


MORE_OPEN = ("nothing runs", "its client has left")


def test_over_zmq_all_r_workers_are_lost_and_come_back_whatever_runs(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}
    worker = [sys.executable, "-m", "fastdecode.cli.main", "r-worker", "--threads", "1"]
    worker += ["--kv-memory-gb", "0.01", "--bind"]
    limit = StepLimit(tmp_path, UNLIMITED)
    with contextlib.ExitStack() as workers:
        job = workers.enter_context(running([*worker, "tcp://127.0.0.1:*"], **root))
        address = job.address()
        with serving([*limit.fastdecode, *SERVE], "--r-worker", address) as server:
            said = server.complete(**BODY)[1]["choices"][0]["text"]
            for meanwhile in (*MORE_OPEN * TRIES_ALL, "its client waits"):
                runs = meanwhile != "nothing runs"
                connection = long_request(server, 80, limit) if runs else None
                job.kill()
                limit.lift()
                server.wait_until(lambda: server.status()["state"] == "no_r_worker")
                status, _, raw = server.ask("POST", "/v1/completions", BODY)
                assert (status, json.loads(raw)["error"]["code"]) == (503, "no_r_worker")
                if connection is not None and meanwhile == "its client has left":
                    connection.close()
                    server.wait_until(lambda: server.status()["num_open"] == 0)
                job = workers.enter_context(running([*worker, address], **root))
                server.wait_until(lambda: server.status()["state"] == "ready")
                assert server.complete(**BODY)[1]["choices"][0]["text"] == said
            assert connection is not None
            answer = json.loads(connection.getresponse().read())
            assert answer["usage"]["completion_tokens"] == 80
