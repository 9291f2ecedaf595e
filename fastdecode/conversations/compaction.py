"""A file of turns, written anew without what was forgotten.

The new file is complete, and on the disk, before it takes the old one's name: a
crash leaves the one or the other. It is locked before that, so that nobody gets
in between. Of the old one nothing is left to be read by whoever holds it open,
or finds its blocks.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from fastdecode.conversations.records import (
    ERASED,
    HEADER_BYTES,
    lock,
    make_record,
    overwrite,
    read_records,
    write_at,
)
from fastdecode.core.json_file import sync_directory

SUFFIX: Final = ".anew"


def written_anew(path: Path, fd: int) -> tuple[int, int, dict[int, int]]:
    """The file of this name without what is erased.

    Args:
        path: its name.
        fd: it, which is held, and read from its beginning.

    Returns:
        The new file, which is held, too; where its records end; and of every
        record, where it was and where it is now.

    Raises:
        OSError: there is no room for it; the old one is as it was.
    """
    beside = path.with_name(path.name + SUFFIX)
    leave_nothing_beside(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    new = os.open(beside, flags, 0o600)
    try:
        lock(new)
        end, moved = _copy(fd, new)
        os.fsync(new)
        os.rename(beside, path)
    except BaseException:
        os.close(new)
        leave_nothing_beside(path)
        raise
    with contextlib.suppress(OSError):  # the new one has its place whatever becomes of these
        sync_directory(path.parent)
        overwrite(fd)
    return new, end, moved


def leave_nothing_beside(path: Path) -> None:
    """Remove what a crash has left of a new file."""
    with contextlib.suppress(OSError):
        path.with_name(path.name + SUFFIX).unlink()


def _copy(fd: int, new: int) -> tuple[int, dict[int, int]]:
    """Where the records that are copied end, and where each went."""
    write_at(new, os.pread(fd, HEADER_BYTES, 0), 0)
    end, moved = HEADER_BYTES, {}
    for kind, place, payload in read_records(fd):
        if kind != ERASED:
            record = make_record(kind, payload)
            write_at(new, record, end)
            moved[place] = end
            end += len(record)
    return end, moved
