"""The machine that this process runs on, in words and numbers, for what is measured on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import psutil

from fastdecode.core.measurement import Machine


def this_machine(device: str, packages: Iterable[str]) -> Machine:
    """Where a measurement was taken.

    Args:
        device: what the measured part ran on: ``cpu``, or the GPU's name.
        packages: whose versions matter; those that aren't installed are left out.
    """
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


def cpu_name() -> str:
    """As the processor calls itself, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith(("model name", "CPU part")):
                return line.split(":", 1)[1].strip() or platform.machine()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"
