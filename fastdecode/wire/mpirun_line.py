"""The mpirun line of a job: S-workers and R-workers on any number of hosts, or instances behind
rank 0, which controls them. Pure: nothing is run or looked up here.

Open MPI 5 and MPICH (Hydra) are known. What the options are for stands in
``docs/guides/cluster.md``.
"""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass
from typing import Final, Literal

from fastdecode.core.config.instances import PlacedInstance
from fastdecode.core.errors import ConfigError

MAX_R_WORKERS_PER_HOST: Final = 1024
Vendor = Literal["Open MPI", "MPICH"]

_HOST = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,252})(?::(?P<count>\d{1,6}))?")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,63}(,[A-Za-z0-9][A-Za-z0-9._/:-]{0,63})*")


@dataclass(frozen=True)
class JobHost:
    """A host of a job."""

    name: str
    num_r_workers: int = 1
    """One for each NUMA node is best. In a job without R-workers: how many stages."""


def parse_hosts(text: str) -> tuple[JobHost, ...]:
    """Return the hosts of a list like "a:2,b:0".

    Raises:
        ConfigError: If it is not such a list, names a host twice, or has no R-worker.
    """
    hosts: list[JobHost] = []
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        count = int(match["count"] or 1) if match else -1
        if match is None or not 0 <= count <= MAX_R_WORKERS_PER_HOST:
            raise ConfigError(
                f"--hosts={text!r}: {part.strip()!r} is not of the form HOST or "
                "HOST:NUMBER_OF_R_WORKERS"
            )
        hosts.append(JobHost(match["name"], count))
    names = [host.name for host in hosts]
    if len(set(names)) < len(names):
        raise ConfigError(f"--hosts={text!r} names a host twice: add its R-workers up")
    if not any(host.num_r_workers for host in hosts):
        raise ConfigError(f"--hosts={text!r} has no R-worker: say HOST:NUMBER_OF_R_WORKERS")
    return tuple(hosts)


def vendor_of(version: str) -> Vendor:
    """Return whose launcher prints this for ``mpirun --version``.

    Raises:
        ConfigError: If it is neither Open MPI's nor MPICH's.
    """
    if "Open MPI" in version or "OpenRTE" in version or "prte" in version.lower():
        return "Open MPI"
    if "HYDRA" in version or "mpich" in version.lower():
        return "MPICH"
    first = version.strip().split("\n")[0][:80]
    raise ConfigError(
        f"mpirun says {first!r}: it is neither Open MPI's nor MPICH's, write the line yourself"
    )


