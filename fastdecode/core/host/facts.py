"""What a process sees of its host: what ``fastdecode doctor`` compares and judges."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastdecode.core.host.cpus import usable_cpus
from fastdecode.core.host.machine import free_memory_bytes, versions
from fastdecode.core.words import make_printable

_PACKAGES = ("fastdecode", "numpy", "numba", "mpi4py", "pyzmq")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NODES = Path("/sys/devices/system/node")
_MAX_LISTED = 1024


@dataclass(frozen=True)
class HostFacts:
    """As one process sees it; empty texts and tuples where the system doesn't say."""

    host: str
    versions: tuple[str, ...]
    """"python 3.11.2", "numpy 2.1.0", …"""
    mpi: str  # name and version of the MPI library that is loaded
    cpus: tuple[int, ...]  # CPUs that this process may use
    num_host_cpus: int
    numa_cpus: tuple[str, ...]
    """By NUMA node, as "0-15,32-47"; empty for a number that no node has."""
    huge_pages: str  # use of transparent huge pages: always, madvise or never
    free_bytes: int  # memory that this process may still take
    interfaces: tuple[str, ...]
    """Network interfaces that are up, with an address: "eth0 10.0.0.1"."""

    def __post_init__(self) -> None:
        make_printable(self)  # they may be a peer's words

    def version(self, package: str) -> str:
        """Empty if it isn't there."""
        return next(
            (v.partition(" ")[2] for v in self.versions if v.partition(" ")[0] == package), ""
        )


def lacks_for_triton(
    find_module: Callable[[str], object] = importlib.util.find_spec,
    find_program: Callable[[str], str | None] = shutil.which,
    include: Path | None = None,
) -> str:
    """What Triton, if it is here, lacks to build its launchers, which it does
    when a kernel is first run; empty: nothing."""
    if find_module("triton") is None:
        return ""
    compilers = (os.environ.get("CC"), "clang", "gcc", "cc")
    if not any(find_program(name) for name in compilers if name):
        return "no C compiler (gcc or clang) is here"
    header = (include or Path(sysconfig.get_path("include"))) / "Python.h"
    return "" if header.exists() else f"Python's headers aren't here ({header})"


TF32_SWITCH = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
"""Environment variable that has torch compute float32 products in TF32."""


def forces_tf32(environment: Mapping[str, str]) -> bool:
    """Whether torch would compute float32 products in TF32. It takes "1" alone for yes."""
    return environment.get(TF32_SWITCH) == "1"


def this_host() -> HostFacts:
    huge_pages = re.search(r"\[(\w+)\]", _read(_HUGE_PAGES))  # always [madvise] never
    return HostFacts(
        host=socket.gethostname(),
        versions=tuple(f"{name} {version}" for name, version in versions(_PACKAGES).items()),
        mpi=_mpi_library(),
        cpus=tuple(sorted(usable_cpus()))[: 1 << 13],
        num_host_cpus=os.cpu_count() or 1,
        numa_cpus=_numa_cpus(),
        huge_pages=huge_pages[1] if huge_pages else "",
        free_bytes=free_memory_bytes(),
        interfaces=_interfaces(),
    )


def _mpi_library() -> str:
    """Return "" if MPI is not loaded: to load it would change the process."""
    mpi = sys.modules.get("mpi4py.MPI")
    text = "" if mpi is None else str(mpi.Get_library_version())
    return text.split("\n")[0].split(",")[0].strip("\0 ")


def _numa_cpus() -> tuple[str, ...]:
    listed = {int(path.name[4:]): _read(path / "cpulist") for path in _NODES.glob("node[0-9]*")}
    return tuple(listed.get(node, "") for node in range(max(listed, default=-1) + 1))[:_MAX_LISTED]


def _interfaces() -> tuple[str, ...]:
    import psutil  # the S-part imports this module, and runs without it

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = [
        f"{name} {address.address}"
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for address in addresses
        if name in up and address.family == socket.AF_INET
    ]
    return tuple(found[:_MAX_LISTED])


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
