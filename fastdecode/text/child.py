"""A child process for what a model directory's authors programmed: tokenizers and chat templates.

The child answers one question after the other within limits. If it dies, the next question gets a
new one. Questions and answers are JSON, and no answer is trusted: whoever asks checks it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from fastdecode.core.errors import CHILD_DIED, RequestError

MAX_ANSWER_BYTES = 512 << 20
# The child finds modules where we do, and nowhere else: -I leaves out the working directory.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; from fastdecode.text.child_main import main; "
    "main(int(sys.argv[1]))"
)
# The rest of our environment may hold secrets.
_INHERITED = "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR"
_QUIET = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
_CRASHES = signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE


@dataclass(frozen=True)
class Limits:
    """Limits of a child."""

    memory_bytes: int
    """Address space, Python's own 50 MB among it."""
    cpu_s: int
    """CPU time of one question."""
    open_cpu_s: int
    """CPU time of the start."""
    slowness: int = 12
    """On a busy machine, this many times the CPU time may pass by the clock."""


class ChildFailedError(Exception):
    """A question has no answer. ``refused``: the child can't do it, and hit no limit."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class ChildDiedError(ChildFailedError):
    """The child was ended from outside, for example for lack of memory, twice in a row."""

    def as_request_error(self) -> RequestError:
        """Return the error of the request, which is not to blame and may be sent again."""
        return RequestError(f"a process that prepares prompts was ended: {self}", code=CHILD_DIED)


class LimitedChild:
    """Asks a child process, which starts with the first question and ends with this process.

    Args:
        opening: what the child does: see ``child_main.open_service``.
        limits: what it may take.
    """

    def __init__(self, opening: Mapping[str, Any], limits: Limits) -> None:
        self._opening = {"limits": asdict(limits), **opening}
        self._limits = limits
        self._asking = threading.Lock()  # an answer belongs to whoever asked
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._stop: weakref.finalize[..., Any] | None = None

    def open(self) -> None:
        """Start the child, unless it runs.

        Raises:
            ChildFailedError: If it can't do its work. The next question tries again.
        """
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        with theirs:
            # A process group of its own: an interrupt at the keyboard is for us alone.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _BOOT, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], env=inherited | _QUIET, start_new_session=True,
            )  # fmt: skip
        self._connection = Connection(ours.detach())
        self._stop = weakref.finalize(self, _end, self._process, self._connection)
        try:
            self._exchange(self._opening, self._limits.open_cpu_s)
        except ChildFailedError:
            self.close()
            raise

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Return the answer to one question. A child that was ended from outside is replaced once.

        Raises:
            ChildFailedError: If there is none.
        """
        with self._asking:
            try:
                return self._ask(question)
            except ChildDiedError:
                return self._ask(question)

    def close(self) -> None:
        """End the child. Safe to call twice; a question after that starts another."""
        if self._stop is not None:
            self._stop()
        self._process = self._connection = self._stop = None

    def _ask(self, question: Mapping[str, Any]) -> Any:
        self.open()
        return self._exchange(question, self._limits.cpu_s)

    def _exchange(self, question: Mapping[str, Any], cpu_s: int) -> Any:
        process, connection = self._process, self._connection
        assert process is not None and connection is not None
        wall_s = cpu_s * self._limits.slowness
        try:
            raw = pack(question)
        except (TypeError, ValueError, RecursionError) as error:
            raise ChildFailedError(f"it can't be said in JSON: {error}", refused=True) from None
        try:
            _limit_waits(connection, wall_s)
            connection.send_bytes(raw)
            answer = unpack(connection.recv_bytes(MAX_ANSWER_BYTES))
            kind, said = answer["kind"], answer["said"]
        except BlockingIOError:  # a wait has timed out
            self.close()
            raise ChildFailedError(f"it took more than {wall_s} s") from None
        except (OSError, EOFError, ValueError, RecursionError, TypeError, KeyError):
            process.kill()  # unless it has ended by itself
            status = process.wait()
            self.close()
            raise _failure(status, cpu_s) from None
        except BaseException:  # interrupted: its answer would be taken for the next question's
            self.close()
            raise
        if kind != "answer":
            raise ChildFailedError(str(said), refused=kind == "refusal")
        return said


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as it travels. Half a surrogate pair, which JSON can spell, passes."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


def unpack(raw: bytes) -> Any:
    """Return the message in ``raw``. Raises ValueError, RecursionError: If it is none."""
    return json.loads(raw.decode("utf-8", "surrogatepass"))


def _limit_waits(connection: Connection, wall_s: int) -> None:
    """Let sending and receiving raise BlockingIOError after ``wall_s``."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", wall_s, 0))


def _failure(status: int, cpu_s: int) -> ChildFailedError:
    """Return what a child died of, by its exit status."""
    if status == -signal.SIGXCPU:
        return ChildFailedError(f"it took more than {cpu_s} s")
    if -status in _CRASHES:
        name = signal.Signals(-status).name
        return ChildFailedError(f"it crashed ({name}), maybe for lack of memory")
    return ChildDiedError(f"it broke off (exit status {status})")


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    connection.close()
    process.wait()
