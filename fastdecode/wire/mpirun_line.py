"""The mpirun line of a job: S-workers, and R-workers on any number of hosts.
Pure: nothing is run or looked up here.

Open MPI 5 and MPICH (Hydra) are known. What the options are for stands in
``docs/guides/cluster.md``.
"""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass
from typing import Final, Literal

from fastdecode.core.errors import ConfigError

MAX_R_WORKERS_PER_HOST: Final = 1024
Vendor = Literal["Open MPI", "MPICH"]

_HOST = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,252})(?::(?P<count>\d{1,6}))?")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,63}(,[A-Za-z0-9][A-Za-z0-9._/:-]{0,63})*")


@dataclass(frozen=True)
class JobHost:
    """A host, and how many R-workers it gets: one for each NUMA node is best. Of
    a job without R-workers, how many stages."""

    name: str
    num_r_workers: int = 1


def parse_hosts(text: str) -> tuple[JobHost, ...]:
    """``"a:2,b:2"`` → two hosts with two R-workers each; a count of 0 is a host
    without.

    Raises:
        ConfigError: it is no such list, names a host twice, or has no R-worker.
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
    """Whose launcher it is, from what ``mpirun --version`` prints.

    Raises:
        ConfigError: neither Open MPI's nor MPICH's.
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
    """What an mpirun line is made from.

    Args:
        s_command: the S-worker's, such as fastdecode generate …
        r_command: every R-worker's, such as fastdecode r-worker --numa-node
            auto
        hosts: where R-workers run; the first runs the S-worker too, unless
            ``s_host`` is given.
        vendor: whose mpirun it is.
        interface: the network that MPI uses: an interface's name, or
            10.0.0.0/24 with Open MPI.
        extra: further options of mpirun.
        as_root: have Open MPI run as root, which it refuses otherwise.
        num_s_ranks: ranks of each stage that run the S-worker's command: those
            of ``--tp``.
        num_stages: pipeline stages (``--pp``). Each runs beside the first of
            its R-workers, unless ``s_host`` is given.
        num_prompt_stages: more stages, that run prompts only (``--prompt-pp``):
            on the hosts without R-workers, in turn; if the S-worker's is the
            only such one, there.
        has_r_workers: ranks are R-workers. Else K and V are on the stages'
            devices, or with R-workers at addresses, and hosts say how many
            stages each has.
    """

    s_command: tuple[str, ...]
    r_command: tuple[str, ...]
    hosts: tuple[JobHost, ...]
    vendor: Vendor = "Open MPI"
    mpirun: str = "mpirun"
    s_host: str | None = None
    interface: str | None = None
    extra: tuple[str, ...] = ()
    as_root: bool = False
    num_s_ranks: int = 1
    num_stages: int = 1
    num_prompt_stages: int = 0
    has_r_workers: bool = True

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

    @property
    def _num_on_hosts(self) -> int:
        return sum(host.num_r_workers for host in self.hosts)

    def _check_stages(self) -> None:
        """Of a job without R-workers."""
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
        """The command line."""
        return [word for part in self._parts() for word in part]

    def shown(self) -> str:
        """The command line for a shell, a part a line."""
        return " \\\n    ".join(shlex.join(part) for part in self._parts())

    def _parts(self) -> list[list[str]]:
        s_host = self.s_host or self.hosts[0].name
        mpirun = [self.mpirun, *self._options(), *self.extra]
        s_app = ["-n", str(len(self._s_hosts()))]
        if self.vendor == "MPICH":  # one list of hosts for all, which ranks fill in order
            parts = [[*mpirun, "-hosts", self._filled(s_host)], [*s_app, *self.s_command]]
            if self.has_r_workers:
                parts.append([":", "-n", str(self._num_on_hosts), *self.r_command])
            return parts
        parts = [mpirun]
        for name, ranks in itertools.groupby(self._s_hosts()):
            num = len(list(ranks))
            colon = [":"] if len(parts) > 1 else []
            parts.append([*colon, "-n", str(num), "--host", f"{name}:{num}", *self.s_command])
        for host in self.hosts:
            if host.num_r_workers and self.has_r_workers:
                where = ["--host", f"{host.name}:{host.num_r_workers}"]
                parts.append([":", "-n", str(host.num_r_workers), *where, *self.r_command])
        return parts

    def _s_hosts(self) -> list[str]:
        """Of each S-worker's rank."""
        places = [host.name for host in self.hosts for _ in range(host.num_r_workers)]
        leaders = places[:: len(places) // self.num_stages]
        if self.s_host is not None or self.num_stages == 1:
            leaders = [self.s_host or self.hosts[0].name] * self.num_stages
        idle = [host.name for host in self.hosts if not host.num_r_workers]
        places = [name for name in idle if name not in leaders] or leaders[:1]
        leaders += [places[i % len(places)] for i in range(self.num_prompt_stages)]
        return [name for name in leaders for _ in range(self.num_s_ranks)]

    def _filled(self, s_host: str) -> str:
        """Every host and its ranks, the S-worker's first."""
        if not self.has_r_workers:
            names = self._s_hosts()
            return ",".join(f"{name}:{names.count(name)}" for name in dict.fromkeys(names))
        counts = {s_host: len(self._s_hosts())}
        for host in self.hosts:
            counts[host.name] = counts.get(host.name, 0) + host.num_r_workers
        return ",".join(f"{name}:{count}" for name, count in counts.items() if count)

    def _options(self) -> list[str]:
        if self.vendor == "MPICH":
            return ["-iface", self.interface] if self.interface else []
        # Ranks that die are told of (ulfm needs the pml ob1); R-workers bind
        # themselves; waiting ranks yield.
        options = [
            "--with-ft",
            "ulfm",
            "--bind-to",
            "none",
            "--mca",
            "pml",
            "ob1",
            "--mca",
            "btl",
            "self,sm,tcp",
        ]
        if self.interface:
            options += [
                "--mca",
                "btl_tcp_if_include",
                self.interface,
                "--prtemca",
                "prte_if_include",
                self.interface,
            ]
        if self.as_root:
            options.append("--allow-run-as-root")
        return options
