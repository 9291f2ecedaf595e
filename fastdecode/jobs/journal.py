"""Outputs of a job: a journal of answers as they come, or answers in the order of the input.

An answer counts once its line, with the newline at its end, is in the file. Every line is handed
to the operating system whole, which a dying process can't undo. ``fsync``, now and then, is for a
dying machine. What such a death leaves at the end (half a line, or blocks that never got their
data) is cut off by ``recover``. One process at a time holds the file, by ``flock``, from before
it decides what to do with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.core.files import write_whole
from fastdecode.core.json_file import sync_directory
from fastdecode.core.os_errors import explained
from fastdecode.jobs.lines import Identify, LineSet, LineSink, Shard

MAX_BYTES_IN_MEMORY: Final = 16 << 20
RESTORE: Final = "restore the file, or run its job again with --overwrite"
OnLine: TypeAlias = Callable[["str | None", dict[str, Any]], None]
"""Gets an answer as it is written, and its prompt if that is text."""


@dataclass
class Recovered:
    """Content of an output that is resumed: lines that are answered, and how many failed."""

    done: LineSet = field(default_factory=LineSet)
    num_failed: int = 0
    num_torn_bytes: int = 0  # bytes that were cut off at the end

    def has(self, name: str) -> bool:
        """Return True if the line of a request or a turn of this name is answered."""
        number = name.partition(".")[0]
        return number.isdecimal() and int(number) in self.done


class Journal:
    """An output that this process holds and no other, open for appending. Close it.

    It is made if it is missing. ``recover`` or ``empty`` it before the first answer. It syncs after
    ``sync_lines`` answers, or ``sync_s`` after the first one that isn't synced. Raises ConfigError:
    If another run holds it, or it can't be opened.
    """

    def __init__(
        self, path: Path, *, sync_lines: int, sync_s: float, clock: Clock = time.monotonic
    ) -> None:
        self._path = path
        self._sync_lines = sync_lines
        self._sync_s = sync_s
        self._clock = clock
        self._num_unsynced = 0
        self._unsynced_since = 0.0
        self.num_syncs = 0
        self.before_sync: Callable[[], None] = lambda: None
        while True:
            self._is_new = not path.exists()
            self._fd = _open_locked(path, path)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(self._fd)):
                    return
            os.close(self._fd)  # the process that held the file has replaced or removed it

    @property
    def is_empty(self) -> bool:
        return os.fstat(self._fd).st_size == 0

    def empty(self) -> None:
        """Throw away what it holds. Raises: ConfigError: If that fails."""
        with _refusing(f"can't empty the output file {self._path}"):
            os.ftruncate(self._fd, 0)
            os.fsync(self._fd)
            sync_directory(self._path.parent)

    def recover(
        self, identify: Identify, last_line: int, shard: Shard, *, retry_errors: bool
    ) -> Recovered:
        """Cut a torn end off, and return what the output holds. Arguments are as of
        ``read_answers``. ``retry_errors`` takes answers that are errors out of the file. Raises
        ConfigError: If it can't be repaired, or holds what isn't this run's."""
        found, good_bytes = Recovered(), 0
        for number, failed, raw in read_answers(self._path, identify, last_line, shard):
            if number in found.done:
                raise ConfigError(
                    f"{self._path} answers line {number} a second time: remove one answer, or "
                    "start again with --overwrite"
                )
            found.done.add(number)
            found.num_failed += failed
            good_bytes += len(raw)
        with _refusing(f"can't repair the output file {self._path}"):
            found.num_torn_bytes = os.fstat(self._fd).st_size - good_bytes
            if found.num_torn_bytes:
                os.ftruncate(self._fd, good_bytes)
                os.fsync(self._fd)
            if retry_errors and found.num_failed:
                good = read_answers(self._path, identify, last_line, shard)
                found.done, found.num_failed = self._take_errors_out(good), 0
        return found

    def _take_errors_out(self, answers: Iterable[tuple[int, bool, bytes]]) -> LineSet:
        """Replace the file, once a new one is whole, by its good answers. Return their lines."""
        done = LineSet()
        temporary = self._path.with_name(self._path.name + ".tmp")
        fd = _open_locked(temporary, self._path, os.O_TRUNC)
        try:
            for number, failed, raw in answers:
                if not failed:
                    done.add(number)
                    write_whole(fd, raw)
            os.fsync(fd)
            os.replace(temporary, self._path)
            sync_directory(self._path.parent)
        except BaseException:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd = fd
        return done

    def begin(self) -> None:
        """Do nothing: the output is open."""

    def expect(self, number: int) -> None:
        """Do nothing: answers stand in the order in which they come."""

    def append(self, number: int, prompt: str | None, answer: dict[str, Any]) -> None:
        """Write one answer. Raises FastDecodeError: (``output_failed``) If the disk refuses it."""
        if not self._num_unsynced:
            self._unsynced_since = self._clock()
        with writing(self._path, "; when there is room, continue with --resume"):
            write_whole(self._fd, _encoded(answer))
        self._num_unsynced += 1
        self.sync_if_due()

    def sync_if_due(self) -> None:
        is_late = self._clock() - self._unsynced_since >= self._sync_s
        if is_late or self._num_unsynced >= self._sync_lines:
            self.sync()

    def sync(self) -> None:
        """Make what was written survive a power cut."""
        if not self._num_unsynced:
            return
        self.before_sync()
        with writing(self._path, "; when there is room, continue with --resume"):
            os.fsync(self._fd)
        self._num_unsynced = 0
        self.num_syncs += 1

    def close(self) -> None:
        try:
            self.sync()
        finally:
            os.close(self._fd)

    def give_up(self) -> None:
        """Let go of an output without answers as it was found."""
        if self._is_new and self.is_empty:
            self._path.unlink(missing_ok=True)
        os.close(self._fd)


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raise an OSError as a ConfigError that begins with ``what``."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what}: {explained(error)}") from None


