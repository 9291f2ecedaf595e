"""Jobs of several pipeline stages over MPI, whose stages and R-workers are killed
and stopped at random moments.

A lost stage ends its job with exit code 4, by its name; a lost R-worker of a
stage changes nothing, as long as one column has all of its R-workers.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rank_blows import Blow, RankBlows, row_of
from small_jobs import PHASES, Ended, Job, SmallJobs

TRANSPORTS = ("mpi", "launch")
SERVED = ("greeting", "prompts", "decoding", "end")
MOST_HIT = 4
"""R-workers of one job."""
NUM_COLUMNS = 3
"""R-workers of each stage that has any."""


@dataclass(frozen=True)
class Shape:
    """What a job's ranks are."""

    pp: int
    prompt_pp: int = 0
    tp: int = 1
    num_columns: int = NUM_COLUMNS
    """R-workers of each stage, standby ones among them."""
    num_spares: int = 0
    options: tuple[str, ...] = ()

    @property
    def num_s_ranks(self) -> int:
        return (self.pp + self.prompt_pp) * self.tp

    @property
    def num_r_workers(self) -> int:
        return self.pp * self.num_columns

    def words(self) -> list[str]:
        """Of the command."""
        told = {"--pp": self.pp, "--prompt-pp": self.prompt_pp, "--tp": self.tp}
        usual = {"--pp": 1, "--prompt-pp": 0, "--tp": 1}
        given = [(name, str(n)) for name, n in told.items() if n != usual[name]]
        given += [("--spare-r-workers", str(self.num_spares))] if self.num_spares else []
        # Prompts arrive all the time: few run at once, and they are cut small.
        few = ["--prefill-chunk", "4", "--max-num-sequences", "3"]
        return [*(word for pair in given for word in pair), *few, *self.options]

    def stage_name(self, rank: int) -> str:
        """What an S-worker's stage is called."""
        stage = rank // self.tp
        if stage >= self.pp:
            return f"prompt stage {stage - self.pp}"
        return f"stage {stage}" if stage else "the first stage"

    def r_rank(self, stage: int, column: int) -> int:
        return self.num_s_ranks + stage * self.num_columns + column


HEADS = ("--r-partition", "heads")
ON_DEVICES = ("--kv-placement", "gpu", "--kv-memory-gb", "0.02")
SHAPES = {
    "two": Shape(2),
    "three": Shape(3, num_columns=2),
    "replicas": Shape(2, options=("--replicas", "1")),
    "prompts": Shape(2, prompt_pp=1),
    "prompts of two": Shape(1, prompt_pp=2),
    "prompts to several S-workers": Shape(
        1, prompt_pp=1, tp=2, options=("--worker-timeout-s", "30")
    ),
    "prompts to heads": Shape(1, prompt_pp=1, options=HEADS),
    "prompts to heads of standby": Shape(
        1, prompt_pp=1, num_columns=4, num_spares=1, options=HEADS
    ),
    "prompts to standby": Shape(1, prompt_pp=2, num_spares=1),
    "prompts to later standby": Shape(2, prompt_pp=1, num_spares=1),
    "prompts to later heads": Shape(2, prompt_pp=1, options=HEADS),
    "prompts to split": Shape(1, prompt_pp=1, options=("--split-tokens", "64")),
    "prompts to replicas": Shape(2, prompt_pp=1, options=("--replicas", "1")),
    "swap": Shape(3, num_columns=0, options=(*ON_DEVICES, "--kv-placement", "swap")),
    "on devices": Shape(2, num_columns=0, options=ON_DEVICES),
    "heads": Shape(2, options=HEADS),
    "heads of standby": Shape(2, num_spares=1, options=HEADS),
    "standby": Shape(2, num_spares=1),
    "split": Shape(2, options=("--split-tokens", "64")),
    "of two S-workers": Shape(2, tp=2, num_columns=2, options=("--worker-timeout-s", "30")),
}


@dataclass(frozen=True)
class StageLoss:
    """What happens in one job."""

    transport: str
    shape: str
    blows: tuple[Blow, ...]
    """In their order: of one stage, or of R-workers."""


@dataclass(frozen=True)
class Report:
    """What became of it."""

    loss: StageLoss
    blows: list[Blow]
    """For which the rank was there, in time."""
    is_named: bool
    """The output tells which stage, or rank, was lost."""
    ended: Ended

    @property
    def verdict(self) -> str:
        """A lost stage ends its job; lost R-workers change nothing."""
        by_stage = bool(self.blows) and all(blow.whom == "stage" for blow in self.blows)
        if self.ended.is_hung or self.ended.num_changed or self.ended.is_right:
            return self.ended.verdict
        if not self.blows:
            return "failed by itself"
        return self._of_a_stage if by_stage else self.ended.verdict

    @property
    def _of_a_stage(self) -> str:
        if self.blows[0].rank == 0:  # which would say how the job has ended, and not mpirun
            is_told = self.ended.exit_code or self.loss.transport == "mpi"
            return "right" if is_told else "other exit code"
        if self.ended.exit_code != 4:
            return "other exit code"
        return "right" if self.is_named else "unnamed"


