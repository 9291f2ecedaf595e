"""Steps on their way through the stages: from the first one to the later ones, each of which runs
the steps that it is sent, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.stages.links import FromAnyStage, StageLinks
from fastdecode.engine.stages.pool import ColumnPool
from fastdecode.engine.stages.relay import Relay
from fastdecode.engine.step.batch import StepBatch
from fastdecode.engine.step.pipeline import LaneStep, Pipeline
from fastdecode.engine.step.remote import Attention
from fastdecode.wire.messages import MAX_ID, Activations, Shutdown
from fastdecode.wire.stages import ASKS, DRAWS, FIRST_STAGE, GreetColumn, StageDone, StagePass
from sworker.buffers import Fetched, as_array, as_tensor
from sworker.worker import SWorker

_LOOK_EVERY_S = 0.05  # whether the replacement of a lost R-worker has answered


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
    first_tokens = batch.positions[batch.last_rows] - (num_past + num_new - 1)
    closed = [
        (one.holder, one.part, one.num_tokens, one.num_beyond, one.first_row, one.num_rows)
        for one in batch.closed
    ]
    ids = np.array([one.part_id for one in batch.closed], np.int64)
    return StagePass(
        step=begun[0].step,
        lane=begun[0].lane,
        x=x,
        sequence_ids=np.concatenate([begin.sequence_ids[:number] for begin, number in own]),
        columns=np.repeat(np.array([span.holder for span in batch.spans], np.int32), lengths),
        num_past=num_past,
        num_new=num_new,
        draws=draws,
        lost=columns_of(lost),
        first_tokens=first_tokens.astype(np.int32) if first_tokens.any() else None,
        closed_ids=ids if closed else None,
        closed=np.array(closed, np.int32) if closed else None,
    )


class FirstStageForward:
    """A step of the first stage, sent to the later ones. The last returns rows that draw tokens."""

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


class LaterStageForward:
    """A step of a later stage, which is sent to the next one, or to the first.

    Args:
        output: The output of the stage's last layer, on its way to the host. In the last stage
            only rows that draw a token.
    """

    reports = ()

    def __init__(self, output: Fetched, leave: Callable[[Activations], None]) -> None:
        self.copy = output
        self._leave = leave

    @property
    def can_advance(self) -> bool:
        return self.copy.done

    def advance(self) -> Tensor | None:
        self._leave(as_array(self.copy.host))
        return torch.empty((0, 0))

    def deliver(self, done: StageDone) -> None:
        raise ProtocolError(f"stage {done.stage} reports to the wrong stage")


class LaterStage:
    """Runs the steps that the stage before passes on, and relays between the first stage and its
    R-workers.

    Args:
        behind: The stage that it passes steps on to. None in the last stage.
        links: Links to the first stage, the one before and the one behind.
    """

    def __init__(
        self,
        number: int,
        behind: int | None,
        s_worker: SWorker,
        attention: Attention,
        links: StageLinks,
        num_lanes: int,
        relay: Relay,
    ) -> None:
        self._number = number
        self._next = behind
        self._s_worker = s_worker
        self._fleet, self._holders = attention.fleet, attention.holders
        self._links = links
        self._num_lanes = num_lanes
        self._pipeline = Pipeline(s_worker, attention, num_lanes, onward=self)
        self._waiting: list[StagePass] = []
        self._passed: dict[int, StagePass] = {}  # by lane
        self._relay = relay
        self._is_over = False

    def run(self) -> None:
        """Run until the first stage sends ``Shutdown``.

        Raises:
            WorkerError: If another stage is lost, or all R-workers are.
            ProtocolError: If another stage sends what it mustn't.
        """
        while not self._is_over:
            self._tell_news()
            for stage, message in self._links.take_heard():
                self._obey(stage, message)
            self._launch()
            if self._is_over or self._links.heard:
                continue
            if self._pipeline.in_flight:
                self._pipeline.run()
            else:
                awaits = self._relay.awaits_replacements
                self._pipeline.receive(_LOOK_EVERY_S if awaits else math.inf)

    def leave(self, step: LaneStep) -> LaterStageForward:
        x = step.forward.output
        if self._next is None:
            rows = step.logit_rows
            if step.asked_rows is not None:
                rows = np.concatenate((rows, step.asked_rows))
            x = _rows(x, self._s_worker.upload(torch.from_numpy(rows)))
        output = self._s_worker.to_host(x, step.lane)
        return LaterStageForward(output, partial(self._pass_on, step))

    def take_done(self) -> tuple[StageDone, ...]:
        return ()

    @property
    def has_orders(self) -> bool:
        return bool(self._links.heard)

    def _pass_on(self, step: LaneStep, x: Activations) -> None:
        """Send a step's output to the next stage, if there is one. Report to the first stage,
        with the output from the last one."""
        self._s_worker.check()
        self._tell_news()  # the loss of a column is reported before the step's rows
        passed = self._passed.pop(step.lane)
        lost = columns_of({*passed.lost.tolist(), *self._fleet.lost})
        if self._next is not None:
            self._links.tell(self._next, replace(passed, x=x, lost=lost))
        r_compute_s = np.zeros(len(self._holders), np.float32)
        for column, seconds in step.record.r_compute_s.items():
            r_compute_s[column] = seconds
        round_trips_s = step.round_trips_s
        done = StageDone(
            self._number,
            step.step,
            step.lane,
            s_part_s=step.s_part_s(),
            round_trip_s=round_trips_s if math.isfinite(round_trips_s) else 0.0,
            r_compute_s=r_compute_s,
            lost=lost,
            x=None if self._next is not None else x,
        )
        self._links.tell(FIRST_STAGE, done)

    def _tell_news(self) -> None:
        """Report what R-workers have answered, and which of them are lost."""
        self._relay.pass_on(self._pipeline.take_news())

    def _obey(self, stage: int, message: FromAnyStage) -> None:
        """Raise ProtocolError if that stage may not send that, or not now."""
        if isinstance(message, StagePass):
            if stage != self._number - 1:
                raise ProtocolError(f"stage {stage} passed a step to stage {self._number}")
            self._check(message)
            self._waiting.append(message)
        elif stage != FIRST_STAGE:
            raise ProtocolError(f"stage {stage} sent {type(message).__name__}")
        elif isinstance(message, Shutdown):
            self._is_over = True
        else:
            if isinstance(message, GreetColumn) and self._relay.forgets_answers:
                self._pipeline.lose(HolderId(message.column))  # steps in flight get no answer
            self._relay.obey(message)

    def _launch(self) -> None:
        """Start the steps that wait, but for those of a lane whose last layer isn't stored yet."""
        waiting, self._waiting = self._waiting, []
        for passed in waiting:
            if passed.lane not in self._pipeline.idle:
                self._waiting.append(passed)
                continue
            x = as_tensor(passed.x, self._s_worker.model.dtype)
            batch = StepBatch.passed_on(passed, self._holders, x)
            self._passed[passed.lane] = passed
            self._pipeline.launch(passed.lane, batch, batch.last_rows[batch.draws])
            for column in self._fleet.lost:
                self._pipeline.lose(column)

    def _check(self, passed: StagePass) -> None:
        """
        Raises:
            ProtocolError: If no step can be like that.
        """
        num_columns, hidden_size = len(self._holders), self._s_worker.spec.hidden_size
        dtype = np.float32 if self._s_worker.model.dtype == torch.float32 else np.uint16
        is_sane = (
            0 <= passed.step <= MAX_ID
            and 0 <= passed.lane < self._num_lanes
            and all(other.lane != passed.lane for other in self._waiting)
            and passed.x.dtype == dtype
            and passed.x.shape == (int(passed.num_new.sum(dtype=np.int64)), hidden_size)
            and len(passed.num_new) > 0
            and int(passed.num_new.min()) > 0
            and int(passed.num_past.min()) >= 0
            and _within(passed.columns, num_columns)
            and _within(passed.lost, num_columns)
        )
        if not is_sane:
            raise ProtocolError(
                f"step {passed.step} came in lane {passed.lane} with {list(passed.x.shape)} rows "
                f"of {len(passed.num_new)} sequences, which can't be: are all stages of the same "
                "version, with the same options?"
            )


@torch.inference_mode()
def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows]


def _within(columns: NDArray[np.int32], num_columns: int) -> bool:
    return not len(columns) or (int(columns.min()) >= 0 and int(columns.max()) < num_columns)
