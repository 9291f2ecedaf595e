"""Control groups of this process (a container's, a batch job's), of version 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUPS: Final = Path("/proc/self/cgroup")


def control_groups(
    controller: str, cgroups: Path = CGROUPS, own: Path = OWN_GROUPS
) -> Iterator[tuple[Path, bool]]:
    """Yield the directory of each of this process's groups, with the groups around it, and
    whether it is one of version 2."""
    try:
        lines = own.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controller if controllers else cgroups
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            yield directory, not controllers
            if directory == root:
                break


def read_number(file: Path, key: str | None = None, place: int = 0) -> int | None:
    """Return the whole number that a file holds.

    Args:
        key: The number follows this word.
        place: Of the number among the words.

    Returns:
        None if there is no such number, as where there is no limit.
    """
    try:
        words = file.read_text("utf-8", "replace").split()
    except OSError:
        return None
    if key is not None:
        words = words[words.index(key) + 1 :] if key in words else []
    return int(words[place]) if len(words) > place and words[place].isdecimal() else None