def stage_losses(number: int, chance: random.Random, of: str = "") -> list[StageLoss]:
    """So many jobs, half of which lose a stage, and half R-workers.

    Args:
        of: shapes whose names begin so.
    """
    names = [name for name in SHAPES if name.startswith(of)]
    chosen: list[StageLoss] = []
    while len(chosen) < number:
        kinds = [
            StageLoss(chance.choice(TRANSPORTS), name, make(SHAPES[name], chance))
            for name in names
            for make in (_of_a_stage, _of_r_workers)
            if SHAPES[name].num_columns or make is _of_a_stage
        ]
        chosen += chance.sample(kinds, len(kinds))
    return chosen[:number]


def _of_a_stage(shape: Shape, chance: random.Random) -> tuple[Blow, ...]:
    """Any of its S-workers; the very first one, who must speak for all, is only killed."""
    rank = chance.randrange(shape.num_s_ranks)
    trouble = chance.choice(("SIGKILL", "SIGSTOP")) if rank else "SIGKILL"
    return (Blow(chance.choice(PHASES), trouble, rank, "stage"),)


def _of_r_workers(shape: Shape, chance: random.Random) -> tuple[Blow, ...]:
    """Some of them, and one column keeps all of its own."""
    num_active = shape.num_columns - shape.num_spares
    columns = chance.sample(range(num_active), num_active - 1)
    columns += range(num_active, shape.num_columns)
    ranks = [shape.r_rank(stage, column) for stage in range(shape.pp) for column in columns]
    hit = chance.sample(ranks, min(MOST_HIT, len(ranks)))
    phases = sorted((chance.choice(SERVED) for _ in hit), key=SERVED.index)
    return tuple(
        Blow(phase, chance.choice(("SIGKILL", "SIGKILL", "SIGSTOP")), rank, "R-worker")
        for phase, rank in zip(phases, hit, strict=True)
    )


class StageLosses:
    """Runs such jobs.

    Args:
        jobs: starts them.
        chance: the moments' seed.
    """

    def __init__(self, jobs: SmallJobs, chance: random.Random) -> None:
        self._jobs = jobs
        self._blows = RankBlows(jobs, chance)

    def lose(self, loss: StageLoss) -> Report:
        """One job with its losses."""
        shape = SHAPES[loss.shape]
        start = partial(self._start, loss.transport, shape)
        found, outcome = self._blows.strike(start, loss.blows, shape.num_columns > 0)
        names = [name for blow in found for name in _names(shape, blow)]
        is_named = any(name in outcome.output for name in names)
        ended = replace(self._jobs.ended(outcome), exit_code=self._exit_code(outcome.exit_code))
        return Report(loss, found, is_named, ended)

    def _start(self, transport: str, shape: Shape) -> contextlib.AbstractContextManager[Job]:
        words = shape.words()
        if transport == "mpi":
            words += ["--exit-code-file", str(self._told)]
        return self._jobs.start(
            transport, shape.num_r_workers, words, num_s_ranks=shape.num_s_ranks
        )

    @property
    def _told(self) -> Any:
        """Where the first stage says how a job has ended."""
        return self._jobs.directory / "out.jsonl.exit_code"

    def _exit_code(self, launchers: int | None) -> int | None:
        """Of the job; mpirun's own says little once a rank was lost."""
        with contextlib.suppress(OSError, ValueError):
            return int(self._told.read_text()) if launchers is not None else None
        return launchers


def _names(shape: Shape, blow: Blow) -> list[str]:
    """What whoever is hit may be called."""
    if blow.whom == "stage":
        own = [f"S-worker {blow.rank % shape.tp} of {shape.tp}"] if shape.tp > 1 else []
        return [shape.stage_name(blow.rank), f"rank {blow.rank}", *own]
    return [f"rank {blow.rank}"]


def row(report: Report) -> dict[str, Any]:
    """For a table."""
    about = row_of(report.loss.transport, report.loss.shape, report.loss.blows, report.blows)
    shown = {**about, **report.ended.shown(), "is_named": report.is_named}
    if report.verdict == "right":
        shown.pop("last_words", None)
    return {**shown, "verdict": report.verdict}
