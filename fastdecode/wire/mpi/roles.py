"""What the ranks of an MPI job are. Whoever asks needs no MPI."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

from fastdecode.core.config.instances import Instances
from fastdecode.core.errors import ConfigError, Given
from fastdecode.wire.mpi.job import MpiJob


def link_address(rank: int) -> str:
    """What R-workers call a rank that a link leads to."""
    return f"rank {rank}"


@dataclass(frozen=True)
class StageRanks:
    """Which ranks of a job are what."""

    num_stages: int
    tp: int = 1
    """S-workers of each stage that act as one."""
    num_prompt_stages: int = 0
    """Behind those: they run prompts only, and have no R-workers."""

    @property
    def num_all_stages(self) -> int:
        return self.num_stages + self.num_prompt_stages

    @property
    def num_s_ranks(self) -> int:
        return self.num_all_stages * self.tp

    def stage(self, rank: int) -> int:
        """An S-worker's."""
        return rank // self.tp

    def place(self, rank: int) -> int:
        """Which of its stage's an S-worker is; 0 leads."""
        return rank % self.tp

    def leader(self, stage: int) -> int:
        """A stage's first rank."""
        return stage * self.tp

    def r_workers(self, job: MpiJob, stage: int) -> range:
        """Of a stage.

        Raises:
            ConfigError: they can't be shared out to the stages.
        """
        num_s_ranks = self.num_s_ranks
        num_r_workers = job.size - num_s_ranks
        if num_r_workers < 1 or num_r_workers % self.num_stages:
            raise ConfigError(
                Given("pp", self.num_stages),
                f" takes {num_s_ranks} of the {job.size} MPI ranks, and as many R-workers for "
                f"each stage: {max(0, num_r_workers)} are left, which isn't a multiple of "
                f"{self.num_stages}",
                code="too_few_ranks",
            )
        each = num_r_workers // self.num_stages
        first = num_s_ranks + stage * each
        return range(first, first + each)

    def none_left(self, job: MpiJob) -> range:
        """No ranks.

        Raises:
            ConfigError: the job has others than those of the stages, or too few.
        """
        if job.size != self.num_s_ranks:
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
    """Which ranks of a job of instances are what: the first controls them, and
    behind it stand each one's S-worker and then its R-workers."""

    num_r_workers: tuple[int, ...]
    """Of each instance."""

    @classmethod
    def of(cls, instances: Instances) -> InstanceRanks:
        """Those that were chosen."""
        return cls(tuple(each.num_r_workers for each in instances.placed))

    @property
    def size(self) -> int:
        return 1 + len(self.num_r_workers) + sum(self.num_r_workers)

    @property
    def s_ranks(self) -> tuple[int, ...]:
        """Of the instances, in order."""
        before = itertools.accumulate((1 + num for num in self.num_r_workers), initial=1)
        return tuple(before)[:-1]

    def r_ranks(self, instance: int) -> range:
        """Of an instance."""
        first = self.s_ranks[instance] + 1
        return range(first, first + self.num_r_workers[instance])

    def instance_of(self, rank: int) -> int:
        """Whose rank it is, which isn't the first."""
        return bisect.bisect_right(self.s_ranks, rank) - 1

    def others_r_ranks(self, instance: int) -> list[int]:
        """R-workers of all others."""
        others = [i for i in range(len(self.num_r_workers)) if i != instance]
        return [rank for other in others for rank in self.r_ranks(other)]

    def place_on_host(self, rank: int, local_rank: int) -> int:
        """How many S-workers come before one on its host, whose ranks follow upon
        each other there."""
        here = range(rank - local_rank, rank)
        return sum(s_rank in here for s_rank in self.s_ranks)

    def check(self, job: MpiJob) -> None:
        """Raises ConfigError: the job has others."""
        if job.size != self.size:
            raise ConfigError(
                Given("instance_ranks"),
                f" take {self.size} MPI ranks, and {job.size} were started: start them by "
                "fastdecode launch --placement",
                code="too_few_ranks",
            )
