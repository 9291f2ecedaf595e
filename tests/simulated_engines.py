"""Whole engines, made from their options by the product's own set-up, of which one R-worker is
lost.

R-workers are those of ``simulated_cluster``, one network a stage, wherever a single thread talks
to them; so are those at addresses, which need no socket then. Where several threads do
(``THREADED``), R-workers are threads; at addresses, threads that listen there."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from simulated_cluster import Network
from trouble import Trouble, crash, crash_in_spawned, give

from fastdecode.engine.fleet.replacements import HubReplacements
from fastdecode.engine.setup import reach
from fastdecode.engine.setup.workers import Reached
from fastdecode.wire.messages import AttendResult, FromRWorker
from rworker.instructions import Compute
from sworker.paged import PagedKV

if TYPE_CHECKING:
    pass

KV_BYTES = 4_000_000  # of an R-worker at an address
STAGES_WAIT_S = 0.01  # passes while nothing is there, where another transport is looked at, too
BACK_S = 0.002  # after a loss, another R-worker listens at the same address
END_S = 120.0  # by then R-workers have taken in that the engine has gone
THREADED = frozenset({"prompt stages", "instances", "disk tier"})
"""Features whose R-workers are reached by several threads, or have threads of their own."""


class _Network(Network):
    """That is looked at in turn with another hub: looking takes a moment."""

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, FromRWorker]:
        return super().receive_any(STAGES_WAIT_S if timeout_s == 0 else timeout_s)


class Losses:
    """Counts R-workers that were lost."""

    num_lost = 0


class SimulatedCluster(Losses):
    """Every R-worker of engines that are made from now on.

    Args:
        monkeypatch: has the set-up reach them.
        lost: (stage, R-worker) that crashes.
        after: so many layers that it computes.
        has_disk: R-workers share a directory for replicas.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        lost: tuple[int, int],
        after: int,
        *,
        has_disk: bool = False,
    ) -> None:
        self._most_file_bytes = 1e9 if has_disk else None
        self._lost = lost
        self._after = after
        self.networks: list[Network] = []
        monkeypatch.setattr(reach, "reach_threads", self._reach_threads)
        monkeypatch.setattr(reach, "reach_addresses", self._reach_addresses)

    def _reach_threads(
        self, num_workers: int, *, kv_bytes: int, stage: int = 0, **others: Any
    ) -> Reached:
        return self._reach(num_workers, kv_bytes, stage)

    def _reach_addresses(self, addresses: Sequence[str], **others: Any) -> Reached:
        """In place of ``reach_addresses``: one stage after the other asks."""
        return self._reach(len(addresses), KV_BYTES, len(self.networks), returns=True)

    def _reach(
        self, num_workers: int, kv_bytes: int, stage: int, *, returns: bool = False
    ) -> Reached:
        memory = num_workers, kv_bytes, random.Random(stage)
        network = _Network(*memory, most_file_bytes=self._most_file_bytes)
        self.networks.append(network)
        if stage == self._lost[0]:
            self._crash_later(network, self._lost[1], returns=returns)
        names = tuple(str(number) for number in range(num_workers))
        replacements = partial(HubReplacements, cast(Any, network)) if returns else None
        hub = cast(Any, network)
        return Reached(hub, partial(_close, network), addresses=names, replacements=replacements)

    def _crash_later(self, network: Network, number: int, *, returns: bool) -> None:
        process, left = network.processes[number], self._after
        compute: Callable[[Compute], AttendResult] = process.executor.compute

        def happen() -> None:
            process.crash()
            self.num_lost += 1
            if returns:
                network.time.at(network.time.now + BACK_S, partial(network.start, number))

        def counted(layer: Compute) -> AttendResult:
            nonlocal left
            left -= 1
            if left == 0:
                network.time.at(network.time.now, happen)
            return compute(layer)

        process.executor.compute = counted


def _close(network: Network, lost: Collection[int], timeout_s: float) -> None:
    """Let go of them all. They go on serving others, and keep nothing of this engine."""
    for link in network.connections:
        link.close()
    network.time.pass_by(END_S)
    for process in network.processes:
        process.state.check_invariants()
        assert not (process.is_up and list(process.state._caches)), process.state


class DeviceLosses(Losses):
    """Devices that keep KV run out of memory after so many layers that they attend.

    Args:
        before: is called first.
        is_one: only the device that attends that layer.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        after: int,
        before: Callable[[], object] = lambda: None,
        *,
        is_one: bool = False,
    ) -> None:
        left, attend = after, PagedKV.attend

        def counted(cache: PagedKV, *args: Any) -> torch.Tensor:
            nonlocal left
            left -= 1
            if left < 0 and not (is_one and left < -1):
                self.num_lost += left == -1
                before()
                raise torch.OutOfMemoryError("the device is full")
            return attend(cache, *args)

        monkeypatch.setattr(PagedKV, "attend", counted)


class SpawnedLosses(Losses):
    """The same of an R-worker of an instance that is spawned."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, name: str, after: int, directory: Path
    ) -> None:
        self._path = directory.with_suffix(".lost")
        crash_in_spawned(monkeypatch, {name: after}, self._path)

    @property
    def num_lost(self) -> int:
        return int(self._path.exists())


class ThreadLosses(Losses):
    """Makes R-workers threads, and crashes the one of this name after ``after`` layers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> None:
        def trouble() -> None:
            self.num_lost = 1  # a peer may ask it for more before it ends
            crash()

        give(monkeypatch, {name: lambda: Trouble(after, trouble)})