@dataclass(frozen=True)
class JobLine:
    """What an mpirun line is made from."""

    s_command: tuple[str, ...]
    """The S-worker's command."""
    r_command: tuple[str, ...]
    """Every R-worker's command."""
    hosts: tuple[JobHost, ...]
    """Where R-workers run. The first runs the S-worker too, unless ``s_host`` is given."""
    vendor: Vendor = "Open MPI"
    mpirun: str = "mpirun"
    s_host: str | None = None
    interface: str | None = None
    """Network that MPI uses: an interface's name, or 10.0.0.0/24 with Open MPI."""
    extra: tuple[str, ...] = ()  # more options of mpirun
    as_root: bool = False  # run as root, which Open MPI refuses otherwise
    num_s_ranks: int = 1  # S-workers of each stage that act as one (--tp)
    num_stages: int = 1
    """Pipeline stages (``--pp``). Each runs beside the first of its R-workers, unless ``s_host``
    is given."""
    has_r_workers: bool = True  # if False, hosts count stages instead
    instances: tuple[PlacedInstance, ...] = ()
    """They take the R-workers of ``hosts`` in order. The S-workers of a stage are beside the first
    of its R-workers, and the controller beside the first instance, unless ``s_host`` is given."""

    def __post_init__(self) -> None:
        if not self.has_r_workers:
            self._check_stages()
        elif self._num_on_hosts % self.num_stages:
            raise ConfigError(
                f"the {self.num_stages} stages of --pp have as many R-workers each, and "
                f"{self._num_on_hosts} on --hosts isn't a multiple of {self.num_stages}"
            )
        if self.interface is not None and not _INTERFACE.fullmatch(self.interface):
            raise ConfigError(
                f"--interface={self.interface!r} is neither an interface such as eth0 nor "
                "10.0.0.0/24"
            )
        if self.s_host is not None and (":" in self.s_host or not _HOST.fullmatch(self.s_host)):
            raise ConfigError(f"--s-host={self.s_host!r} is not a host's name")
        if self.vendor == "MPICH" and self.interface is not None and "/" in self.interface:
            raise ConfigError(
                f"--interface={self.interface!r}: MPICH takes an interface's name, such as eth0"
            )
        needed = sum(each.num_places for each in self.instances)
        if self.instances and needed != self._num_on_hosts:
            raise ConfigError(
                f"the placement's {len(self.instances)} instances take {needed} R-workers' places, "
                f"and --hosts has room for {self._num_on_hosts}: say how many each host gets"
            )

    @property
    def _num_on_hosts(self) -> int:
        return sum(host.num_r_workers for host in self.hosts)

    def _check_stages(self) -> None:
        """Check a job without R-workers."""
        if self.s_host is not None:
            raise ConfigError(
                f"--s-host={self.s_host} contradicts --hosts, which places the stages of a command "
                "without R-workers. Remove one of them"
            )
        if self._num_on_hosts != self.num_stages:
            raise ConfigError(
                f"the command needs no R-workers, so --hosts says where its stages (--pp) are, and "
                f"has room for {self._num_on_hosts} where there are {self.num_stages}: say "
                "HOST:NUMBER_OF_STAGES"
            )

    def words(self) -> list[str]:
        return [word for part in self._parts() for word in part]

    def shown(self) -> str:
        """Return the command line for a shell, each part on a line of its own."""
        return " \\\n    ".join(shlex.join(part) for part in self._parts())

    def _parts(self) -> list[list[str]]:
        ranks, is_mpich = self._ranks(), self.vendor == "MPICH"
        parts = [[self.mpirun, *self._options(), *self.extra]]
        if is_mpich:  # one list of hosts for all, which ranks fill in order
            hosts = [(name, len(list(on))) for name, on in itertools.groupby(x for x, _ in ranks)]
            parts[0] += ["-hosts", ",".join(f"{name}:{count}" for name, count in hosts)]
        for _, group in itertools.groupby(ranks, lambda rank: rank[is_mpich:]):
            alike = list(group)
            (name, is_s), number = alike[0], len(alike)
            where = [] if is_mpich else ["--host", f"{name}:{number}"]
            colon = [":"] if len(parts) > 1 else []
            command = self.s_command if is_s else self.r_command
            parts.append([*colon, "-n", str(number), *where, *command])
        return parts

    def _ranks(self) -> list[tuple[str, bool]]:
        """Return the host of each rank, and True if it runs the S-worker's command."""
        places = [host.name for host in self.hosts for _ in range(host.num_r_workers)]
        if not self.instances:
            r_hosts = places if self.has_r_workers else []
            return [(name, True) for name in self._s_hosts(places)] + [(x, False) for x in r_hosts]
        ranks: list[tuple[str, bool]] = []
        for each in self.instances:
            own, places = places[: each.num_places], places[each.num_places :]
            firsts = own[:: each.num_places // each.pp]
            ranks += [(name, True) for name in firsts for _ in range(each.tp)]
            ranks += [(name, False) for name in own[: each.num_r_workers]]
        return [(self.s_host or ranks[0][0], True), *ranks]

    def _s_hosts(self, places: list[str]) -> list[str]:
        """Return the host of each S-worker's rank."""
        leaders = places[:: len(places) // self.num_stages]
        if self.s_host is not None or self.num_stages == 1:
            leaders = [self.s_host or self.hosts[0].name] * self.num_stages
        return [name for name in leaders for _ in range(self.num_s_ranks)]

    def _options(self) -> list[str]:
        if self.vendor == "MPICH":
            return ["-iface", self.interface] if self.interface else []
        # ulfm, which needs the pml ob1, tells of ranks that die. R-workers bind themselves.
        options = shlex.split("--with-ft ulfm --bind-to none --mca pml ob1 --mca btl self,sm,tcp")
        if self.interface:
            options += ["--mca", "btl_tcp_if_include", self.interface]
            options += ["--prtemca", "prte_if_include", self.interface]
        if self.as_root:
            options.append("--allow-run-as-root")
        return options
