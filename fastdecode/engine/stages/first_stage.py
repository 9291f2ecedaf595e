"""The first stage: its steps, which go to the later stages and back, and its columns, which are
greeted again once their lost members have been replaced."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.groups import CacheGroup
from fastdecode.engine.fleet.replacements import Replacements, limited
from fastdecode.engine.stages.pool import ColumnPool
from fastdecode.engine.step.batch import StepBatch
from fastdecode.wire.messages import Activations, Hello, Welcome
from fastdecode.wire.stages import ASKS, DRAWS, StageDone, StagePass
from sworker.buffers import Fetched, as_array, as_tensor

if TYPE_CHECKING:
    from fastdecode.engine.step.pipeline import LaneStep
    from sworker.worker import SWorker


def stage_pass(batch: StepBatch, x: Activations, lost: Collection[int]) -> StagePass:
    """Return a step for the next stage, as the first stage has laid it out.

    Args:
        x: The first stage's output for the step's rows, [T, H].
    """
    begun = [span.begin for span in batch.spans]
    lengths = [int(np.count_nonzero(begin.num_new)) for begin in begun]
    own = list(zip(begun, lengths, strict=True))  # closed parts are behind them
    num_past = np.concatenate([begin.num_past[:number] for begin, number in own])
    num_new = np.concatenate([begin.num_new[:number] for begin, number in own])
    draws = batch.draws.astype(np.uint8) * np.uint8(DRAWS)
    if batch.asks is not None:
        draws |= batch.asks.astype(np.uint8) * np.uint8(ASKS)
    passed = StagePass(
        step=begun[0].step,
        lane=begun[0].lane,
        x=x,
        sequence_ids=np.concatenate([begin.sequence_ids[:number] for begin, number in own]),
        columns=np.repeat(np.array([span.holder for span in batch.spans], np.int32), lengths),
        num_past=num_past,
        num_new=num_new,
        draws=draws,
        lost=columns_of(lost),
    )
    first_tokens = batch.positions[batch.last_rows] - (num_past + num_new - 1)
    if first_tokens.any():  # of split sequences
        passed = replace(passed, first_tokens=first_tokens.astype(np.int32))
    if not batch.closed:
        return passed
    closed = [
        (one.holder, one.part, one.num_tokens, one.num_beyond, one.first_row, one.num_rows)
        for one in batch.closed
    ]
    ids = np.array([one.part_id for one in batch.closed], np.int64)
    return replace(passed, closed_ids=ids, closed=np.array(closed, np.int32))


class FirstStageForward:
    """A step of the first stage, which is sent to the later ones. The last one returns the rows
    that draw a token."""

    def __init__(self, step: LaneStep, output: Fetched, fleet: ColumnPool) -> None:
        self._step, self._later, self._fleet = step, fleet.later, fleet
        self.copy = output
        self._is_sent = False
        self.reports: list[StageDone] = []

    @property
    def can_advance(self) -> bool:
        if not self._is_sent:
            return self.copy.done
        return len(self.reports) == len(self._later.later)

    def advance(self) -> Tensor | None:
        """Send the step; later return the logits [R, V] of the R rows that a token is drawn from,
        made of the last stage's output [R, H]."""
        step = self._step
        if not self._is_sent:
            self._is_sent = True
            passed = stage_pass(step.batch, as_array(self.copy.host), self._fleet.lost)
            self._later.send(passed)
            return None
        last = max(self.reports, key=lambda done: done.stage)
        sent = as_array(self.copy.host)
        num_draws = len(step.logit_rows)
        num_asked = 0 if step.asked_rows is None else len(step.asked_rows)
        shape = num_draws + num_asked, sent.shape[1]
        if last.x is None or last.x.shape != shape or last.x.dtype != sent.dtype:
            found = "nothing" if last.x is None else f"{last.x.dtype} {list(last.x.shape)}"
            raise WorkerError(
                f"stage {last.stage} gave {found} back where {list(shape)} was due: are all "
                "stages of the same version?",
                code="stage_lost",
            )
        step.forward.come_home(as_tensor(last.x, self.copy.host.dtype))
        if step.asked_rows is not None:
            step.asked_rows = np.arange(num_draws, shape[0])
        return step.forward.logits(np.arange(num_draws))

    def deliver(self, done: StageDone) -> None:
        self.reports.append(done)


