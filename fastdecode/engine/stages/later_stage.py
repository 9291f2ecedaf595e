"""A stage behind the first: runs the steps that it is sent, until the first stage ends it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.engine.stages.first_stage import columns_of
from fastdecode.engine.stages.links import FromAnyStage, StageLinks
from fastdecode.engine.stages.relay import Relay
from fastdecode.engine.step.batch import StepBatch
from fastdecode.engine.step.pipeline import LaneStep, Pipeline
from fastdecode.engine.step.remote import Attention
from fastdecode.wire.messages import MAX_ID, Activations, Shutdown
from fastdecode.wire.stages import FIRST_STAGE, GreetColumn, StageDone, StagePass
from sworker.buffers import Fetched, as_array, as_tensor
from sworker.worker import SWorker

_LOOK_EVERY_S = 0.05  # whether the replacement of a lost R-worker has answered


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
            x = _rows(x, self._s_worker.upload(torch.from_numpy(step.wanted_rows)))
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
