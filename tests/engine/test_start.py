"""What an engine has opened is closed again when it can't start, and what is
known to be missing is said before the model is loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trouble import Trouble, crash, give

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.engine.setup import launch
from fastdecode.engine.setup.launch import RunningEngine

OPTIONS: dict[str, Any] = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01}


class FailsAtOnce(Trouble):
    """Can't even prepare a cache."""

    def __init__(self) -> None:
        super().__init__(after=0)

    def prepare(self, *args: Any) -> None:
        crash()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not [name for name in left if name.startswith(("rworker", "stage"))]


def start(path: Path | str, told: list[str] | None = None, **options: Any) -> RunningEngine:
    config = EngineConfig.of(str(path), **OPTIONS, **options)
    return RunningEngine(config, progress=None if told is None else told.append)


def test_what_is_open_is_closed_when_a_later_part_refuses(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(resolved: object, colocation: object) -> None:
        raise ConfigError("no device")

    monkeypatch.setattr(launch, "device_beside", refuse)
    with pytest.raises(ConfigError, match="no device"):
        start(llama, r_workers=2)


def test_a_single_r_worker_keeps_no_replicas(llama: str) -> None:
    told: list[str] = []
    with pytest.raises(ConfigError, match="second R-worker"):
        start(llama, told, replicas=1, r_workers=1)
    assert told == [], "nothing is loaded"


def test_whole_columns_of_r_workers_are_left_out(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, {"s1-r1": FailsAtOnce})
    running = start(llama, pp=2, r_workers=2)
    assert running.num_r_workers == 4 and len(running.welcomes) == 1  # of both stages
    running.close()
    give(monkeypatch, {"s1-r0": FailsAtOnce, "s1-r1": FailsAtOnce})
    with pytest.raises(WorkerError, match=r"column \d of stage 1"):
        start(llama, pp=2, r_workers=2)
