"""``fastdecode serve`` as a command: what it says, and how it ends."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from pathlib import Path

import pytest
from mpi_launch import FASTDECODE, needs_mpi

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from server_process import CHECKPOINT, Server, serving

from fastdecode.cli import serve
from fastdecode.cli.main import main
from fastdecode.cli.serve import Signals, run_serve
from fastdecode.server.serving import Ending

SERVE = ["serve", "--model", str(CHECKPOINT), "--port", "0", "--dtype", "float32"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_while_it_loads_it_has_answered_all_that_ran(number: signal.Signals) -> None:
    pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # an R-worker that says nothing
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        command = [*FASTDECODE, *SERVE, "--r-worker", address]
        with serving(command, is_ready=False) as server:
            assert server.ask("GET", "/health")[0] == 503
            os.kill(server.job.pid, number)
            outcome = server.job.wait(60, grace_s=30)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome
    assert "asked to stop while it started" in outcome.output


def test_one_stop_while_it_starts_is_as_good_as_two() -> None:
    """The second would come in the middle of what the first has ended."""
    left: list[int] = []
    signals = Signals(left.append)
    with pytest.raises(KeyboardInterrupt):
        signals.on_stop(signal.SIGTERM, None)
    signals.on_stop(signal.SIGTERM, None)
    assert (signals.num_stops, left) == (2, [])
    signals.on_stop(signal.SIGTERM, None)
    assert left == [3]
    signals.is_over = True
    signals.on_stop(signal.SIGTERM, None)
    assert left == [3], "all was answered: there is nothing to stop"


def test_who_has_answered_all_hears_signals_to_the_process_s_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MPI may take seconds to leave."""

    def start(args: argparse.Namespace, signals: Signals) -> int:
        signals.is_over = True
        return 0

    monkeypatch.setattr(serve, "_start", start)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert run_serve(argparse.Namespace(log_level="debug")) == 0
        for number in before:
            signal.raise_signal(number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_stop_in_the_middle_of_an_import_is_heard_after_it() -> None:
    imported = []

    def start(signals: Signals, *, is_stopped: bool) -> None:
        with signals.put_off():
            if is_stopped:
                signals.on_stop(signal.SIGTERM, None)
            imported.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        start(Signals(), is_stopped=True)
    start(Signals(), is_stopped=False)
    assert len(imported) == 2


def test_a_hang_up_has_keys_read_again_also_while_it_loads(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text("first-key-0001\n")
    command = [*FASTDECODE, *SERVE, "--api-key-file", str(keys), "--log-level", "error"]

    def statuses(server: Server) -> list[int]:
        every = ("first-key-0001", "second-key-002")
        return [server.ask("GET", "/version", authorization=f"Bearer {key}")[0] for key in every]

    with serving(command, is_ready=False) as server:
        assert statuses(server) == [200, 401]
        keys.write_text("second-key-002\n")
        os.kill(server.job.pid, signal.SIGHUP)
        server.wait_until(lambda: statuses(server) == [401, 200])
        assert server.ask("GET", "/health")[0] == 200, "it was read once the model was there"
        keys.write_text("short\n")
        os.kill(server.job.pid, signal.SIGHUP)
        server.wait_until(lambda: "the keys stay as they are" in server.job.output())
        assert statuses(server) == [401, 200]


@pytest.mark.parametrize("ending", Ending)
def test_who_is_impatient_while_the_engine_closes_hears_how_it_ended(ending: Ending) -> None:
    left: list[int] = []
    signals = Signals(left.append)
    signals.begin()
    for _ in range(2):
        signals.on_stop(signal.SIGTERM, None)
    assert (signals.num_stops, left) == (2, [])
    signals.ending = ending
    signals.on_stop(signal.SIGTERM, None)
    assert left == [ending]


def test_a_template_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SERVE, "--chat-template", "/nonexistent"]) == 2
    told = capsys.readouterr().err
    assert "--chat-template /nonexistent: can't read it" in told and "Fetch" not in told


def test_help_tells_the_defaults_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help=all"])
    told = " ".join(capsys.readouterr().out.split()).replace("--no- ", "--no-")
    assert "defaults for requests that do not set them" in told
    assert "(default: 16; of chats: the model's limit)" in told
    for default in ("0.9", "256"):
        assert f"; default: {default}" in told
    assert "default: its max_tokens" not in told and "default: for max_tokens" not in told


@needs_mpi
def test_a_job_that_is_stopped_while_it_loads() -> None:
    launch = [*FASTDECODE, "launch", "--hosts", "localhost:1", "--kv-memory-gb", "0.01", "--"]
    with serving([*launch, *SERVE], is_ready=False) as server:
        os.kill(server.job.pid, signal.SIGTERM)
        outcome = server.job.wait(60, grace_s=30)
    assert (outcome.exit_code, outcome.orphans) == (0, []), outcome
