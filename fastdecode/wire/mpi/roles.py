"""What the ranks of an MPI job are, in their order. Needs no MPI.

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
import itertools
from dataclasses import dataclass
from enum import Enum, auto

from fastdecode.core.config.instances import PlacedInstance
from fastdecode.core.errors import ConfigError, Given
from fastdecode.wire.mpi.job import MpiJob


def link_address(rank: int) -> str:
    """What R-workers call a rank that a link leads to."""
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
    num_prompt_stages: int = 0
    """Behind those: they run prompts only, and have no R-workers."""
    first: int = 0
    """The first rank of them."""
    r_ranks: range | None = None
    """The R-workers of all stages; None: all ranks behind the S-workers'."""

    @property
    def num_all_stages(self) -> int:
        return self.num_stages + self.num_prompt_stages

    @property
    def num_s_ranks(self) -> int:
        return self.num_all_stages * self.tp

    def stage(self, rank: int) -> int:
        """An S-worker's."""
        return (rank - self.first) // self.tp

    def place(self, rank: int) -> int:
        """Which of its stage's an S-worker is; 0 leads."""
        return (rank - self.first) % self.tp

    def role(self, rank: int) -> RankRole:
        """Of a rank of this engine's."""
        if rank - self.first >= self.num_s_ranks:
            return RankRole.R_WORKER
        if self.place(rank):
            return RankRole.MIRROR
        return RankRole.STAGE if self.stage(rank) else RankRole.LEADER

    def leader(self, stage: int) -> int:
        """A stage's first rank."""
        return self.first + stage * self.tp

    def r_workers(self, job: MpiJob, stage: int) -> range:
        """Of a stage.

        Raises:
            ConfigError: they can't be shared out to the stages.
        """
        num_s_ranks = self.num_s_ranks
        r_ranks = range(num_s_ranks, job.size) if self.r_ranks is None else self.r_ranks
        num_r_workers = len(r_ranks)
        if not num_r_workers and self.num_stages == 1:
            raise ConfigError(
                f"all {job.size} MPI ranks are S-workers (tp={self.tp}): start more ranks, which "
                "will be R-workers",
                code="too_few_ranks",
            )
        if num_r_workers < 1 or num_r_workers % self.num_stages:
            raise ConfigError(
                Given("pp", self.num_stages),
                f" takes {num_s_ranks} of the {job.size} MPI ranks, and as many R-workers for "
                f"each stage: {max(0, num_r_workers)} are left, which isn't a multiple of "
                f"{self.num_stages}, one or more times",
                code="too_few_ranks",
            )
        each = num_r_workers // self.num_stages
        return r_ranks[stage * each : (stage + 1) * each]

    def none_left(self, job: MpiJob) -> range:
        """No ranks.

        Raises:
            ConfigError: the job has others than those of the stages, or too few.
        """
        if self.r_ranks is None and job.size != self.num_s_ranks:
            raise ConfigError(
                Given("pp", self.num_stages),
                f" takes {self.num_s_ranks} MPI ranks where no rank is an R-worker, and "
                f"{job.size} were started",
                code="too_few_ranks",
            )
        return range(0)

    def others(self, stage: int) -> list[int]:
        """The stages that one is connected to: the first, the one before and
        the one behind of its kind; the first to all."""
        if not stage:
            return list(range(1, self.num_all_stages))
        of_prompts = stage >= self.num_stages
        own = self.prompt_stages if of_prompts else range(self.num_stages)
        return sorted({0} | ({stage - 1, stage + 1} & set(own)))

    @property
    def prompt_stages(self) -> range:
        return range(self.num_stages, self.num_all_stages)


@dataclass(frozen=True)
class InstanceRanks:
    """The ranks of a job of instances."""

    placed: tuple[PlacedInstance, ...]

    @property
    def size(self) -> int:
        return 1 + sum(map(_num_ranks, self.placed))

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each instance, in order."""
        return tuple(itertools.accumulate(map(_num_ranks, self.placed), initial=1))[:-1]

    def stages(self, instance: int) -> StageRanks:
        """The ranks of an instance."""
        placed, first = self.placed[instance], self.leaders[instance]
        first_r = first + placed.num_s_workers
        r_ranks = range(first_r, first_r + placed.num_r_workers)
        return StageRanks(placed.pp, placed.tp, placed.prompt_pp, first, r_ranks)

    def r_ranks(self, instance: int) -> range:
        """Of an instance."""
        r_ranks = self.stages(instance).r_ranks
        assert r_ranks is not None
        return r_ranks

    def s_ranks(self, instance: int) -> range:
        """Of an instance."""
        return range(self.leaders[instance], self.r_ranks(instance).start)

    def instance_of(self, rank: int) -> int:
        """Whose rank it is, which isn't the first."""
        return bisect.bisect_right(self.leaders, rank) - 1

    def s_rank_of(self, r_rank: int) -> int:
        """The S-worker that an R-worker serves: the first of its stage."""
        instance = self.instance_of(r_rank)
        stages, r_ranks = self.stages(instance), self.r_ranks(instance)
        return stages.leader((r_rank - r_ranks.start) * stages.num_stages // len(r_ranks))

    def others_with_kv(self, own: int) -> list[int]:
        """Ranks that may keep K and V, but one: R-workers, and leaders of a stage,
        whose device may."""
        kinds = (RankRole.R_WORKER, RankRole.LEADER, RankRole.STAGE)
        return [rank for rank in range(1, self.size) if rank != own and self.role(rank) in kinds]

    def role(self, rank: int) -> RankRole:
        """Of any rank."""
        return self.stages(self.instance_of(rank)).role(rank) if rank else RankRole.CONTROLLER

    def place_on_host(self, rank: int, local_rank: int) -> int:
        """How many S-workers come before one on its host, whose ranks follow upon
        each other there."""
        return self.num_s_ranks_in(range(rank - local_rank, rank))

    def num_s_ranks_in(self, ranks: range) -> int:
        """How many of these ranks are S-workers of instances."""
        others = (RankRole.CONTROLLER, RankRole.R_WORKER)
        return sum(self.role(rank) not in others for rank in ranks)

    def check(self, job: MpiJob) -> None:
        """Raises ConfigError: the job has others."""
        if job.size != self.size:
            raise ConfigError(
                Given("instances"),
                f" take {self.size} MPI ranks, and {job.size} were started: start them by "
                "fastdecode launch --placement",
                code="too_few_ranks",
            )


def _num_ranks(placed: PlacedInstance) -> int:
    return placed.num_s_workers + placed.num_r_workers