@contextlib.contextmanager
def writing(output: Path, remedy: str = "", what: str = "write") -> Iterator[None]:
    """Raise an OSError as the failure of an output."""
    try:
        yield
    except OSError as error:
        text = f"can't {what} the output file {output}: {explained(error)}{remedy}"
        raise FastDecodeError(text, code="output_failed") from None


def _open_locked(path: Path, output: Path, more_flags: int = 0) -> int:
    """Return a descriptor of a file for reading and appending. ``output`` is its name in messages.
    Raises ConfigError: If another run holds it, or it can't be opened."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | more_flags
    with _refusing(f"can't write the output file {output}"):
        fd = os.open(path, flags, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        text = f"another run is writing {output}: wait for it to end, or stop it"
        raise ConfigError(text) from None
    except OSError:
        return fd  # a file system without locks
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_answers(
    path: Path, identify: Identify, last_line: int, shard: Shard
) -> Iterator[tuple[int, bool, bytes]]:
    """Yield the line that each answer is for, True if it is an error, and the answer as it stands.
    An incomplete end is left out. Raises ConfigError: If the file can't be read, or holds something
    else: an answer beyond ``last_line``, for example, or of a line that isn't in ``shard``."""
    torn_at = 0
    with _refusing(f"can't read the answers in {path}"), path.open("rb") as file:
        for place, raw in enumerate(file, start=1):
            answer = None
            with contextlib.suppress(ValueError, RecursionError):
                answer = json.loads(raw) if raw.endswith(b"\n") else None
            if not isinstance(answer, dict):
                torn_at = torn_at or place
                continue
            if torn_at:
                raise ConfigError(
                    f"line {torn_at} of {path} is not an answer, but lines after it are. An "
                    f"interrupted run does not end so, another program wrote there: {RESTORE}"
                )
            try:
                number, failed = identify(answer)
            except (KeyError, ValueError, TypeError):
                raise ConfigError(
                    f"line {place} of {path} is not an answer of the run: {RESTORE}"
                ) from None
            if not 1 <= number <= last_line or number not in shard:
                raise ConfigError(
                    f"line {place} of {path} answers line {number} of the input, which is not "
                    f"in shard {shard}: {RESTORE}"
                )
            yield number, failed, raw


class OrderedOutput:
    """An output in the order of the input: answers that are early wait in an unnamed file.

    It can't be resumed. But an interrupted job leaves whole lines, in order.
    """

    def __init__(
        self,
        path: Path,
        on_line: OnLine | None = None,
        *,
        max_bytes_in_memory: int = MAX_BYTES_IN_MEMORY,
    ) -> None:
        self._path = path
        self._on_line = on_line
        self._sink: LineSink | None = None
        self._early = tempfile.SpooledTemporaryFile(  # noqa: SIM115 (closed by close)
            max_bytes_in_memory, dir=str(path.resolve().parent)
        )
        self._offsets: dict[int, int] = {}
        """Lines whose answers wait, and where in the file these begin."""
        self._expected: deque[int] = deque()
        """Lines that have no answer in the output yet, in order."""

    def begin(self) -> None:
        """Replace the output by an empty one. Raises: ConfigError: If it can't be opened."""
        self._sink = LineSink(self._path)

    def expect(self, number: int) -> None:
        """Note that a line is read, whose answer comes after those of the lines before."""
        self._expected.append(number)

    def append(self, number: int, prompt: str | None, answer: dict[str, Any]) -> None:
        """Write an answer and those that waited, or keep it. Raises as ``Journal.append``."""
        line = _encoded(answer)
        if number != self._expected[0]:
            with self._writing("keep an answer beside"):
                offset = self._early.seek(0, os.SEEK_END)
                self._early.write(json.dumps(prompt).encode() + b"\n" + line)
                self._offsets[number] = offset
            return
        self._write(prompt, line)
        self._expected.popleft()
        while self._expected and self._expected[0] in self._offsets:
            self._write_early(self._expected.popleft())
            if not self._offsets:
                self._early.seek(0)
                self._early.truncate()

    def sync_if_due(self) -> None:
        """Do nothing: no run resumes it."""

    def sync(self) -> None:
        """Do nothing: no run resumes it."""

    def close(self) -> None:
        """Write what still waits, in order, though lines before it are missing."""
        try:
            for number in sorted(self._offsets):
                self._write_early(number)
        finally:
            with contextlib.suppress(OSError):  # what can't be written is wanted no more
                self._early.close()
            if self._sink is not None:
                with writing(self._path):
                    self._sink.close()

    @contextlib.contextmanager
    def _writing(self, what: str = "write") -> Iterator[None]:
        try:
            with writing(self._path, what=what):
                yield
        except FastDecodeError:
            self._offsets.clear()  # what waits would come behind a gap
            raise

    def _write_early(self, number: int) -> None:
        with self._writing("read an answer that was kept beside"):
            self._early.seek(self._offsets.pop(number))
            prompt, line = json.loads(self._early.readline()), self._early.readline()
        self._write(prompt, line)

    def _write(self, prompt: str | None, line: bytes) -> None:
        assert self._sink is not None, "not begun"
        with self._writing():
            self._sink.write(line)
        if self._on_line is not None:
            self._on_line(prompt, json.loads(line))


def _encoded(answer: dict[str, Any]) -> bytes:
    # A lone surrogate, quoted from a bad line, becomes the JSON escape that it came as.
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
