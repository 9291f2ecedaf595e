# mypy: ignore-errors
# Numba's types are not Python's.
"""Machine code that is kept on disk, for as long as its sources are what they were.

Its name tells the sources and Numba's version: Numba looks at the time stamp of one file only, and
fails on what an earlier version of this package left there, if its classes have moved. Each
signature has a file of its own, with a checksum at its end; Numba's own index of them loses
entries where two processes write to it, and a damaged one fails every later run. What can't be
read is compiled, what can't be written isn't kept: no job fails for it.

Of processes that need the same machine code at the same time, as the R-workers of a host do, one
compiles it, and the others wait for its file."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from functools import cache
from hashlib import sha256
from pathlib import Path
from time import sleep

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

logger = logging.getLogger(__name__)

_CHECKSUM_BYTES = sha256().digest_size
_LONGEST_WAIT_S = 60.0  # for a process that compiles, which may have been stopped
_LOOK_EVERY_S = 0.02


@cache
def source_of(path: str) -> bytes:
    """A file as it was first read: what is compiled is what its digest was made of."""
    return Path(path).read_bytes()


@cache
def digest(*sources: Path) -> str:
    """Of these files, and Numba's version."""
    found = sha256(numba.__version__.encode())
    for path in sources:
        found.update(source_of(str(path)))
    return found.hexdigest()[:12]


class _KeptFiles(IndexDataCacheFile):
    """A file for each signature, without an index."""

    def save(self, key, data):
        content = self._dump(data)
        with self._open_for_write(self._data_path(self._name_of(key))) as file:
            file.write(content)
            file.write(sha256(content).digest())

    def load(self, key):
        name = self._name_of(key)
        try:
            content = Path(self._data_path(name)).read_bytes()
        except FileNotFoundError:
            return None
        if sha256(content[:-_CHECKSUM_BYTES]).digest() != content[-_CHECKSUM_BYTES:]:
            raise OSError(f"{name} is damaged")
        return self._load_data(name)  # it stops where the checksum begins

    def lock_path(self, key):
        """Of a file that the process locks that compiles for this key."""
        return self._data_path(self._name_of(key)) + ".lock"

    def _name_of(self, key):
        return self._data_name_pattern.format(
            number=int(sha256(repr(key).encode()).hexdigest()[:12], 16)
        )


class Turn:
    """The right to do some work, such as to compile one function, which one process of a
    host has at a time. It ends with the process at the latest.

    Args:
        path: of the file that is locked, and removed at the end. Where it can't be made,
            every process may do the work.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = None

    def take(self) -> None:
        """Wait until no other process has it, or for as long as one may take."""
        end_s = time.monotonic() + _LONGEST_WAIT_S
        with contextlib.suppress(OSError):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            while not self._is_locked() and time.monotonic() < end_s:
                sleep(_LOOK_EVERY_S)

    def _is_locked(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def give_back(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(self._fd)
            self._fd = None


class KeptCode(FunctionCache):
    """Numba's own, but for its files, and for its errors, of which the first is told to the log.

    Args:
        py_func: whose machine code it is.
        sources: a digest of all that it is made from.

    Raises:
        OSError, RuntimeError: no directory can be written to.
    """

    complained = False
    announced = False

    def __init__(self, py_func, sources):
        super().__init__(py_func)
        name = f"{self._impl.filename_base}-{sources}"
        self._cache_file = _KeptFiles(self._cache_path, name, source_stamp="")
        self._turns = {}  # of what this process compiles, by signature

    def load_overload(self, sig, target_context):
        """Machine code of the disk; None: this process is to compile and save it."""
        found = self._loaded(sig, target_context)
        if found is None:
            _announce()
            if sig in self._turns:  # to compile it has failed before
                self._turns.pop(sig).give_back()
            key = self._index_key(sig, target_context.codegen())
            turn = Turn(self._cache_file.lock_path(key))
            turn.take()
            found = self._loaded(sig, target_context)  # the process before may have saved it
            if found is None:
                self._turns[sig] = turn
            else:
                turn.give_back()
        return found

    def _loaded(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # of a file's content, anything
            _complain(error)
            return None

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _complain(error)
        finally:
            if sig in self._turns:
                self._turns.pop(sig).give_back()


def keep(compiler, function, *sources):
    """Have a compiler of Numba's keep the function's machine code on disk, if the disk allows.

    Args:
        sources: the files of all that it is made from.
    """
    try:
        compiler._cache = KeptCode(function, digest(*sources))
    except (OSError, RuntimeError) as error:  # no directory can be written to
        _complain(error)


def _announce():
    """Log, once, that this process compiles."""
    if not (KeptCode.announced or KeptCode.complained):  # which says so, too
        KeptCode.announced = True
        logger.warning("compiling kernels for this CPU, kept for the next start")


def _complain(error):
    """Tell the log, once."""
    if not KeptCode.complained:
        KeptCode.complained = True
        logger.warning(
            "compiled kernels could not be read from or kept on disk, so they are compiled once "
            "more: %s: %s; if this comes again, name a directory that can be written to in "
            "NUMBA_CACHE_DIR",
            type(error).__name__,
            error,
        )
