"""Small files of users and other programs: read whole and bounded, written whole or not at all.
A name may stand for a pipe or a device that never ends, and a file may be of any size."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from fastdecode.core.errors import FastDecodeError
from fastdecode.core.os_errors import explained
from fastdecode.core.secret_file import exposure

Refuse: TypeAlias = Callable[[str], FastDecodeError]
"""Words the error for a file that can't be used, from why."""


def read_bytes(path: Path, *, most_bytes: int, refuse: Refuse, is_secret: bool = False) -> bytes:
    """A file's content.

    Args:
        is_secret: others may not read it; see ``secret_file``.

    Raises:
        FastDecodeError: as ``refuse`` words it: it can't be read, isn't a
            regular file, is too large, or isn't secret though it has to be.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for somebody to write to it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise refuse("can't read it: it is not a file")
            if is_secret and (why := exposure(os.fstat(fd), path)):
                raise refuse(why)
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise refuse(f"can't read it: {explained(error)}") from None
    if len(data) > most_bytes:
        raise refuse(f"it has more than {most_bytes} bytes, which can't be right")
    return data


def read_object(
    path: Path,
    *,
    most_bytes: int,
    refuse: Refuse,
    parse: Callable[[str], Any] = json.loads,
) -> dict[str, Any]:
    """A file that holds one object.

    Args:
        parse: of another format than JSON; raises ValueError.

    Raises:
        FastDecodeError: Made by ``refuse``, if ``read_bytes`` raises or the file holds no object.
    """
    data = read_bytes(path, most_bytes=most_bytes, refuse=refuse)
    try:
        tree = parse(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise refuse(
            f"it isn't valid {'JSON' if parse is json.loads else 'text'}: {error}"
        ) from None
    if not isinstance(tree, dict):
        raise refuse(f"it holds a {type(tree).__name__}, and no object")
    return tree


def write_whole(path: Path, text: str, *, refuse: Refuse, durable: bool = False) -> None:
    """Create or replace a file, whole or not at all. With ``durable`` it survives a power cut.
    Raises FastDecodeError: Made by ``refuse``, if it can't be written."""
    partial = path.with_name(path.name + ".part")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise refuse(f"can't write it: {explained(error)}") from None


def sync_directory(directory: Path) -> None:
    """Have the names in it survive a power cut.

    Raises:
        OSError: the disk doesn't take them.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
