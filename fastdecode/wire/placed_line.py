"""The mpirun line of a job whose ranks are instances: rank 0, which controls them,
and behind it each one's S-workers and R-workers. Pure, as
``fastdecode.wire.mpirun_line``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fastdecode.core.config.instances import PlacedInstance
from fastdecode.core.errors import ConfigError
from fastdecode.wire.mpirun_line import JobHost, JobLine


@dataclass(frozen=True)
class PlacedLine(JobLine):
    """See ``JobLine``. Instances take the R-workers of ``hosts`` in order; the S-workers
    of a stage are beside the first of its R-workers, and the controller beside the
    first instance, unless ``s_host`` is given.

    Args:
        instances: in order.
    """

    instances: tuple[PlacedInstance, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = sum(each.num_places for each in self.instances)
        offered = sum(host.num_r_workers for host in self.hosts)
        if needed != offered:
            raise ConfigError(
                f"the placement's {len(self.instances)} instances take {needed} R-workers' places, "
                f"and --hosts has room for {offered}: say how many each host gets"
            )

    def _parts(self) -> list[list[str]]:
        mpirun = [self.mpirun, *self._options(), *self.extra]
        ranks = self._ranks()
        if self.vendor == "MPICH":  # one list of hosts for all, which ranks fill in order
            hosts = [f"{name}:{len(list(on))}" for name, on in itertools.groupby(ranks, _host)]
            mpirun += ["-hosts", ",".join(hosts)]
        parts = [mpirun]
        for (name, is_s), alike in itertools.groupby(ranks):
            number = str(len(list(alike)))
            where = [] if self.vendor == "MPICH" else ["--host", f"{name}:{number}"]
            command = self.s_command if is_s else self.r_command
            colon = [":"] if len(parts) > 1 else []
            parts.append([*colon, "-n", number, *where, *command])
        return parts

    def _ranks(self) -> list[tuple[str, bool]]:
        """Of each rank: its host, and whether it runs the S-workers' command."""
        places = _places(self.hosts)
        ranks: list[tuple[str, bool]] = []
        for each in self.instances:
            own = list(itertools.islice(places, each.num_places))
            firsts = own[:: each.num_places // each.pp]
            firsts += [own[i % len(own)] for i in range(each.prompt_pp)]
            ranks += [(name, True) for name in firsts for _ in range(each.tp)]
            ranks += [(name, False) for name in own[: each.num_r_workers]]
        return [(self.s_host or ranks[0][0], True), *ranks]


def _host(rank: tuple[str, bool]) -> str:
    return rank[0]


def _places(hosts: Sequence[JobHost]) -> itertools.chain[str]:
    return itertools.chain.from_iterable([host.name] * host.num_r_workers for host in hosts)