class FirstStage:
    """Passes steps of the first stage on (``NextStage``)."""

    has_orders = False

    def __init__(self, s_worker: SWorker, fleet: ColumnPool) -> None:
        self._s_worker, self._fleet = s_worker, fleet

    def leave(self, step: LaneStep) -> FirstStageForward:
        output = self._s_worker.to_host(step.forward.output, step.lane)
        return FirstStageForward(step, output, self._fleet)

    def take_done(self) -> list[StageDone]:
        return self._fleet.later.take_done()


def columns_of(columns: Collection[int]) -> NDArray[np.int32]:
    return np.array(sorted(columns), np.int32)


class ColumnReplacements:
    """Greets a lost column again in every stage, once its lost members have been replaced, each in
    its own stage (``Replacements``).

    A lost column is only greeted when no sequence is on it. No stage has a step on it in flight
    then, so its R-workers may forget what they have.

    Args:
        places: R-workers that may replace these.
    """

    def __init__(
        self, fleet: ColumnPool, hello: Hello, places: Replacements, timeout_s: float
    ) -> None:
        self._fleet = fleet
        self._hello = hello
        self._places = places
        self._timeout_s = timeout_s
        self._greeting: set[HolderId] = set()
        self._most_blocks: Mapping[int, int] = {}

    @property
    def timeout_s(self) -> float:
        """How long to keep looking. 0 if each lost column lacks a member without a possible
        replacement."""
        groups = (self._fleet.groups[holder] for holder in self._fleet.lost)
        return 0.0 if all(map(self._is_vacant, groups)) else self._timeout_s

    def limit(self, num_blocks: Mapping[int, int]) -> None:
        """Set the most KV blocks of replacements, and of the remaining members."""
        self._most_blocks = num_blocks
        self._places.limit(num_blocks)

    def look(self, lost: Collection[int]) -> dict[int, Welcome]:
        if not self._fleet.later.are_welcome:
            return {}  # the job begins
        if len(self._fleet.lost) == len(self._fleet):
            self._fleet.look()  # no step waits for answers meanwhile
        for holder in map(HolderId, lost):
            group = self._fleet.groups[holder]
            if group.broken is not None:
                self._greeting.discard(holder)
            if holder not in self._greeting and self._let_in(group):
                self._greeting.add(holder)
                self._fleet.send(holder, limited(self._hello, self._most_blocks, holder))
        found = {holder: self._fleet.groups[holder].welcome for holder in self._greeting}
        return {holder: welcome for holder, welcome in found.items() if welcome is not None}

    def admit(self, worker: int) -> None:
        self._greeting.discard(HolderId(worker))

    def _is_vacant(self, group: CacheGroup) -> bool:
        members = self._fleet.of_stages
        lost = filter(members.is_lost, group.shards)
        has_places = bool(self._places.timeout_s)
        may_come = (
            has_places if members.is_here(x) else members.has_replacement.get(x, True) for x in lost
        )
        return not all(may_come)

    def _let_in(self, group: CacheGroup) -> bool:
        """Make members of the replacements of a column's lost members. Return False if one has
        none."""
        members = self._fleet.of_stages
        here = [x for x in group.shards if members.is_here(x) and members.is_lost(x)]
        if not set(here) <= self._places.look(here).keys():
            return False
        if not members.revive_elsewhere(group.shards):
            return False
        for member in here:
            self._places.admit(member)
            members.revive(member)
        return True
