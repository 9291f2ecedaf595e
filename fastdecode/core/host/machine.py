"""The machine that this process runs on, in words and numbers, for what is measured on it.

The S-part imports this module and runs without psutil, which only its functions need.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from fastdecode.core.measurement import Machine


def this_machine(device: str, packages: Iterable[str]) -> Machine:
    """Where a measurement was taken.

    Args:
        device: what the measured part ran on: ``cpu``, or the GPU's name.
        packages: whose versions matter; those that aren't installed are left
            out.
    """
    import psutil

    software = {"python": platform.python_version()}
    for package in packages:
        try:
            software[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return Machine(cpu_name(), available_cores(), psutil.virtual_memory().total, device, software)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


DEFAULT_KV_SHARE = 0.5
"""Of the memory that is free on a host, what KV caches there take together unless the user says."""


def free_memory_bytes(
    cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """Memory that this process may still take: what the host has free, or less
    if a control group that it is in (a container's, a batch job's) leaves
    less."""
    import psutil

    return max(0, min([psutil.virtual_memory().available, *_group_rooms(cgroups, own)]))


def default_kv_bytes(num_caches: int, free_bytes: int | None = None) -> int:
    """Memory of each of so many KV caches that share this host, where nobody
    says.

    Args:
        free_bytes: for them and all else; None: what is free now.
    """
    free = free_memory_bytes() if free_bytes is None else free_bytes
    return int(free * DEFAULT_KV_SHARE) // num_caches


def _group_rooms(cgroups: Path, own: Path) -> Iterator[int]:
    """Bytes below the limit of each control group of this process; version 2,
    or the memory controller of version 1. File pages that nobody is using count
    as free."""
    try:
        lines = own.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            root, cached = cgroups, "inactive_file"
            names = ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cached = "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            limit, usage = (_number(directory / name) for name in names)
            if limit is not None and usage is not None:
                yield limit - usage + (_number(directory / "memory.stat", cached) or 0)
            if directory == root:
                break


def _number(file: Path, key: str | None = None) -> int | None:
    """The number that a file holds, or holds for a key; None: there is none,
    such as where there is no limit."""
    try:
        words = file.read_text("utf-8", "replace").split()
    except OSError:
        return None
    if key is not None:
        words = words[words.index(key) + 1 :] if key in words else []
    return int(words[0]) if words and words[0].isdecimal() else None


def cpu_name() -> str:
    """As the processor calls itself, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.split(":", 1)[1].strip() or platform.machine()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"
