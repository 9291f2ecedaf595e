"""SQLite files of one process: private, held by a lock, without what was deleted.

A committed transaction survives the end of the process. After a power cut the file holds all
transactions up to the last ``checkpoint``, and perhaps later ones. SQLite keeps recent
transactions beside the file, in ``NAME-wal``, until it is closed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_BESIDE: Final = ("-wal", "-shm")
_VERSION: Final = 1
_ERASE_BYTES: Final = 1 << 20
_WAIT_S: Final = 1.0
"""Longest wait for a process that reads the file."""


class OtherFileError(Exception):
    """The file is a database of another kind, or none."""


class Database:
    """An SQLite file that no other process writes. Threads must take turns. Close it.

    Args:
        path: The file. It is created, readable by its owner only, if it is missing.
        kind: SQLite's ``application_id`` of such files, 1 to 2^31 - 1.
        schema: Statements that create the tables of an empty file.

    Raises:
        BlockingIOError: If another process holds the file.
        OtherFileError: If the file holds something else.
        OSError: If it is a link, no regular file, or can't be opened.
        sqlite3.Error: If it is damaged, or the disk is full.
    """

    def __init__(self, path: Path, kind: int, schema: str) -> None:
        fd = _open_alone(path)
        self._let_go = weakref.finalize(self, os.close, fd)
        try:
            self._connection = _connect(path, "rwc")
            is_empty = _check_kind(self._connection, kind)
            self._connection.executescript(
                "PRAGMA auto_vacuum=FULL; PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;"
                "PRAGMA secure_delete=ON;"
            )
            if is_empty:
                self._connection.executescript(
                    f"BEGIN IMMEDIATE; {schema} PRAGMA application_id={kind};"
                    f"PRAGMA user_version={_VERSION}; COMMIT;"
                )
            check_whole(self._connection)
        except BaseException:
            self.close()
            raise

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all statements of the context, or none of them."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def checkpoint(self) -> bool:
        """Make all transactions survive a power cut.

        Returns:
            True if no deleted content is left beside the file. False while another process
            reads it: call again.
        """
        ((is_busy, *_),) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return not is_busy

    def close(self) -> None:
        """Write everything to the file and let other processes use it. Safe to call twice."""
        if connection := self.__dict__.get("_connection"):
            connection.close()
        self._let_go()


@contextlib.contextmanager
def reading(path: Path, kind: int) -> Iterator[sqlite3.Connection]:
    """Open a database that another process may be writing, without changing it.

    Raises:
        OtherFileError: If the file holds something else.
        sqlite3.Error: If it is damaged or can't be read.
    """
    with contextlib.closing(_connect(path, "ro")) as connection:
        if _check_kind(connection, kind):
            raise OtherFileError
        yield connection


def is_held(path: Path) -> bool:
    """Return True if a process has the database open."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(fd)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


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
    """Overwrite a database with zeros, and remove it.

    Raises:
        BlockingIOError: If another process holds it.
        OSError: If it can't be written.
    """
    fd = _open_alone(path)
    try:
        for name in (path.name + _BESIDE[0], path.name):
            with contextlib.suppress(FileNotFoundError), path.with_name(name).open("r+b") as file:
                left = os.fstat(file.fileno()).st_size
                while left > 0:
                    left -= file.write(bytes(min(left, _ERASE_BYTES)))
                file.flush()
                os.fsync(file.fileno())
        remove(path)
    finally:
        os.close(fd)


def _open_alone(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, "another user's file")
        _lock(fd)
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            raise BlockingIOError  # another process has replaced the file since
        with contextlib.suppress(PermissionError):  # a file system without modes
            os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # a file system without locks; its users must not start two processes


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
