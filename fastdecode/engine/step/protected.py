"""Attention in a device's KV caches that have replicas: when the device fails, steps go
on at the R-workers that take the replicas over.

The device fails where it makes room for a step, or attends a layer: it is out of memory,
or refuses a kernel. The step then goes on without its rows, as every step does whose
R-worker is lost, and nothing of it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import Holder, HolderId
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.local import DeviceWorker, LocalStep
from fastdecode.engine.step.remote import AttentionPlan, RemoteStep
from sworker.failures import is_failure


class DeviceAttention(Protocol):
    """Attention in the caches of one device; see ``fastdecode.engine.step.remote.Attention``."""

    @property
    def fleet(self) -> HolderPool: ...

    @property
    def holders(self) -> Sequence[Holder]: ...

    @property
    def connections(self) -> Sequence[DeviceWorker]:
        """The R-workers whose caches these are, by their holders."""

    def begin(self, batch: StepBatch) -> LocalStep: ...


class ProtectedAttention:
    """Makes a lane's ``attend`` of every step; see
    ``fastdecode.engine.step.remote.Attention``.

    Args:
        local: on the device.
        plan: on the R-workers that take over.
    """

    def __init__(self, local: DeviceAttention, plan: AttentionPlan) -> None:
        self.holders = local.holders
        self._plan, self._connections = plan, local.connections
        self.local: DeviceAttention | None = local
        """None: the device has failed."""

    @property
    def fleet(self) -> HolderPool:
        return self._plan.fleet

    def begin(self, batch: StepBatch) -> LocalStep | RemoteStep:
        """See ``Attention``."""
        if self.local is not None and not all(x.is_open for x in self._connections):
            self._give_up()  # it failed between two steps
        if self.local is None:
            return self._plan.begin(batch)
        try:
            step = self.local.begin(batch)
        except Exception as error:
            self._fail(error)
            return self._plan.begin(batch)
        self._guard(step)
        return step

    def _guard(self, step: LocalStep) -> None:
        """A device that fails costs the step its rows, and no more."""
        attend, holder = step.attend, step.batch.spans[0].holder

        def attend_or_lose(
            layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
        ) -> Tensor:
            if not step.lost:
                try:
                    return attend(layer, q, k, v, place)
                except Exception as error:
                    self._fail(error)
                    step.lose(holder)
            return torch.zeros_like(q)

        step.attend = attend_or_lose

    def _fail(self, error: Exception) -> None:
        """The device has failed, and all caches on it are lost; or else the error is a
        mistake, and raised."""
        if not is_failure(error):
            raise error
        self._give_up()
        for index, connection in enumerate(self._connections):
            text = f"{connection.peer} failed: {type(error).__name__}: {error}"
            self.fleet.lose(HolderId(index), WorkerError(text, code="device_failed"))

    def _give_up(self) -> None:
        """The device's memory is free from now on. Caches that are not lost yet are found
        closed."""
        self.local = None
        for connection in self._connections:
            connection.close()
        self._connections[0].fail()
