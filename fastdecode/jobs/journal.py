"""A batch job's output: answers appended one by one, so that no moment at which
the process may die loses or doubles one.

An answer counts once its line, with the newline at its end, is in the file.
Every line is handed to the operating system whole as soon as it is there, which
a dying process can't undo; ``fsync``, now and then, is for a dying machine.
What such a death leaves at the end (half a line, or blocks that never got their
data) is cut off by ``recover``. One process at a time holds the file, by
``flock``, from before it decides what to do with it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.core.files import write_whole
from fastdecode.core.json_file import sync_directory
from fastdecode.core.os_errors import explained
from fastdecode.jobs.line_set import LineSet

# Which line an answer is for, and whether it is an error; KeyError, ValueError
# or TypeError: it is no answer of ours.
Identify: TypeAlias = Callable[[dict[str, Any]], tuple[int, bool]]


@dataclass
class Recovered:
    """What an output already holds."""

    done: LineSet = field(default_factory=LineSet)
    """Lines that are answered."""
    num_failed: int = 0
    """Of those, with an error."""
    num_torn_bytes: int = 0
    """Cut off at the end."""
    num_retried: int = 0
    """Errors that were taken out, to be tried again."""


class Journal:
    """An output that is open for appending; close it.

    Args:
        path: for messages.
        fd: of an output that is held.
        sync_lines: fsync after so many lines,
        sync_s: or so many seconds after the first that isn't synced.
        clock: in seconds.
        before_sync: called before each fsync.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        *,
        sync_lines: int,
        sync_s: float,
        clock: Clock = time.monotonic,
        before_sync: Callable[[], None] = lambda: None,
    ) -> None:
        self._before_sync = before_sync
        self._path = path
        self._fd = fd
        self._sync_lines = sync_lines
        self._sync_s = sync_s
        self._clock = clock
        self._num_unsynced = 0
        self._unsynced_since = 0.0
        self.num_syncs = 0

    def begin(self) -> None:
        """It has begun."""

    def append(self, place: int, prompt: str | None, answer: dict[str, Any]) -> None:
        """Write one answer, whichever line it is for.

        Raises:
            FastDecodeError: (code ``output_failed``) the disk is full, or gone.
        """
        # A lone surrogate, quoted from a bad line, becomes the JSON escape that it came as.
        line = json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        if not self._num_unsynced:
            self._unsynced_since = self._clock()
        try:
            write_whole(self._fd, line)
        except OSError as error:
            raise self._failed(error) from None
        self._num_unsynced += 1
        self.sync_if_due()

    def sync_if_due(self) -> None:
        """Call this now and then."""
        is_due = self._num_unsynced >= self._sync_lines or (
            self._num_unsynced and self._clock() - self._unsynced_since >= self._sync_s
        )
        if is_due:
            self.sync()

    def sync(self) -> None:
        """Have what was written survive a power cut."""
        if not self._num_unsynced:
            return
        self._before_sync()
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed(error) from None
        self._num_unsynced = 0
        self.num_syncs += 1

    def close(self) -> None:
        """Sync, and let go of the file."""
        try:
            self.sync()
        finally:
            os.close(self._fd)

    def _failed(self, error: OSError) -> FastDecodeError:
        return FastDecodeError(
            f"can't write the output file {self._path}: {error.strerror}; when there is room, go "
            "on with --resume",
            code="output_failed",
        )


