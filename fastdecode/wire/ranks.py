"""What the ranks of an MPI job are, in their order, and what their launcher tells them. Needs no
MPI.

======================  ====================================================
job                     ranks
======================  ====================================================
one engine              for each stage ``tp`` S-workers, the first of which
                        leads; then R-workers, equally many per stage, by
                        stage
several instances       the controller; then of each instance its S-workers
                        and its R-workers, in the same order
======================  ====================================================

Rank 0 runs the program.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import psutil

from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.host.processes import interrupt

if TYPE_CHECKING:
    from fastdecode.core.config.instances import PlacedInstance

S_RANK: Final = 0  # the rank that leads a job: an S-worker, or the controller of instances
LAUNCH_LINE: Final = "FASTDECODE_LAUNCH_LINE"
"""``fastdecode launch`` has started the job: its own words, in JSON. A launcher may
keep that from ranks of other hosts."""
# Of Open MPI, MPICH and Intel MPI (Hydra), MVAPICH.
_RANKS: Final = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK")
_SIZES: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_LAUNCHERS: Final = ("mpirun", "mpiexec", "orterun", "prterun", "prted", "prte")
"""Open MPI's processes that start ranks."""
_STOPPED: Final = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
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
    return _number(environ, *_SIZES, *["SLURM_STEP_NUM_TASKS"] * is_step)


def launched_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return this process's rank as far as the launcher says. None if it doesn't."""
    return _number(environ, *_RANKS)


def repeats_other_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if a rank before this one has the same command line, as far as the launcher
    says (Open MPI does)."""
    rank, size = launched_rank(environ), environ.get("OMPI_COMM_WORLD_SIZE")
    sizes = environ.get("OMPI_APP_CTX_NUM_PROCS", size or "").split()
    if rank is None or size is None or not all(each.isdecimal() for each in sizes):
        return False
    return rank not in accumulate(map(int, sizes), initial=0)


def local_size(environ: Mapping[str, str] = os.environ) -> int:
    """Return the ranks on this host. 1 if the launcher doesn't say."""
    sizes = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")
    return _number(environ, *sizes) or 1


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's place among the ranks on this host. 0 if the launcher doesn't say."""
    ranks = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK")
    return _number(environ, *ranks) or 0


def launcher() -> psutil.Process | None:
    """Return the launcher that started this process, if it is Open MPI's."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(os.getppid())
        return parent if parent.name() in _LAUNCHERS else None
    return None


def ranks_here(*, only_stopped: bool = False) -> dict[int, str]:
    """Return names, like "rank 2 (process 81)", of the ranks that this one's launcher has started
    on this host. Empty if the launcher isn't Open MPI's."""
    found: dict[int, str] = {}
    with contextlib.suppress(psutil.Error):
        started_by = launcher()
        for process in started_by.children() if started_by is not None else ():
            with contextlib.suppress(psutil.Error):
                status, rank = process.status(), launched_rank(process.environ())
                is_meant = status in _STOPPED if only_stopped else status != psutil.STATUS_ZOMBIE
                if rank is not None and is_meant:
                    found[rank] = f"rank {rank} (process {process.pid})"
    return found


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

    CONTROLLER = auto()  # gives requests to instances
    LEADER = auto()  # the first S-worker of an engine
    STAGE = auto()  # the first S-worker of a later stage
    MIRROR = auto()  # another S-worker of a stage, which acts as one with its first
    R_WORKER = auto()


@dataclass(frozen=True)
class StageRanks:
    """The ranks of an engine."""

    num_stages: int
    tp: int = 1  # S-workers of each stage that act as one
    first: int = 0  # the first rank of them
    num_r_workers: int | None = None
    """R-workers of all stages, behind the S-workers. None for all ranks of the job there."""

    @property
    def num_s_ranks(self) -> int:
        return self.num_stages * self.tp

    @property
    def s_ranks(self) -> range:
        return range(self.first, self.first + self.num_s_ranks)

    @property
    def end(self) -> int:
        """The first rank behind an instance's."""
        return self.s_ranks.stop + (self.num_r_workers or 0)

    def stage(self, rank: int) -> int:
        """Return an S-worker's stage."""
        return (rank - self.first) // self.tp

    def place(self, rank: int) -> int:
        """Return an S-worker's number among those of its stage; 0 leads."""
        return (rank - self.first) % self.tp

    def role(self, rank: int) -> RankRole:
        if rank >= self.s_ranks.stop:
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
        r_ranks = range(self.s_ranks.stop, job_size if self.num_r_workers is None else self.end)
        each, left = divmod(len(r_ranks), self.num_stages)
        if each and not left:
            return r_ranks[stage * each : (stage + 1) * each]
        if self.num_stages == 1:
            raise ConfigError(
                f"all {job_size} MPI ranks are S-workers (tp={self.tp}): start more ranks, which "
                "will be R-workers",
                code="too_few_ranks",
            )
        raise ConfigError(
            Given("pp", self.num_stages),
            f" takes {self.num_s_ranks} of the {job_size} MPI ranks, and as many R-workers for "
            f"each stage: {len(r_ranks)} are left, which isn't a multiple of {self.num_stages}, "
            "one or more times",
            code="too_few_ranks",
        )

    def check_none_left(self, job_size: int) -> None:
        """
        Raises:
            ConfigError: If the job has other ranks than those of the stages.
        """
        if self.num_r_workers is None and job_size != self.num_s_ranks:
            raise ConfigError(
                Given("pp", self.num_stages),
                f" takes {self.num_s_ranks} MPI ranks where no rank is an R-worker, and "
                f"{job_size} were started",
                code="too_few_ranks",
            )

    def others(self, stage: int) -> list[int]:
        """Return the stages that one is connected to: the first, the one before and the one
        behind; the first is connected to all."""
        near = {0, stage - 1, stage + 1} if stage else set(range(1, self.num_stages))
        return sorted(near & {*range(self.num_stages)} - {stage})


@dataclass(frozen=True)
class InstanceRanks:
    """The ranks of a job of instances."""

    placed: tuple[PlacedInstance, ...]

    @cached_property
    def stages(self) -> Sequence[StageRanks]:
        """The ranks of each instance."""
        found: list[StageRanks] = []
        for each in self.placed:
            first = found[-1].end if found else 1
            found.append(StageRanks(each.pp, each.tp, first, each.num_r_workers))
        return found

    @property
    def size(self) -> int:
        return self.stages[-1].end

    def instance_of(self, rank: int) -> int:
        """Return the number of the instance that a rank belongs to; the rank is not the first."""
        return sum(each.end <= rank for each in self.stages)

    def role(self, rank: int) -> RankRole:
        return self.stages[self.instance_of(rank)].role(rank) if rank else RankRole.CONTROLLER

    def num_s_ranks_in(self, ranks: range) -> int:
        """Return how many of these ranks are S-workers of instances."""
        return sum(rank in each.s_ranks for rank in ranks for each in self.stages)

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
