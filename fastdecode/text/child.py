"""A process for work that a model directory's authors programmed: it has
limits, and may die of them.

A chat template is a program, and so, with its regular expressions and
replacements, is a tokenizer. Neither is run in the process that runs the model,
where one that never ends or asks for all memory would be everybody's end. It
runs in a child that serves one question after the other, so that a question
costs no start of a process; if the child dies, the question is answered with an
error, and the next one has a new child.

Questions and answers are JSON, each with its length before it. Nothing that a
child says is trusted: an answer is of bounded length, and is checked by whoever
asked.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from fastdecode.core.errors import CHILD_DIED, RequestError
from fastdecode.text.child_words import LENGTH, pack, unpack

MAX_ANSWER_BYTES = 512 << 20
_KILLS: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

# The child looks for modules where we do, and nowhere else: -I leaves out the working directory.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; from fastdecode.text.child_main import main; "
    "main(sys.argv[1])"
)


@dataclass(frozen=True)
class Limits:
    """Of a child."""

    memory_bytes: int
    """Of address space, Python's own 50 MB among them."""
    cpu_s: int
    """For one question."""
    open_cpu_s: int
    """For its start."""
    slowness: int = 12
    """On a busy machine, all of that may take so many times longer by the clock."""


class ChildFailedError(Exception):
    """A question has no answer. ``refused``: what is asked for can't be done;
    otherwise the child hit a limit or broke, and the message says of what."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class ChildDiedError(ChildFailedError):
    """The child's process was killed from outside, which says nothing of the question."""


class _CrashError(ChildFailedError):
    """The child's process ended by itself."""


def died(error: ChildDiedError) -> RequestError:
    """Return the error of a request whose child died twice: another attempt may succeed."""
    return RequestError(
        f"the process that renders and encodes prompts died twice: {error}; try again",
        code=CHILD_DIED,
    )


class LimitedChild:
    """Asks a child process. It starts when it is first asked, and ends with
    ``close`` or with this process.

    Args:
        service: what it does; see ``child_main``.
        opening: what the service is told first.
        limits: what it may take.
    """

    def __init__(
        self, service: Literal["template", "tokenizer"], opening: Mapping[str, Any], limits: Limits
    ) -> None:
        self._service = service
        self._opening = {"limits": asdict(limits), **opening}
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._asking = threading.Lock()  # an answer is for whoever asked
        self._stop: weakref.finalize[..., Any] | None = None

    def open(self) -> Any:
        """Start the child, unless it runs. Returns what the service says of its
        opening.

        Raises:
            ChildFailedError: it can't do its work; the next question tries
                again.
        """
        if self._process is not None:
            return None
        command = [sys.executable, "-I", "-c", _BOOT, self._service, *sys.path]
        # A process group of its own: an interrupt at the keyboard is for us, not for the child.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=_environment(),
            start_new_session=True,
        )  # fmt: skip
        self._stop = weakref.finalize(self, _end, self._process)
        try:
            return self._ask(self._opening, self._limits.open_cpu_s)
        except ChildFailedError:
            self.close()
            raise

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Return the service's answer to one question. A child that ends is replaced once.

        Raises:
            ChildFailedError: If there is none.
            ChildDiedError: If the second child was killed, too.
        """
        with self._asking:
            try:
                self.open()
                return self._ask(question, self._limits.cpu_s)
            except (ChildDiedError, _CrashError):
                self.open()
                return self._ask(question, self._limits.cpu_s)

    def close(self) -> None:
        """End the child. Safe to call twice; a question after that starts another."""
        if self._stop is not None:
            self._stop()
        self._process = self._stop = None

    def _ask(self, question: Mapping[str, Any], cpu_s: int) -> Any:
        process = self._process
        assert process is not None
        try:
            raw = pack(question)
        except (TypeError, ValueError, RecursionError) as error:
            raise ChildFailedError(f"it can't be said in JSON: {error}", refused=True) from None
        wall_s = cpu_s * self._limits.slowness
        try:
            _send(process, raw)
            answer = unpack(_receive(process, time.monotonic() + wall_s))
            kind, said = answer["kind"], answer["said"]
        except TimeoutError:
            self.close()
            raise ChildFailedError(f"it took more than {wall_s} s") from None
        except (OSError, EOFError, ValueError, RecursionError, TypeError, KeyError):
            # Another child for the next question, if this one hasn't ended by itself.
            process.kill()
            status = process.wait()
            self.close()
            if status == -signal.SIGXCPU:
                raise ChildFailedError(f"it took more than {cpu_s} s") from None
            was_killed = -status in _KILLS
            raise (ChildDiedError if was_killed else _CrashError)(_cause(status)) from None
        except BaseException:  # interrupted: its answer would be taken for the next question's
            self.close()
            raise
        if kind != "answer":
            raise ChildFailedError(str(said), refused=kind == "refusal")
        return said


def _environment() -> dict[str, str]:
    """A child is one thread, and keeps its panics to itself."""
    quiet = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    return {**os.environ, **quiet}


def _send(process: subprocess.Popen[bytes], raw: bytes) -> None:
    assert process.stdin is not None
    rest = memoryview(LENGTH.pack(len(raw)) + raw)
    while rest:
        rest = rest[process.stdin.write(rest) or 0 :]


def _receive(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    (length,) = LENGTH.unpack(_read(process, LENGTH.size, deadline))
    if length > MAX_ANSWER_BYTES:
        raise ValueError("too long")
    return _read(process, length, deadline)


def _read(process: subprocess.Popen[bytes], num_bytes: int, deadline: float) -> bytes:
    assert process.stdout is not None
    fd = process.stdout.fileno()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    raw = bytearray()
    while len(raw) < num_bytes:
        if not poll.poll(max(0, deadline - time.monotonic()) * 1e3):
            raise TimeoutError
        piece = os.read(fd, min(num_bytes - len(raw), 1 << 20))
        if not piece:
            raise EOFError
        raw += piece
    return bytes(raw)


def _cause(status: int) -> str:
    """Return what a child died of, by its exit status."""
    if status < 0 and -status != signal.SIGKILL:
        return f"it crashed ({signal.Signals(-status).name}), maybe for lack of memory"
    return f"it broke off (exit status {status})"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
    process.wait()
