"""Which CPUs an R-worker runs on. One R-worker a NUMA node, bound to it, reads
its KV cache at full bandwidth: memory is taken from the node whose thread first
writes to it, and a thread that never moves never reads across sockets."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fastdecode.core.errors import ConfigError
from fastdecode.core.host.cpus import bind_cpus, usable_cpus

MAX_CPUS = 1 << 16
_NODES = Path("/sys/devices/system/node")


def parse_cpu_list(text: str, *, option: str = "--cpus") -> frozenset[int]:
    """``"0-3,8,10-11"``, as Linux writes it → the CPUs.

    Raises:
        ConfigError: it is none.
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= MAX_CPUS:
            raise ConfigError(f"{option}={text!r} is not a list of CPUs such as 0-15,32-47")
        cpus.update(range(first, last + 1))
    return frozenset(cpus)


def usable_nodes(*, nodes: Path = _NODES) -> list[frozenset[int]]:
    """Return the CPUs that this process may use of each NUMA node that has such; none if the
    host doesn't say."""
    numbers = sorted(int(path.name[4:]) for path in nodes.glob("node[0-9]*"))
    listed = [(nodes / f"node{number}" / "cpulist").read_text() for number in numbers]
    found = (parse_cpu_list(cpus) & usable_cpus() for cpus in listed if cpus.strip())
    return [cpus for cpus in found if cpus]


def numa_node_cpus(node: int, *, nodes: Path = _NODES) -> frozenset[int]:
    """The CPUs of a NUMA node.

    Raises:
        ConfigError: this host has no such node; the message says which it has.
    """
    try:
        return parse_cpu_list(
            (nodes / f"node{node}" / "cpulist").read_text(), option=f"cpulist of node {node}"
        )
    except OSError:
        found = sorted(int(path.name[4:]) for path in nodes.glob("node[0-9]*"))
        has = f"has {', '.join(map(str, found))}" if found else "doesn't say that it has any"
        raise ConfigError(f"--numa-node={node}: this host {has}") from None


def bind(cpus: frozenset[int]) -> None:
    """Keep this process, and the threads that it will start, on these CPUs.
    Call it before anything computes.

    Raises:
        ConfigError: some of them aren't there, or may not be used.
    """
    try:
        bind_cpus(cpus)
    except AttributeError:
        raise ConfigError(
            "this operating system doesn't bind processes to CPUs: leave --cpus out"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"can't run on the CPUs {sorted(cpus)}: {getattr(error, 'strerror', None) or error}. "
            "Name CPUs of this host that the process may use"
        ) from None
    missing = cpus - usable_cpus()
    if missing:
        raise ConfigError(
            f"the CPUs {sorted(missing)} do not exist, or this process may not use them"
        )


def is_bound() -> bool:
    """Return True if this process was given CPUs of its own: fewer than its parent has."""
    try:
        return usable_cpus() < os.sched_getaffinity(os.getppid())
    except (AttributeError, OSError):
        return False