class HeldOutput:
    """An output that this process holds and no other; let go of it, or make a
    ``Journal`` of its ``fd``."""

    def __init__(self, path: Path, fd: int, *, is_new: bool) -> None:
        self.path = path
        self.fd = fd
        """Opened for reading and appending, and locked."""
        self._is_new = is_new

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing that a run could go on with."""
        return os.fstat(self.fd).st_size == 0

    def empty(self) -> None:
        """Throw away what it holds. Raises ConfigError."""
        try:
            os.ftruncate(self.fd, 0)
            os.fsync(self.fd)
            sync_directory(self.path.parent)
        except OSError as error:
            raise ConfigError(
                f"can't empty the output file {self.path}: {explained(error)}"
            ) from None

    def recover(
        self, identify: Identify, *, last_line: int, retry_errors: bool = False
    ) -> Recovered:
        """What it holds; a torn end is cut off.

        Args:
            identify: which line an answer is for.
            last_line: no line has a higher number.
            retry_errors: take answers that are errors out of the file.

        Raises:
            ConfigError: it can't be mended, or it holds what isn't this run's.
        """
        try:
            found, good_bytes = _scan(self.path, identify, last_line)
            if found.num_torn_bytes:
                os.ftruncate(self.fd, good_bytes)
                os.fsync(self.fd)
            if retry_errors and found.num_failed:
                self.fd, found = _without_errors(self.path, self.fd, identify, found)
        except OSError as error:
            raise ConfigError(
                f"can't repair the output file {self.path}: {explained(error)}"
            ) from None
        return found

    def let_go(self) -> None:
        """Leave it as it was found: if it wasn't there, it won't be."""
        if self._is_new and self.is_empty:
            self.path.unlink(missing_ok=True)
        os.close(self.fd)


def hold(path: Path) -> HeldOutput:
    """Open and lock an output; make an empty one if there is none.

    Raises:
        ConfigError: another run holds it, or it can't be opened.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    while True:
        is_new = not path.exists()
        try:
            fd = os.open(path, flags, 0o666)
        except OSError as error:
            raise ConfigError(f"can't write the output file {path}: {explained(error)}") from None
        try:
            _lock(fd, path)
        except BaseException:
            os.close(fd)
            raise
        if _is_still(path, fd):
            return HeldOutput(path, fd, is_new=is_new)
        os.close(fd)  # whoever held it has put another file in its place, or taken it away


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"another run is writing {path}: wait for it to end, or stop it"
        ) from None
    except OSError:
        return  # a file system without locks; then whoever runs two at once has to know


def _is_still(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _scan(path: Path, identify: Identify, last_line: int) -> tuple[Recovered, int]:
    """What an output holds, and how many bytes of it are good."""
    found = Recovered()
    good_bytes = 0
    torn_at: int | None = None
    with path.open("rb") as file:
        for place, raw in enumerate(file, start=1):
            answer = _parse(raw)
            if answer is None:
                torn_at = place if torn_at is None else torn_at
                continue
            if torn_at is not None:
                raise ConfigError(
                    f"line {torn_at} of {path} is no answer, but lines after it are: that isn't "
                    "how an interrupted run ends, so somebody else has written there; restore the "
                    "file, or start anew with --overwrite"
                )
            _note(found, answer, identify, last_line, f"line {place} of {path}")
            good_bytes += len(raw)
        found.num_torn_bytes = file.tell() - good_bytes
    return found, good_bytes


def _parse(raw: bytes) -> dict[str, Any] | None:
    """A whole line's answer; None if it is torn."""
    if not raw.endswith(b"\n"):
        return None
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _note(
    found: Recovered, answer: dict[str, Any], identify: Identify, last_line: int, where: str
) -> None:
    try:
        number, failed = identify(answer)
        if not 1 <= number <= last_line:
            raise ValueError("no line has such a number")
    except (KeyError, ValueError, TypeError):
        text = (
            f"{where} is no answer of the run that its manifest tells of: start anew with "
            "--overwrite"
        )
        raise ConfigError(text) from None
    if number in found.done:
        raise ConfigError(
            f"{where} answers line {number} a second time: remove it, or start anew with "
            "--overwrite"
        )
    found.done.add(number)
    found.num_failed += failed


def _without_errors(
    path: Path, fd: int, identify: Identify, before: Recovered
) -> tuple[int, Recovered]:
    """The output with its errors taken out: a new file that takes the old one's
    name when it is whole."""
    found = Recovered(num_torn_bytes=before.num_torn_bytes, num_retried=before.num_failed)
    temporary = path.with_name(path.name + ".tmp")
    new = os.open(
        temporary, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666
    )
    try:
        _lock(new, path)
        with path.open("rb") as file:
            for raw in file:
                number, failed = identify(json.loads(raw))
                if not failed:
                    found.done.add(number)
                    write_whole(new, raw)
        os.fsync(new)
        os.replace(temporary, path)
        sync_directory(path.parent)
    except BaseException:
        os.close(new)
        temporary.unlink(missing_ok=True)
        raise
    os.close(fd)
    return new, found
