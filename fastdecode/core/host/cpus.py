"""The CPUs that this process may use, and the share of their time.

With a variable of ``BINDING_VARIABLES`` set, an OpenMP runtime that importing torch loads binds
the importing thread to one CPU, and threads and processes that it starts inherit that. So
importing the package notes the CPUs before, and ``release_cpus`` gives them back."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

BINDING_VARIABLES: Final = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
CGROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUPS: Final = Path("/proc/self/cgroup")

_noted: frozenset[int] = frozenset()


def note_cpus() -> None:
    """Note the CPUs that this thread may use. Call it before torch is imported."""
    global _noted
    _noted = _affinity()


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cpus() -> frozenset[int]:
    """Return the CPUs that this process may use, whatever an OpenMP runtime made of them."""
    now = _affinity()
    may_be_bound = "torch" in sys.modules and any(map(os.environ.get, BINDING_VARIABLES))
    return _noted if may_be_bound and now < _noted else now


def bind_cpus(cpus: frozenset[int]) -> None:
    """Keep this thread, and the threads that it will start, on ``cpus``.

    Raises:
        OSError, ValueError: If none of them exists, or may be used.
        AttributeError: If this operating system does not bind processes.
    """
    os.sched_setaffinity(0, cpus)
    note_cpus()


def release_cpus() -> None:
    """Give this thread back the CPUs that an OpenMP runtime took from it."""
    cpus = usable_cpus()
    if cpus != _affinity():
        os.sched_setaffinity(0, cpus)


def available_cores(num_sharing: int = 1, num_sharing_cpus: int | None = None) -> int:
    """Return the threads that one of ``num_sharing`` processes of this host should compute with.

    Args:
        num_sharing_cpus: Processes that share this one's CPUs. None: ``num_sharing``. The
            CPU quota is shared by ``num_sharing`` in any case.
    """
    quota = cpu_quota()
    cores = len(usable_cpus()) // (num_sharing if num_sharing_cpus is None else num_sharing_cpus)
    return max(1, cores if quota is None else min(cores, math.ceil(quota / num_sharing)))


def cpu_quota(cgroups: Path = CGROUPS, own: Path = OWN_GROUPS) -> float | None:
    """Return the CPUs' worth of time that this process's control groups leave it.

    Returns:
        The tightest quota of ``cpu.max`` (version 2) or ``cpu.cfs_quota_us`` (version 1). None
        if there is none.
    """
    quotas = []
    for directory, is_v2 in control_groups("cpu", cgroups, own):
        names = ("cpu.max", "cpu.max") if is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota = read_number(directory / names[0])
        period = read_number(directory / names[1], place=1 if is_v2 else 0)
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def control_groups(
    controller: str, cgroups: Path = CGROUPS, own: Path = OWN_GROUPS
) -> Iterator[tuple[Path, bool]]:
    """Yield the directory of each control group of this process (a container's, a batch job's),
    with the groups around it, and whether it is of version 2."""
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
        place: Index of the number among the words.

    Returns:
        None if the file has no number there, for example where no limit is set.
    """
    try:
        words = file.read_text("utf-8", "replace").split()
    except OSError:
        return None
    if key is not None:
        words = words[words.index(key) + 1 :] if key in words else []
    return int(words[place]) if len(words) > place and words[place].isdecimal() else None
