"""``fastdecode r-worker --bind``: real processes, served over ZeroMQ as threads are served."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi_launch import PATHS, Running, running

from fastdecode.cli.main import main
from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.messages import (
    Accepted,
    Attend,
    BeginStep,
    Failed,
    FromRWorker,
    Hello,
    Open,
    Shutdown,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.transport import CLOSED
from rworker.worker import start_worker_thread

zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

from fastdecode.wire.zmq import hub as zmq_hub  # noqa: E402
from fastdecode.wire.zmq.hub import ZmqHub  # noqa: E402
from fastdecode.wire.zmq.keys import ClusterKey  # noqa: E402

WAIT_S = 120.0
SPEC = AttentionSpec(4, 2, 20, scale=0.2)  # its kernels are compiled by other tests, too
HELLO = Hello("a model", KVSpec(2, 2, 20, DType.FLOAT32, 64), (SPEC, SPEC), DType.FLOAT32)
R_WORKER = [sys.executable, "-m", "fastdecode.cli.main", "r-worker"]
R_WORKER += ["--threads", "1", "--kv-memory-gb", "0.001"]


@contextmanager
def r_worker(*options: str) -> Iterator[tuple[Running, str]]:
    """A process, and the address that it says it listens at."""
    with running([*R_WORKER, "--bind", "tcp://127.0.0.1:*", *options]) as job:
        yield job, job.address()


def converse(connection: Any) -> list[np.ndarray]:
    """A few steps; what the R-worker computed."""
    rng = np.random.default_rng(0)
    connection.send(HELLO)
    assert isinstance(connection.receive(WAIT_S), Welcome)
    connection.send(Open(7, 40))
    assert connection.receive(WAIT_S) == Accepted(7)
    results = []
    past = 0
    for step, new in enumerate((20, 1, 1)):
        counts = [np.array([n], np.int32) for n in (past, new, 1, past + new)]
        connection.send(BeginStep(step, 0, np.array([7]), *counts))
        for layer in range(2):
            q, k, v = (
                rng.standard_normal((n, h, 20), np.float32) for n, h in ((1, 4), (new, 2), (new, 2))
            )
            connection.send(Attend(step, 0, layer, q, k, v))
            results.append(connection.receive(WAIT_S).o.copy())
        past += new
    return results


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    thread = start_worker_thread("r0", kv_bytes=1_000_000, hub=hub)
    results = converse(hub.connections[0])
    thread.stop()
    thread.join(WAIT_S)
    return results


def test_it_serves_one_s_worker_and_ends(expected: list[np.ndarray]) -> None:
    with r_worker() as (job, address):
        hub = ZmqHub()
        connection = hub.add(address)
        assert hub.reach(WAIT_S) == {}
        assert all(
            np.array_equal(x, y) for x, y in zip(converse(connection), expected, strict=True)
        )
        connection.send(Shutdown())
        hub.close()
        outcome = job.wait()
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome


def test_it_serves_one_after_another_under_a_key(
    expected: list[np.ndarray], tmp_path: Path
) -> None:
    path = tmp_path / "key"
    assert main(["r-worker", "--new-key", str(path)]) == 0
    assert main(["r-worker", "--new-key", str(path)]) == 2
    with r_worker("--key", str(path), "--keep-serving") as (job, address):
        for _ in range(2):
            hub = ZmqHub(ClusterKey.read(path))
            assert all(
                np.array_equal(x, y)
                for x, y in zip(converse(hub.add(address)), expected, strict=True)
            )
            hub.close()
        job.process.send_signal(signal.SIGINT)
        outcome = job.wait()
    assert outcome.exit_code == 130 and not outcome.orphans
    assert outcome.output.splitlines()[-1] == "fastdecode r-worker: interrupted"


def test_it_ends_when_its_s_worker_is_killed() -> None:
    with r_worker("--silence-s", "1", "--return-s", "1") as (job, address):
        script = (
            "import signal, sys; from fastdecode.wire.zmq.hub import ZmqHub; from test_r_worker "
            "import HELLO; "
            "hub = ZmqHub(); c = hub.add(sys.argv[1]); c.send(HELLO); print(c.receive(100)); "
            "signal.pause()"
        )
        paths = os.pathsep.join(
            [str(Path(__file__).parent), str(Path(__file__).parents[1]), PATHS["PYTHONPATH"]]
        )
        with running([sys.executable, "-c", script, address], PYTHONPATH=paths) as s_worker:
            s_worker.wait_until(lambda: "Welcome" in s_worker.output())
            s_worker.kill()
        outcome = job.wait()
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome


def test_it_ends_with_its_parent() -> None:
    command = [*R_WORKER, "--bind", "tcp://127.0.0.1:*", "--exit-with-parent"]
    script = "import subprocess, sys; subprocess.Popen(sys.argv[1:]).wait()"
    with running([sys.executable, "-c", script, *command]) as job:
        job.wait_until(lambda: " listens at " in job.output())
        parent = next(p for p in job.processes() if "-c" in p.cmdline())
        parent.send_signal(signal.SIGKILL)
        outcome = job.wait(grace_s=10.0)
    assert not outcome.orphans and "has ended, and so does it" in outcome.output, outcome


def test_another_model_is_refused_naming_both() -> None:
    with r_worker("--model-hash", "abc") as (_, address):
        hub = ZmqHub()
        connection = hub.add(address)
        connection.send(HELLO)
        answer = connection.receive(WAIT_S)
        assert isinstance(answer, Failed) and answer.code == "model_mismatch"
        assert "a model" in answer.message and "abc" in answer.message
        connection.close()
        hub.close()


def test_nobody_at_the_address() -> None:
    with closing(ZmqHub()) as hub:
        hub.add("tcp://127.0.0.1:9")
        for timeout_s, retries, within in ((0.3, True, " within 0.3 s"), (math.inf, False, "")):
            error = hub.reach(timeout_s, retries=retries)[0]
            assert f"R-worker tcp://127.0.0.1:9{within}: Connection refused" in error.message
            assert error.code == "worker_unreachable"


def test_reach_a_silent_peer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_hub, "_HANDSHAKE_S", 0.1)
    monkeypatch.setitem(zmq_hub._OPTIONS, zmq.HANDSHAKE_IVL, 100)
    with closing(socket.create_server(("127.0.0.1", 0))) as stopped, closing(ZmqHub()) as hub:
        hub.add(f"tcp://127.0.0.1:{stopped.getsockname()[1]}")
        message = hub.reach(WAIT_S)[0].message
    assert message.startswith("can't reach R-worker tcp") and "silent: restart it if" in message


def test_reach_a_refused_port_warns_before_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    with closing(ZmqHub()) as hub:
        hub.add("tcp://127.0.0.1:9")
        hub.reach(1.0)
    (record,) = caplog.records
    assert "can't reach R-worker tcp://127.0.0.1:9 yet" in record.message
    assert "Connection refused" in record.message


def test_reach_an_unknown_host_is_not_waited_for(tmp_path: Path) -> None:
    ClusterKey.create(tmp_path / "key")
    with closing(ZmqHub(ClusterKey.read(tmp_path / "key"))) as hub:
        hub.add("tcp://no-such-host.invalid:5555")
        error = hub.reach(math.inf)[0]  # it would not return
    assert "R-worker tcp://no-such-host.invalid:5555: " in error.message
    assert "check the host's name" in error.message


def test_a_wrong_key_is_told_at_once(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        ClusterKey.create(tmp_path / name)
    with r_worker("--key", str(tmp_path / "ours")) as (_, address):
        hub = ZmqHub(ClusterKey.read(tmp_path / "theirs"))
        hub.add(address)
        error = hub.reach(WAIT_S)[0]
        assert "--key" in error.message and error.code == CLOSED
        hub.close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ([], "needs a launcher"),
        (["--key", "f"], "belong to --bind"),
        (["--bind", "tcp://*:1"], "every interface"),
        (["--bind", "tcp://10.0.0.1:1"], "needs a key"),
        (["--bind", "tcp://no-such-host.invalid:1", "--key", "none"], "name an address of this"),
        (["--bind", "tcp://127.0.0.1:*", "--threads", "0"], "--threads 0"),
        (["--bind", "tcp://127.0.0.1:*", "--kv-memory-gb", "nan"], "--kv-memory-gb nan"),
        (["--bind", "tcp://127.0.0.1:*", "--silence-s", "nan"], "--silence-s nan"),
        (["--bind", "tcp://127.0.0.1:*", "--session-keep-s", "-1"], "--session-keep-s -1"),
        (["--bind", "tcp://127.0.0.1:*", "--key", "/nonexistent"], "/nonexistent"),
        (["--cpus", "x"], "not a list of CPUs"),
        (["--cpus", "0", "--numa-node", "0"], "not both"),
    ],
)
def test_options_that_are_refused(
    options: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = threading.active_count()
    assert main(["r-worker", *options]) == 2
    assert match in capsys.readouterr().err
    assert threading.active_count() == threads
