"""What the ranks of an MPI job are, in their order, and what their launcher tells them. Needs no
MPI.

======================  ====================================================
job                     ranks
======================  ====================================================
one engine              for each stage ``tp`` S-workers, the first of which
                        leads; then likewise the stages that run prompts
                        only; then R-workers, as many for each stage of the
                        others, by stage
several instances       the controller; then of each instance its S-workers
                        and its R-workers, in the same order
======================  ====================================================

Rank 0 runs the program.
"""

from __future__ import annotations

import bisect
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.host.processes import interrupt

if TYPE_CHECKING:
    from fastdecode.core.config.instances import PlacedInstance

S_RANK: Final = 0
"""The rank that leads a job: an S-worker, or the controller of instances."""
LAUNCH_LINE: Final = "FASTDECODE_LAUNCH_LINE"
"""``fastdecode launch`` has started the job: its own words, in JSON. A launcher may
keep that from ranks of other hosts."""
RANK_VARIABLES: Final = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK")
# Of Open MPI, MPICH and Intel MPI (Hydra), MVAPICH.
_SIZE_VARIABLES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_LOCAL_RANK_VARIABLES: Final = (
    "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK"
)  # fmt: skip
_LOCAL_SIZE_VARIABLES: Final = (
    "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"
)  # fmt: skip
_PREFIXES: Final = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "HYDRA_", "MV2_")


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is a number."""
    values = (environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), None)


def launched_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return how many ranks an MPI launcher says it started. None if there was no launcher."""
    # An interactive allocation sets SLURM_NTASKS too; only a step's tasks have
    # a PMI or PMIx server to talk to.
    is_step = "PMIX_RANK" in environ or "PMI_RANK" in environ
    return _number(environ, *_SIZE_VARIABLES, *["SLURM_STEP_NUM_TASKS"] * is_step)


def launched_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return this process's rank as far as the launcher says. None if it doesn't."""
    return _number(environ, *RANK_VARIABLES)


def repeats_other_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if a rank before this one has the same command line, as far as the launcher
    says (Open MPI does)."""
    rank, size = launched_rank(environ), launched_size(environ)
    if rank is None or "OMPI_COMM_WORLD_SIZE" not in environ:
        return False
    sizes = environ.get("OMPI_APP_CTX_NUM_PROCS", str(size)).split()
    if not all(each.isdecimal() for each in sizes):
        return False
    return rank not in accumulate(map(int, sizes), initial=0)


def local_size(environ: Mapping[str, str] = os.environ) -> int:
    """Return the ranks on this host, as far as the launcher says; else 1."""
    return _number(environ, *_LOCAL_SIZE_VARIABLES) or 1


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's place among the ranks on this host, as far as the launcher says; else
    0."""
    return _number(environ, *_LOCAL_RANK_VARIABLES) or 0


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process outside the job."""
    return {name: value for name, value in environ.items() if not name.startswith(_PREFIXES)}


def stop_on_request() -> None:
    """In an MPI job, take SIGUSR1 for Ctrl-C. Launchers pass it on to all ranks; with Ctrl-C or
    SIGTERM they kill them."""
    if launched_size() is not None:
        signal.signal(signal.SIGUSR1, interrupt)


