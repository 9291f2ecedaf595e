"""The other side of a connection, in a process of its own, that does as it is told.

The test's process listens on a Unix socket; each puppet connects, says its number, and then obeys.
What a call gives comes back as it is, errors as (type name, code, text)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import psutil
from messages_for_tests import answer

from fastdecode.core.errors import FastDecodeError, WorkerError
from fastdecode.wire.messages import Accepted, Attend

WAIT_S = 60.0


class Puppets:
    """The test's side: started puppets, by number."""

    def __init__(self, path: Path, numbers: list[int]) -> None:
        self._listener = Listener(str(path), "AF_UNIX")
        self._numbers = numbers
        self.puppets: dict[int, Puppet] = {}

    def wait(self) -> list[Puppet]:
        """All of them, once they have connected."""
        while set(self.puppets) != set(self._numbers):
            channel = self._listener.accept()
            number, pid = channel.recv()
            self.puppets[number] = Puppet(channel, pid)
        return [self.puppets[number] for number in self._numbers]

    def close(self) -> None:
        for puppet in self.puppets.values():
            puppet.channel.close()
        self._listener.close()


class Puppet:
    """Calls methods of the puppet's connection, or of the puppet itself."""

    def __init__(self, channel: Connection, pid: int) -> None:
        self.channel = channel
        self.pid = pid
        self._is_busy = False

    def call(self, name: str, *args: Any) -> Any:
        self.start(name, *args)
        return self.result()

    def start(self, name: str, *args: Any) -> None:
        """Have it do that; ``result`` waits for the outcome. What it did before
        has ended, wanted or not."""
        if self._is_busy:
            self._outcome()
        self.channel.send((name, args))
        self._is_busy = True

    def result(self) -> Any:
        outcome, value = self._outcome()
        if outcome == "ok":
            return value
        kind, code, text = value
        raise (
            WorkerError(text, code=code)
            if kind == "WorkerError"
            else AssertionError(f"{kind}: {text}")
        )

    def _outcome(self) -> tuple[str, Any]:
        if not self.channel.poll(WAIT_S):
            raise TimeoutError("the puppet hangs")
        self._is_busy = False
        outcome: tuple[str, Any] = self.channel.recv()
        return outcome

    def send(self, message: Any) -> None:
        self.call("send", message)

    def receive(self, timeout_s: float | None = None) -> Any:
        return self.call("receive", timeout_s)

    def poll(self) -> Any:
        return self.call("poll")

    def close(self) -> None:
        self.call("close")

    def kill(self) -> None:
        """End its process; it is gone when this returns."""
        process = psutil.Process(self.pid)
        process.kill()
        process.wait(WAIT_S)


class LocalPuppet:
    """The same in this process: what it is to ``start`` runs in a thread."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.receive, self.send = connection.receive, connection.send
        self.poll, self.close = connection.poll, connection.close
        self._running: InThread | None = None

    def start(self, name: str, *args: Any) -> None:
        self._running = InThread(lambda: perform(self._connection, name, args))

    def result(self) -> Any:
        assert self._running is not None
        return self._running.result()


class InThread:
    """Runs ``act`` in a thread; ``result`` waits for what it gave."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._outcome.append(act()), daemon=True)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(WAIT_S)
        assert self._outcome, "the thread hangs or has failed"
        return self._outcome[0]


def obey(path: str, number: int, pid: int, open_connection: Callable[..., Any]) -> None:
    """The puppet's loop, until the test's side hangs up; it listens by now.
    ``open_connection(*args)`` is what "open" calls."""
    channel = Client(path, "AF_UNIX")
    channel.send((number, pid))
    connection: Any = None
    while True:
        try:
            name, args = channel.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            if name == "open":
                connection, value = open_connection(*args)
            else:
                value = perform(connection, name, args)
            outcome = ("ok", value)
        except Exception as error:
            code = error.code if isinstance(error, FastDecodeError) else ""
            outcome = ("error", (type(error).__name__, code, str(error)))
        try:
            channel.send(outcome)
        except OSError:
            return


def perform(connection: Any, name: str, args: tuple[Any, ...]) -> Any:
    """One thing that a puppet is told: a method of its connection, or one of those below."""
    own = {
        "answer": _answer,
        "hold": _hold,
        "hold_quietly": _hold_quietly,
        "send_raw": _send_raw,
    }.get(name)
    return getattr(connection, name)(*args) if own is None else own(connection, *args)


def _answer(connection: Any, num_messages: int) -> int:
    """Answer attends as they come, each with q + 1."""
    for _ in range(num_messages):
        message = connection.receive(WAIT_S)
        assert isinstance(message, Attend)
        connection.send(answer(message))
    return num_messages


def _hold(connection: Any, num_messages: int) -> list[Any]:
    """Receive and keep that many messages; say ``Accepted`` at the last; give them all."""
    held = [connection.receive(WAIT_S) for _ in range(num_messages)]
    connection.send(Accepted(num_messages))
    return held


def _hold_quietly(connection: Any, num_messages: int) -> list[Any]:
    return [connection.receive(WAIT_S) for _ in range(num_messages)]


def _send_raw(connection: Any, data: bytes) -> None:
    """Bytes that no codec has written, as an MPI message."""
    with connection.job.lock:
        connection.job.isend(connection.rank, connection.line, data)
