"""Attention in a device's KV cache that has a replica: when the device fails, steps go
on at the R-worker that takes the replica over.

The device fails where it makes room for a step, or attends a layer: it is out of memory,
or refuses a kernel. The step then goes on without its rows, as every step does whose
R-worker is lost, and nothing of it counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.local import DeviceWorker, LocalAttention, LocalStep
from fastdecode.engine.step.remote import AttentionPlan, RemoteStep
from sworker.failures import is_failure
from sworker.whole import WholeSteps
from sworker.worker import Pass, SWorker


class _DeviceFailedError(Exception):
    """The device has failed in a step.

    Args:
        reason: why.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


class ProtectedAttention:
    """Makes a lane's ``attend`` of every step; see
    ``fastdecode.engine.step.remote.Attention``.

    Args:
        local: on the device.
        plan: on the R-worker that takes over.
    """

    def __init__(self, local: LocalAttention, plan: AttentionPlan) -> None:
        self.holders = local.holders
        self._plan, self._connection = plan, local.connection
        self._local: LocalAttention | None = local  # None: the device has failed

    @property
    def fleet(self) -> HolderPool:
        return self._plan.fleet

    def begin(self, batch: StepBatch) -> LocalStep | RemoteStep:
        """See ``Attention``."""
        if self._local is not None and not self._connection.is_open:
            self._give_up()  # it failed between two steps
        if self._local is None:
            return self._plan.begin(batch)
        try:
            return _Step(self._connection, batch, self._local.whole, self)
        except Exception as error:
            if not is_failure(error):
                raise
            self.lose(batch.spans[0].holder, error)
            return self._plan.begin(batch)

    def lose(self, holder: HolderId, error: Exception) -> None:
        """The device has failed. Its memory is free from now on."""
        self._give_up()
        text = f"{self._connection.peer} failed: {type(error).__name__}: {error}"
        self.fleet.lose(holder, WorkerError(text, code="device_failed"))

    def _give_up(self) -> None:
        self._local = None
        self._connection.fail()


class _Step(LocalStep):
    """One lane's step on the device, until that fails."""

    def __init__(
        self,
        connection: DeviceWorker,
        batch: StepBatch,
        whole: WholeSteps | None,
        attention: ProtectedAttention,
    ) -> None:
        super().__init__(connection, batch, whole)
        self._attention = attention

    def run_through(self, s_worker: SWorker) -> Pass | None:
        """See ``LaneAttention``."""
        try:
            return super().run_through(s_worker)
        except _DeviceFailedError as failed:
            self.lost = (self._holder,)
            self._attention.lose(self._holder, failed.reason)
            return None

    def scatter(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> bool:
        """See ``LaneAttention``: after a failure, as of any holder that is lost."""
        self._o = torch.zeros_like(q)
        return True

    def lose(self, holder: HolderId) -> None:
        """See ``LaneAttention``. It is known."""

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> Tensor:
        try:
            return super()._attend(layer, q, k, v, place)
        except Exception as error:
            if is_failure(error):
                raise _DeviceFailedError(error) from error
            raise
