"""The machine that this process runs on, in words and numbers, for what is measured on it.

The S-part imports this module and runs without psutil, which only its functions need."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from fastdecode.core.host.cpus import (
    CGROUPS,
    OWN_GROUPS,
    available_cores,
    control_groups,
    read_number,
)
from fastdecode.core.measurement import Machine


def this_machine(device: str, packages: Iterable[str]) -> Machine:
    """Where a measurement was taken.

    Args:
        device: What the measured part ran on: ``cpu``, or the GPU's name.
        packages: Those whose versions matter; ones that aren't installed are left out.
    """
    import psutil

    software = versions(packages)
    return Machine(cpu_name(), available_cores(), psutil.virtual_memory().total, device, software)


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


DEFAULT_KV_SHARE = 0.5
"""Of the memory that is free on a host, what KV caches there take together unless the user says."""


def free_memory_bytes(cgroups: Path = CGROUPS, own: Path = OWN_GROUPS) -> int:
    """Memory that this process may still take: what the host has free, or less if a control group
    that it is in (a container's, a batch job's) leaves less."""
    import psutil

    # Each control group leaves what is below its limit. File pages in no use count as free.
    rooms = [psutil.virtual_memory().available]
    for directory, is_v2 in control_groups("memory", cgroups, own):
        names = ("max", "current") if is_v2 else ("limit_in_bytes", "usage_in_bytes")
        limit, usage = (read_number(directory / f"memory.{name}") for name in names)
        if limit is not None and usage is not None:
            cached = "inactive_file" if is_v2 else "total_inactive_file"
            rooms.append(limit - usage + (read_number(directory / "memory.stat", cached) or 0))
    return max(0, min(rooms))


def default_kv_bytes(num_caches: int, free_bytes: int | None = None) -> int:
    """Return the memory of each of ``num_caches`` KV caches that share this host, by default.

    Args:
        free_bytes: Free memory of the host. None measures it.
    """
    free = free_memory_bytes() if free_bytes is None else free_bytes
    return int(free * DEFAULT_KV_SHARE) // num_caches


def cpu_name() -> str:
    """As the processor calls itself, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.split(":", 1)[1].strip() or platform.machine()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"
