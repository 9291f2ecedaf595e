"""SQLite files of one process: private, locked, without what was deleted.

A committed transaction survives the end of the process. After a power cut the file holds all
transactions up to the last ``checkpoint``, and perhaps later ones. SQLite keeps recent
transactions beside the file, in ``NAME-wal``, until it is closed. The lock is SQLite's own, so it
holds on network file systems too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.os_errors import explained

_BESIDE: Final = ("-wal", "-shm")
_NUMBERS: Final = {"database or disk is full": errno.ENOSPC, "disk I/O error": errno.EIO}
_VERSION: Final = 1
_ERASE_BYTES: Final = 1 << 20
_WAIT_S: Final = 0.2
"""Longest wait for a process that has the file open."""


class OtherFileError(Exception):
    """The file is a database of another kind, or none."""


class Database:
    """An SQLite file that no other process writes. Threads must take turns. Close it. If it is
    missing, it is created, readable by its owner only.

    Args:
        kind: SQLite's ``application_id`` of such files, 1 to 2^31 - 1.
        schema: Statements that create the tables of an empty file.

    Raises:
        BlockingIOError: If another process holds the file.
        OtherFileError: If the file holds something else.
        OSError: If it is a link, no regular file, or can't be opened.
        sqlite3.Error: If it is damaged, or the disk is full.
    """

    def __init__(self, path: Path, kind: int, schema: str) -> None:
        _make_private(path)
        self._connection = _connect(path, "rwc")
        # A connection is part of a cycle, so it would keep the lock until garbage is collected.
        self._close = weakref.finalize(self, self._connection.close)
        try:
            with _telling_locks():
                self._connection.execute("PRAGMA locking_mode=EXCLUSIVE").fetchall()
                is_empty = _check_kind(self._connection, kind)
                self._connection.executescript(
                    "PRAGMA auto_vacuum=FULL; PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;"
                    "PRAGMA secure_delete=ON; BEGIN EXCLUSIVE; COMMIT;"
                )
            if is_empty:
                self._connection.executescript(
                    f"BEGIN; {schema} PRAGMA application_id={kind};"
                    f"PRAGMA user_version={_VERSION}; COMMIT;"
                )
            check_whole(self._connection)
        except BaseException:
            self._close()
            raise

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def checkpoint(self) -> None:
        """Make all transactions survive a power cut. No deleted content is left beside the file."""
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Write everything to the file and let other processes use it. Safe to call twice."""
        self._close()


@contextlib.contextmanager
def refusing(path: Path, what: str, place: str | Given = "place") -> Iterator[None]:
    """Turn errors of ``Database`` into ConfigErrors. The option ``place`` decides on ``path``."""
    words: tuple[str | Given, ...] = ("give another ", place)
    try:
        yield
        return
    except OtherFileError:
        words = (f"{path} holds no {what} of this version: ", *words)
    except BlockingIOError:
        words = (f"another process keeps {what} in {path}: wait for it to end, or ", *words)
    except (OSError, sqlite3.OperationalError) as error:
        words = (f"can't keep {what} in {path}: {reason_of(error)}",)
    except sqlite3.Error as error:
        words = (f"{path} is damaged ({error}), and not by a crash: restore the file, or ", *words)
    raise ConfigError(*words)


def reason_of(error: OSError | sqlite3.Error) -> str:
    """Return the system's or SQLite's reason, and what to do about it where that is known."""
    number = _NUMBERS.get(str(error))
    if number is not None:
        error = OSError(number, os.strerror(number))
    return explained(error) if isinstance(error, OSError) else str(error)


@contextlib.contextmanager
def reading(path: Path, kind: int) -> Iterator[sqlite3.Connection]:
    """Open a database without changing it. Raises as ``Database``."""
    with contextlib.closing(_connect(path, "ro")) as connection:
        with _telling_locks():
            if _check_kind(connection, kind):
                raise OtherFileError
        yield connection


def check_whole(connection: sqlite3.Connection) -> None:
    """Raises sqlite3.DatabaseError: If pages of the file contradict each other."""
    ((found, *_), *_) = connection.execute("PRAGMA quick_check(1)").fetchall()
    if found != "ok":
        raise sqlite3.DatabaseError(str(found).replace("\n", " "))


def remove(path: Path) -> None:
    """Remove a database and what a killed process left beside it. It may be missing."""
    for name in (*(path.name + suffix for suffix in _BESIDE), path.name):
        path.with_name(name).unlink(missing_ok=True)


def erase(path: Path) -> None:
    """Overwrite a database with zeros and remove it. Raises BlockingIOError: If it is in use."""
    connection = _connect(path, "rw")
    try:
        with _telling_locks():
            connection.executescript("BEGIN EXCLUSIVE; COMMIT;")
    except sqlite3.DatabaseError:
        pass  # a damaged file is erased too
    finally:
        connection.close()
    for name in (path.name + _BESIDE[0], path.name):
        with contextlib.suppress(FileNotFoundError), path.with_name(name).open("r+b") as file:
            left = os.fstat(file.fileno()).st_size
            while left > 0:
                left -= file.write(bytes(min(left, _ERASE_BYTES)))
            file.flush()
            os.fsync(file.fileno())
    remove(path)


def _make_private(path: Path) -> None:
    """Create the file if it is missing. Its descriptor is closed before SQLite locks the file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    was_there = os.path.lexists(path)
    fd = os.open(path, flags, 0o600)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if was_there and found.st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, "another user's file")
        with contextlib.suppress(PermissionError):  # a file system without modes
            os.fchmod(fd, 0o600)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _telling_locks() -> Iterator[None]:
    """Raise BlockingIOError within, if another process has the database open."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if "locked" in str(error):  # error codes are new in Python 3.11
            raise BlockingIOError from None
        raise


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(
        uri, _WAIT_S, uri=True, isolation_level=None, check_same_thread=False
    )
    connection.executescript("PRAGMA trusted_schema=OFF; PRAGMA cell_size_check=ON;")
    return connection


def _check_kind(connection: sqlite3.Connection, kind: int) -> bool:
    """Return True if the database is empty."""
    try:
        ((found,),) = connection.execute("PRAGMA application_id")
        ((version,),) = connection.execute("PRAGMA user_version")
        ((num_tables,),) = connection.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.DatabaseError as error:
        if "is not a database" in str(error):  # error codes are new in Python 3.11
            raise OtherFileError from None
        raise
    if (found, version) != (kind, _VERSION) and (found or num_tables):
        raise OtherFileError
    return bool(num_tables == 0)
