"""What follows when a stage has run its own layers: the step goes to the later stages and
back (``FirstStageForward``), or on to the next one (``LaterStageForward``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.engine.stages.later import LaterStages
from fastdecode.engine.stages.pool import ColumnPool
from fastdecode.engine.step.batch import StepBatch
from fastdecode.wire.messages import Activations
from fastdecode.wire.stages import ASKS, DRAWS, StageDone, StagePass
from sworker.buffers import Fetched, as_array, as_tensor

if TYPE_CHECKING:
    from fastdecode.engine.step.lane_step import LaneStep
    from sworker.worker import SWorker


def stage_pass(batch: StepBatch, x: Activations, lost: Collection[int]) -> StagePass:
    """A step for the next stage, as the first one has laid it out.

    Args:
        x: [T, H] of its rows, the output of the first one's last layer.
        lost: columns whose rows mean nothing.
    """
    begun = [span.begin for span in batch.spans]
    lengths = [int(np.count_nonzero(begin.num_new)) for begin in begun]
    own = list(zip(begun, lengths, strict=True))  # closed parts are behind them
    num_past = np.concatenate([begin.num_past[:number] for begin, number in own])
    num_new = np.concatenate([begin.num_new[:number] for begin, number in own])
    passed = StagePass(
        step=begun[0].step,
        lane=begun[0].lane,
        x=x,
        sequence_ids=np.concatenate([begin.sequence_ids[:number] for begin, number in own]),
        columns=np.repeat(np.array([span.holder for span in batch.spans], np.int32), lengths),
        num_past=num_past,
        num_new=num_new,
        draws=_wanted(batch),
        lost=_numbers(lost),
    )
    first_tokens = batch.positions[batch.last_rows] - (num_past + num_new - 1)
    return _with_parts(passed, batch, first_tokens) if first_tokens.any() else passed


def _with_parts(passed: StagePass, batch: StepBatch, first_tokens: NDArray[np.int64]) -> StagePass:
    """The step of sequences that are split (``--split-tokens``)."""
    passed = replace(passed, first_tokens=first_tokens.astype(np.int32))
    if not batch.closed:  # rows see no token of those parts
        return passed
    closed = [
        (one.holder, one.part, one.num_tokens, one.num_beyond, one.first_row, one.num_rows)
        for one in batch.closed
    ]
    ids = np.array([one.part_id for one in batch.closed], np.int64)
    return replace(passed, closed_ids=ids, closed=np.array(closed, np.int32))


def _wanted(batch: StepBatch) -> NDArray[np.uint8]:
    draws = batch.draws.astype(np.uint8) * np.uint8(DRAWS)
    return draws if batch.asks is None else draws | batch.asks.astype(np.uint8) * np.uint8(ASKS)


class FirstStageForward:
    """A step of the first stage: it leaves for the later ones, and its rows
    that draw a token come home.

    Args:
        step: its own layers are done.
        later: the stages.
        output: of its last layer, on its way to the host.
        fleet: the columns.
    """

    def __init__(
        self,
        step: LaneStep,
        later: LaterStages,
        output: Fetched,
        fleet: ColumnPool,
    ) -> None:
        self._step, self._later, self._fleet = step, later, fleet
        self.copy = output
        self._is_sent = False
        self.reports: list[StageDone] = []

    @property
    def can_go_on(self) -> bool:
        if not self._is_sent:
            return self.copy.done
        return len(self.reports) == len(self._later.numbers)

    def go_on(self) -> Tensor | None:
        """See ``StageForward``. The logits [R, V] of the R rows that a token is drawn
        from, once the last stage's output [R, H] for them is home."""
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
    """What the first stage does with its steps; see ``NextStage``.

    Args:
        s_worker: its S-worker.
        fleet: the columns.
    """

    has_orders = False

    def __init__(self, s_worker: SWorker, fleet: ColumnPool) -> None:
        self._s_worker, self._later, self._fleet = s_worker, fleet.later, fleet

    def leave(self, step: LaneStep) -> FirstStageForward:
        output = self._s_worker.to_host(step.forward.output, step.lane)
        return FirstStageForward(step, self._later, output, self._fleet)

    def take_done(self) -> list[StageDone]:
        return self._later.take_done()


class LaterStageForward:
    """A step of a later stage: it leaves for the next one, or for the first.

    Args:
        output: of the stage's last layer, on its way to the host; of the last
            stage, the rows that draw a token.
        send: passes it on, unless the stage is the last.
        report: tells the first stage that this one has done its part.
    """

    reports = ()

    def __init__(
        self,
        output: Fetched,
        send: Callable[[Activations], None],
        report: Callable[[Activations], None],
    ) -> None:
        self.copy = output
        self._send, self._report = send, report

    @property
    def can_go_on(self) -> bool:
        return self.copy.done

    def go_on(self) -> Tensor | None:
        x = as_array(self.copy.host)
        self._send(x)
        self._report(x)
        return torch.empty((0, 0))

    def deliver(self, done: StageDone) -> None:
        raise ProtocolError(f"stage {done.stage} reports to the wrong stage")


def report(stage: int, step: LaneStep, num_columns: int, lost: Collection[int]) -> StageDone:
    """What a later stage has to say of a step: with seconds [C], of each of the
    ``num_columns``, and the columns [L] that are lost."""
    r_compute_s = np.zeros(num_columns, np.float32)
    for column, seconds in step.record.r_compute_s.items():
        r_compute_s[column] = seconds
    round_trips_s = step.round_trips_s
    return StageDone(
        stage,
        step.step,
        step.lane,
        s_part_s=step.s_part_s(),
        round_trip_s=round_trips_s if math.isfinite(round_trips_s) else 0.0,
        r_compute_s=r_compute_s,
        lost=_numbers(lost),
    )


def passed_on(passed: StagePass, x: Activations, lost: Collection[int]) -> StagePass:
    """A step for the stage behind, from what came of the one before.

    Args:
        x: [T, H] of its rows, the output of this stage's last layer.
        lost: columns whose rows mean nothing.
    """
    return replace(passed, x=x, lost=_numbers(lost))


def _numbers(columns: Collection[int]) -> NDArray[np.int32]:
    return np.array(sorted(columns), np.int32)
