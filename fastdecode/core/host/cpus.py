"""The CPUs that this process may use, and the share of their time.

With a variable of ``BINDING_VARIABLES`` set, an OpenMP runtime that importing torch loads binds
the importing thread to one CPU, and threads and processes that it starts inherit that. So
importing the package notes the CPUs before, and ``release_cpus`` gives them back.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fastdecode.core.host.control_groups import CGROUPS, OWN_GROUPS, control_groups, read_number

BINDING_VARIABLES: Final = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


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
    return min(_quotas(cgroups, own), default=None)


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    for directory, is_v2 in control_groups("cpu", cgroups, own):
        names = ("cpu.max", "cpu.max") if is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota = read_number(directory / names[0])
        period = read_number(directory / names[1], place=1 if is_v2 else 0)
        if quota and period:
            yield quota / period
