"""A batch job's output: answers appended one by one, so that no moment at which the process may die loses or doubles
one.

An answer counts once its line, with the newline at its end, is in the file. Every line is handed to the operating
system whole as soon as it is there, which a dying process can't undo; ``fsync``, now and then, is for a dying machine.
What such a death leaves at the end (half a line, or blocks that never got their data) is cut off by ``reopen``. One
process at a time holds the file, by ``flock``.
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

from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.jobs.line_set import LineSet

# Which line an answer is for, and whether it is an error; KeyError, ValueError or TypeError: it is no answer of ours.
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
    """An output that is open for appending. Made by ``create`` or ``reopen``; close it.

    Args:
        path: for messages.
        fd: opened for appending, and locked.
        sync_lines: fsync after so many lines,
        sync_s: or so many seconds after the first that isn't synced.
        clock: in seconds.
    """

    def __init__(
        self, path: Path, fd: int, *, sync_lines: int, sync_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._fd = fd
        self._sync_lines = sync_lines
        self._sync_s = sync_s
        self._clock = clock
        self._num_unsynced = 0
        self._unsynced_since = 0.0
        self.num_syncs = 0

    def append(self, answer: dict[str, Any]) -> None:
        """Write one line.

        Raises:
            FastDecodeError: (code ``output_failed``) the disk is full, or gone.
        """
        # A lone surrogate, quoted from a bad line, becomes the JSON escape that it came as.
        line = json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        if not self._num_unsynced:
            self._unsynced_since = self._clock()
        try:
            _write_all(self._fd, line)
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
            f"can't write the output file {self._path}: {error.strerror}; when there is room, go on with --resume",
            code="output_failed",
        )


def create(path: Path) -> int:
    """A new output, locked. Returns its file descriptor.

    Raises:
        ConfigError: it exists, or can't be made.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"can't write the output file {path}: {error.strerror}") from None
    _lock(fd, path)
    sync_directory(path)
    return fd


def discard(path: Path) -> None:
    """Remove an output, unless a run is writing it. Raises ConfigError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"can't remove the output file {path}: {error.strerror}") from None
    try:
        _lock(fd, path)
        path.unlink()
        sync_directory(path)
    except OSError as error:
        raise ConfigError(f"can't remove the output file {path}: {error.strerror}") from None
    finally:
        os.close(fd)


def reopen(path: Path, identify: Identify, *, retry_errors: bool = False) -> tuple[int, Recovered]:
    """An existing output, locked, and what it holds; a torn end is cut off.

    Args:
        identify: which line an answer is for.
        retry_errors: take answers that are errors out of the file.

    Raises:
        ConfigError: somebody else holds it, it can't be opened, or it holds what isn't this run's.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"can't write the output file {path}: {error.strerror}") from None
    try:
        _lock(fd, path)
        found, good_bytes = _scan(path, identify)
        if found.num_torn_bytes:
            os.ftruncate(fd, good_bytes)
            os.fsync(fd)
        if retry_errors and found.num_failed:
            fd, found = _without_errors(path, fd, identify, found)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"can't repair the output file {path}: {error.strerror}") from None
    except BaseException:
        os.close(fd)
        raise
    return fd, found


def sync_directory(path: Path) -> None:
    """Have the file's name survive a power cut."""
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another run is writing {path}: wait for it to end, or stop it") from None
    except OSError:
        return  # a file system without locks; then whoever runs two at once has to know


def _scan(path: Path, identify: Identify) -> tuple[Recovered, int]:
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
                    f"line {torn_at} of {path} is no answer, but lines after it are: that isn't how an interrupted run "
                    f"ends, so somebody else has written there; restore the file, or start anew with --overwrite"
                )
            _note(found, answer, identify, f"line {place} of {path}")
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


def _note(found: Recovered, answer: dict[str, Any], identify: Identify, where: str) -> None:
    try:
        number, failed = identify(answer)
        if number < 1:
            raise ValueError("no line has such a number")
    except (KeyError, ValueError, TypeError):
        text = f"{where} is no answer of the run that its manifest tells of: start anew with --overwrite"
        raise ConfigError(text) from None
    if number in found.done:
        raise ConfigError(f"{where} answers line {number} a second time: remove it, or start anew with --overwrite")
    found.done.add(number)
    found.num_failed += failed


def _without_errors(path: Path, fd: int, identify: Identify, before: Recovered) -> tuple[int, Recovered]:
    """The output with its errors taken out: a new file that takes the old one's name when it is whole."""
    found = Recovered(num_torn_bytes=before.num_torn_bytes, num_retried=before.num_failed)
    temporary = path.with_name(path.name + ".tmp")
    new = os.open(temporary, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _lock(new, path)
        with path.open("rb") as file:
            for raw in file:
                number, failed = identify(json.loads(raw))
                if not failed:
                    found.done.add(number)
                    _write_all(new, raw)
        os.fsync(new)
        os.replace(temporary, path)
        sync_directory(path)
    except BaseException:
        os.close(new)
        temporary.unlink(missing_ok=True)
        raise
    os.close(fd)
    return new, found


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
