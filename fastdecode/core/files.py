"""Files that a command reads and writes: found out about early, never waited
for, never left half written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, Final

from fastdecode.core import json_file
from fastdecode.core.errors import ConfigError
from fastdecode.core.os_errors import explained

STANDARD: Final = Path("-")
"""Standard input, or standard output."""


def check_paths(input_path: Path, **outputs: Path | None) -> None:
    """Find out about bad paths before a model is loaded.

    Args:
        input_path: ``-`` is standard input.
        outputs: what for → the file; None: not wanted; ``-``: standard output.

    Raises:
        ConfigError: the input can't be read, or isn't a file; an output can't
            be written; two are the same file.
    """
    taken = {}
    if input_path != STANDARD:
        check_readable(input_path)
        taken[identity(input_path)] = "input"
    for what, path in outputs.items():
        if path is None or path == STANDARD:
            continue
        check_writable(path, what)
        other = taken.setdefault(identity(path), what)
        if other != what:
            raise ConfigError(
                f"{other} and {what} are the same file, {path}: choose another --{what}"
            )


def check_readable(path: Path) -> None:
    """Raises ConfigError if the input is no file, or can't be read."""
    try:
        # Opening a pipe without a writer would wait for ever.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError(
                f"the input {path} is not a file: write the requests to one, or pipe them into "
                "standard input, which is -"
            )
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"can't read the input file {path}: {explained(error)}") from None


def check_writable(path: Path, what: str) -> None:
    """Raises ConfigError if the file can't be opened for writing. Nothing is
    changed, and nothing made."""
    path = path.resolve()  # what a link points to is what is written
    if path.is_dir():
        raise ConfigError(
            f"can't write the {what} file {path}: it is a directory; name a file in it"
        )
    try:
        if path.is_file():
            with path.open("ab"):
                pass
        elif not path.exists() and not os.access(path.parent, os.W_OK | os.X_OK):
            is_there = path.parent.is_dir()
            reason = "Permission denied" if is_there else "No such directory"
            mend = "choose another path" if is_there else "make the directory, or check the path"
            raise ConfigError(f"can't write the {what} file {path}: {reason}: {mend}")
    except OSError as error:
        raise ConfigError(f"can't write the {what} file {path}: {explained(error)}") from None


def open_output(path: Path, what: str) -> int:
    """A file descriptor to write a file anew, or a pipe or device as it is.

    Raises:
        ConfigError: it can't be opened; or it is a pipe that nobody reads, and
            opening it would wait for ever.
    """
    try:
        fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o666
        )
    except OSError as error:
        reason = (
            "it is a pipe that nobody reads" if error.errno == errno.ENXIO else explained(error)
        )
        raise ConfigError(f"can't write the {what} file {path}: {reason}") from None
    os.set_blocking(fd, True)
    return fd


def write_whole(fd: int, data: bytes) -> None:
    """Write all of it. If that fails, what was written of it is taken away
    again, where that can be done.

    Raises:
        OSError: the disk is full, or gone.
    """
    num_written = 0
    try:
        while num_written < len(data):
            num_written += os.write(fd, data[num_written:] if num_written else data)
    except BaseException:
        if num_written:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, os.fstat(fd).st_size - num_written)
                os.lseek(fd, 0, os.SEEK_END)
        raise


def write_json(path: Path, value: dict[str, Any], what: str) -> None:
    """Write a small JSON file: whole, or not at all, if it is a file.

    Raises:
        ConfigError: it can't be written.
    """
    target = path.resolve()
    text = json.dumps(value, indent=2) + "\n"
    try:
        if target.exists() and not target.is_file():
            fd = open_output(target, what)
            try:
                write_whole(fd, text.encode())
            finally:
                os.close(fd)
            return
    except OSError as error:
        raise ConfigError(f"can't write the {what} file {path}: {explained(error)}") from None
    json_file.write_whole(
        target, text, refuse=lambda why: ConfigError(f"the {what} file {path}: {why}")
    )


def identity(path: Path) -> object:
    """Equal for two names of one file, hard links among them; for files to be made, their path."""
    path = path.resolve()
    try:
        found = path.stat()
    except OSError:
        return path
    return found.st_dev, found.st_ino