def let_rank_0_stop() -> None:
    """Ignore the signals by which a whole job is asked to stop. Rank 0 then decides when, and
    needs this one until it does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def link_address(rank: int) -> str:
    """Return what R-workers call another rank."""
    return f"rank {rank}"


class RankRole(Enum):
    """What a rank does."""

    CONTROLLER = auto()
    """Gives requests to instances."""
    LEADER = auto()
    """The first S-worker of an engine."""
    STAGE = auto()
    """The first S-worker of a later stage."""
    MIRROR = auto()
    """Another S-worker of a stage, which acts as one with its first."""
    R_WORKER = auto()


@dataclass(frozen=True)
class StageRanks:
    """The ranks of an engine."""

    num_stages: int
    tp: int = 1
    """S-workers of each stage that act as one."""
    first: int = 0
    """The first rank of them."""
    r_ranks: range | None = None
    """The R-workers of all stages. None for all ranks behind the S-workers'."""

    @property
    def num_s_ranks(self) -> int:
        return self.num_stages * self.tp

    def stage(self, rank: int) -> int:
        """Return an S-worker's stage."""
        return (rank - self.first) // self.tp

    def place(self, rank: int) -> int:
        """Return an S-worker's number among those of its stage; 0 leads."""
        return (rank - self.first) % self.tp

    def role(self, rank: int) -> RankRole:
        if rank - self.first >= self.num_s_ranks:
            return RankRole.R_WORKER
        if self.place(rank):
            return RankRole.MIRROR
        return RankRole.STAGE if self.stage(rank) else RankRole.LEADER

    def leader(self, stage: int) -> int:
        """Return a stage's first rank."""
        return self.first + stage * self.tp

    def r_workers(self, job_size: int, stage: int) -> range:
        """Return the R-workers of a stage.

        Raises:
            ConfigError: If they can't be shared out to the stages.
        """
        num_s_ranks = self.num_s_ranks
        r_ranks = range(num_s_ranks, job_size) if self.r_ranks is None else self.r_ranks
        if not r_ranks and self.num_stages == 1:
            raise ConfigError(
                f"all {job_size} MPI ranks are S-workers (tp={self.tp}): start more ranks, which "
                "will be R-workers",
                code="too_few_ranks",
            )
        each, left = divmod(len(r_ranks), self.num_stages)
        if not each or left:
            raise ConfigError(
                Given("pp", self.num_stages),
                f" takes {num_s_ranks} of the {job_size} MPI ranks, and as many R-workers for "
                f"each stage: {len(r_ranks)} are left, which isn't a multiple of "
                f"{self.num_stages}, one or more times",
                code="too_few_ranks",
            )
        return r_ranks[stage * each : (stage + 1) * each]

    def check_none_left(self, job_size: int) -> None:
        """
        Raises:
            ConfigError: If the job has other ranks than those of the stages.
        """
        if self.r_ranks is None and job_size != self.num_s_ranks:
            raise ConfigError(
                Given("pp", self.num_stages),
                f" takes {self.num_s_ranks} MPI ranks where no rank is an R-worker, and "
                f"{job_size} were started",
                code="too_few_ranks",
            )

    def others(self, stage: int) -> list[int]:
        """Return the stages that one is connected to: the first, the one before and the one
        behind; the first is connected to all."""
        if not stage:
            return list(range(1, self.num_stages))
        return sorted({0, stage - 1} | ({stage + 1} & set(range(self.num_stages))))


@dataclass(frozen=True)
class InstanceRanks:
    """The ranks of a job of instances."""

    placed: tuple[PlacedInstance, ...]

    @property
    def _starts(self) -> tuple[int, ...]:
        sizes = (each.num_s_workers + each.num_r_workers for each in self.placed)
        return tuple(accumulate(sizes, initial=1))

    @property
    def size(self) -> int:
        return self._starts[-1]

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each instance, in order."""
        return self._starts[:-1]

    def stages(self, instance: int) -> StageRanks:
        """Return the ranks of an instance."""
        placed = self.placed[instance]
        ranks = self.s_ranks(instance), self.r_ranks(instance)
        return StageRanks(placed.pp, placed.tp, ranks[0].start, ranks[1])

    def r_ranks(self, instance: int) -> range:
        return range(self.s_ranks(instance).stop, self._starts[instance + 1])

    def s_ranks(self, instance: int) -> range:
        first = self.leaders[instance]
        return range(first, first + self.placed[instance].num_s_workers)

    def instance_of(self, rank: int) -> int:
        """Return whose a rank behind the first is."""
        return bisect.bisect_right(self.leaders, rank) - 1

    def role(self, rank: int) -> RankRole:
        return self.stages(self.instance_of(rank)).role(rank) if rank else RankRole.CONTROLLER

    def num_s_ranks_in(self, ranks: range) -> int:
        """Return how many of these ranks are S-workers of instances."""
        others = (RankRole.CONTROLLER, RankRole.R_WORKER)
        return sum(self.role(rank) not in others for rank in ranks)

    def check(self, job_size: int) -> None:
        """
        Raises:
            ConfigError: If the job has other ranks.
        """
        if job_size != self.size:
            raise ConfigError(
                Given("instances"),
                f" take {self.size} MPI ranks, and {job_size} were started: start them by "
                "fastdecode launch --placement",
                code="too_few_ranks",
            )
