"""Where an R-worker's kept blocks may go, as its user says."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastdecode.core.errors import ConfigError, Given
from rworker.tiers.opening import make_own_directory

MOST_GB: Final = 1e6
_NAMED: Final = re.compile(r"[0-9A-Za-z]{16}/slots-[0-9]{1,2}\.kv")


@dataclass(frozen=True)
class Disk:
    """A directory, and how much of it."""

    directory: Path
    num_bytes: int
    """Of each R-worker's file."""


def disk_of(directory: str | None, gigabytes: float | None, num_workers: int = 1) -> Disk | None:
    """What was asked for, which is there and has the room; None: nothing was.

    Args:
        num_workers: that keep a file there each.

    Raises:
        ConfigError: only one of the two was given; the directory can't be used,
            or hasn't the room.
    """
    if directory is None and gigabytes is None:
        return None
    if directory is None or gigabytes is None:
        raise ConfigError(
            Given("cache_disk"),
            " and ",
            Given("cache_disk_gb"),
            " belong together: give both, or neither",
        )
    if not 0 < gigabytes <= MOST_GB:
        raise ConfigError(
            Given("cache_disk_gb", gigabytes),
            f" is not a number of GB above 0 and up to {MOST_GB:g}",
        )
    disk = Disk(Path(directory), int(gigabytes * 1e9))
    try:
        make_own_directory(disk.directory)
        stats = os.statvfs(disk.directory)
        there = sum(file.lstat().st_blocks * 512 for file in slot_files(disk.directory))
    except OSError as error:
        raise ConfigError(
            Given("cache_disk", directory), f" can't be used: {error.strerror}"
        ) from None
    wanted, free_bytes = disk.num_bytes * num_workers, stats.f_bavail * stats.f_frsize + there
    if wanted > free_bytes:
        raise ConfigError(
            Given("cache_disk_gb", gigabytes),
            f" for {num_workers} R-worker(s) is {wanted} bytes, but {free_bytes} are free in "
            f"{directory}: ask for less, or make room",
        )
    return disk


def slot_files(directory: Path) -> list[Path]:
    """Of all models, in a directory: files that are named as R-workers name
    theirs (``open_slots``). Links aren't followed."""
    return sorted(
        path
        for path in directory.glob("*/slots-*.kv")
        if _NAMED.fullmatch(f"{path.parent.name}/{path.name}")
        and not (path.is_symlink() or path.parent.is_symlink())
    )
