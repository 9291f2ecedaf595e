"""R-workers that get into trouble in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from values import replace

from fastdecode.engine.instances import cluster
from fastdecode.engine.setup import workers
from fastdecode.wire.messages import AttendResult
from rworker.attention import AttentionExecutor
from rworker.instructions import Compute
from rworker.tiers.tiers import Tiers
from rworker.worker import WorkerThread, start_worker_thread


def crash() -> None:
    raise MemoryError("no more memory")


class Trouble(AttentionExecutor):
    """Works until its ``after``-th layer, then has the trouble."""

    def __init__(self, after: int, trouble: Callable[[], None] = crash) -> None:
        super().__init__(num_threads=1)
        self._left = after
        self._trouble = trouble

    def compute(self, compute: Compute) -> AttendResult:
        self._left -= 1
        if self._left < 0:
            self._trouble()
        return super().compute(compute)


class NotFinite(AttentionExecutor):
    """From its ``after``-th layer on, answers ``what`` to some of the rows."""

    def __init__(self, after: int = 17, what: float = np.nan) -> None:
        super().__init__(num_threads=1)
        self._left = after
        self._what = what

    def compute(self, compute: Compute) -> AttendResult:
        result = super().compute(compute)
        self._left -= 1
        if self._left >= 0 or not len(result.o):
            return result
        o = result.o.copy()
        o[-1, 0, 3] = self._what
        return replace(result, o=o)


def give(
    monkeypatch: pytest.MonkeyPatch,
    executors: Mapping[str, Callable[[], AttentionExecutor]],
    starter: ModuleType = workers,
) -> None:
    """Have R-workers that ``starter`` starts from now on, by name, work with these."""
    monkeypatch.setattr(starter, "start_worker_thread", _starting(executors))


def _starting(executors: Mapping[str, Callable[[], AttentionExecutor]]) -> Callable[..., Any]:
    def start(name: str, **options: Any) -> WorkerThread:
        executor = executors[name]() if name in executors else None
        if executor is not None and executor.tiers._disk is None:
            executor.tiers = Tiers(options.get("disk"))
        return start_worker_thread(name, **options, executor=executor)

    return start


def crash_after(monkeypatch: pytest.MonkeyPatch, layers: Mapping[str, int]) -> None:
    """Have R-workers crash after so many layers each."""
    give(monkeypatch, {name: lambda after=after: Trouble(after) for name, after in layers.items()})  # type: ignore[misc]


def crash_in_spawned(
    monkeypatch: pytest.MonkeyPatch, layers: Mapping[str, int], path: Path
) -> None:
    """The same in instances that are spawned; ``path`` is made when the first crashes."""
    boot = f"import trouble; trouble.crash_here({dict(layers)!r}, {str(path)!r}); {cluster._BOOT}"
    monkeypatch.setattr(cluster, "_BOOT", boot)


def crash_here(layers: Mapping[str, int], path: str) -> None:
    def note_and_crash() -> None:
        Path(path).touch()  # a peer may ask for more before the R-worker ends
        crash()

    executors = {x: partial(Trouble, after, note_and_crash) for x, after in layers.items()}
    workers.start_worker_thread = _starting(executors)
