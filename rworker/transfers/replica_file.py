"""Replicas in files: what a neighbour would be sent is appended to a file instead, so any R-worker
that reaches the directory can restore the cache.

A file is records (``rworker.stream.files``): the ``Hello`` that opens the replica, every change of
the cache, and its K and V. Reading it gives the cache, or what it was earlier if the file ends in
the middle: never anything but a prefix of every sequence. What is answered for is on the disk.

Once a file is twice as long as its cache, another one is begun under another name, and replaces it
when it has all that the cache has.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, cast

from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.core.json_file import sync_directory
from fastdecode.wire.messages import Accepted, FromRWorker, Hello, ToRWorker, Welcome
from rworker.instructions import LinkReplica, ReadReplica
from rworker.stream.files import RecordWriter, read_records
from rworker.stream.mirror import UNANSWERED
from rworker.transfers.neighbours import NeighbourConnection

logger = logging.getLogger(__name__)

MOST_LENGTHS: Final = 2.0
"""Length of a file, in lengths of its cache, at which another one is begun."""
LEAST_BYTES: Final = 1 << 26
"""Length that a file may have in any case."""
_NEW: Final = ".new"
_OLD_S: Final = 3600.0
"""Age of a file that its job may have left behind."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class ReplicaSink:
    """Where a replica goes: to another R-worker, or into a file."""

    connect: Callable[[], NeighbourConnection]
    """Begins a new replica. Raises FastDecodeError: If it can't."""
    most_bytes: float = math.inf
    """Bytes of K and V after which a new replica is begun."""
    settle: Callable[[], None] = _nothing
    """Puts the new replica, which has all of the cache, in the place of the one before."""
    discard: Callable[[], None] = _nothing
    """Removes the replica."""
    abandon: Callable[[], None] = _nothing
    """Removes the new replica, which has failed."""


class ReplicaFiles:
    """Files of replicas in one directory, which is the user's own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._has_looked = False

    def sink(self, order: LinkReplica) -> ReplicaSink:
        """Return where the replica of an order goes."""
        hello = order.books.hello
        self._tell_of_old(hello.session)
        self.remove(hello.session, order.holder, order.number)  # earlier ones are over
        path = self._directory / f"{_stem(hello.session, order.holder)}{order.number}.kv"
        cache_bytes = order.books.store.num_blocks * hello.kv.block_bytes
        return ReplicaSink(
            partial(self._begin, path),
            max(LEAST_BYTES, MOST_LENGTHS * cache_bytes),
            partial(settle, path),
            partial(self.remove, hello.session, order.holder, order.number),
            partial(_remove, _new(path)),
        )

    def read(self, order: ReadReplica) -> Iterator[ToRWorker]:
        """Return the messages in the file of a holder's last link, up to its end or damage.

        Raises:
            ConfigError: If there is none, or where it is damaged.
        """
        stem = _stem(order.message.session, order.message.holder)
        numbers = [number for number, _ in self._files(stem)]
        if not numbers:
            raise ConfigError(f"there is none in {self._directory}")
        path = self._directory / f"{stem}{max(numbers)}.kv"
        yield from cast(Iterator[ToRWorker], read_records(path))  # its state refuses others

    def remove(self, session: int, holder: int, link: int) -> None:
        """Remove a holder's files up to this link. A later one is a successor's, of which an
        R-worker that was given up may not know. A file that can't be removed stays."""
        for number, path in self._files(_stem(session, holder)):
            if number <= link:
                _remove(path)

    def _files(self, stem: str) -> Iterator[tuple[int, Path]]:
        """Return the files of a holder, each with the number of its link."""
        for path in self._directory.glob(f"{stem}*.kv*"):
            with contextlib.suppress(ValueError):  # not a number: not ours
                yield int(path.name.removeprefix(stem).split(".")[0]), path

    def _tell_of_old(self, session: int) -> None:
        """Log once what killed jobs may have left here. Only people know whether they are over."""
        if self._has_looked:
            return
        self._has_looked, since_s = True, time.time() - _OLD_S
        own, old = _stem(session, 0)[:-2], list[int]()
        for path in self._directory.glob("replica-*.kv*"):
            with contextlib.suppress(OSError):
                found = path.lstat()
                if not path.name.startswith(own) and found.st_mtime < since_s:
                    old.append(found.st_size)
        if old:
            logger.warning(
                "%s: %d file(s) with replicas of other jobs (replica-*.kv, %d bytes) were not "
                "written for an hour. Remove those of jobs that are over",
                self._directory,
                len(old),
                sum(old),
            )

    def _begin(self, path: Path) -> NeighbourConnection:
        if path.exists():
            path = _new(path)
        try:
            path.unlink(missing_ok=True)
            return FileConnection(path)
        except OSError as error:
            raise _refusal(path, error) from None


def _stem(session: int, holder: int) -> str:
    return f"replica-{session:016x}-{holder}-"


def settle(path: Path) -> None:
    """Put a new file in the place of the one before. Raises ConfigError: If it can't."""
    try:
        _new(path).rename(path)
    except OSError as error:
        raise _refusal(path, error) from None
    with contextlib.suppress(OSError):  # else the one before is back when the power fails
        sync_directory(path.parent)


def _new(path: Path) -> Path:
    """Return the path of the file that will replace ``path``."""
    return path.with_name(path.name + _NEW)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _refusal(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"can't write {path}: {error.strerror}")


class FileConnection:
    """A connection to a file, as to the R-worker that would keep the replica. A thread writes what
    is sent, and answers it once it is on the disk.

    Raises:
        OSError: If the file can't be made.
    """

    heard_s = None
    is_reached = True

    def __init__(self, path: Path) -> None:
        self.peer = str(path)
        self._writer = RecordWriter(path)
        try:
            sync_directory(path.parent)  # what is answered for can be found, too
        except OSError:
            self._writer.close()
            _remove(path)
            raise
        self._answers: deque[FromRWorker] = deque()
        self._error: str | None = None
        self._messages: queue.SimpleQueue[ToRWorker | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="replica-file", daemon=True).start()

    def send(self, message: ToRWorker) -> None:
        self._check()
        self._messages.put(message)

    def poll(self) -> FromRWorker | None:
        if self._answers:
            return self._answers.popleft()
        self._check()
        return None

    def receive(self, timeout_s: float | None = None) -> FromRWorker:
        raise AssertionError("a replica's link is polled")

    def close(self) -> None:
        """Write nothing more. The file stays."""
        self._messages.put(None)

    @property
    def is_open(self) -> bool:
        return self._error is None

    def _check(self) -> None:
        if self._error is not None:
            raise WorkerError(f"{self.peer}: {self._error}")

    def _write(self) -> None:
        try:
            while self._write_all():
                pass
        except Exception as error:  # whatever it is, its owner would wait for ever
            self._error = getattr(error, "strerror", "") or f"{type(error).__name__}: {error}"
        finally:
            self._writer.close()

    def _write_all(self) -> bool:
        """Write what waits, then answer it. Return False if that was the last of all."""
        messages = [self._messages.get()]
        while not self._messages.empty():
            messages.append(self._messages.get())
        there = [message for message in messages if message is not None]
        for message in there:
            self._writer.write(message)
        self._writer.sync()
        self._answers.extend(answer_of(each) for each in there if not isinstance(each, UNANSWERED))
        return len(there) == len(messages)


def answer_of(message: ToRWorker) -> FromRWorker:
    """Return how an R-worker answers."""
    if isinstance(message, Hello):
        return Welcome("a file", message.max_blocks, message.kv.block_size, 1)
    return Accepted(message.sequence_id)  # type: ignore[union-attr]
