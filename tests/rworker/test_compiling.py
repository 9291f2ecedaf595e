"""The second process that compiles kernels."""

from __future__ import annotations

from typing import Any

import numba
import pytest

import cpu_kernels.kernels  # noqa: F401  (it must not import what a test puts in its place)
from cpu_kernels import BlockLayout, dispatch
from cpu_kernels.codegen import kept
from fastdecode.core.dtype import DType
from rworker import compiling
from rworker.instructions import Prepare

LAYOUT = BlockLayout(num_kv_heads=2, head_dim=16, dtype="int8", block_size=16)
PREPARE = compiling.prepared(LAYOUT, [2, 6], DType.FLOAT16)


class Started:
    """A process that was started, and what is done with it."""

    def __init__(self, prepare: Prepare, calls: list[str]) -> None:
        self._calls = calls
        calls.append("start")

    def kill(self) -> None:
        self._calls.append("kill")

    def wait(self) -> None:
        self._calls.append("wait")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(compiling, "_start", lambda prepare: Started(prepare, made))
    monkeypatch.setattr(compiling.os, "sched_getaffinity", lambda pid: {0, 1})
    return made


def compile_two(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(cache))
    for function in (lambda x: x + 1, lambda x: x + 2):
        dispatcher = numba.njit(function)
        kept.keep(dispatcher, function)
        dispatcher.compile((numba.int64,))


def test_a_missing_kernel_starts_one_process_that_ends_with_the_work(
    calls: list[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with compiling.compiled_by_two(PREPARE):
        assert not calls
        compile_two(tmp_path, monkeypatch)
        assert calls == ["start"]
    assert calls == ["start", "kill", "wait"]
    compile_two(tmp_path / "other", monkeypatch)
    assert calls == ["start", "kill", "wait"], "outside, it is not asked for"


def test_kernels_on_disk_start_no_process(
    calls: list[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_two(tmp_path, monkeypatch)
    with compiling.compiled_by_two(PREPARE):
        compile_two(tmp_path, monkeypatch)
    assert not calls


def test_a_single_core_compiles_alone(
    calls: list[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling.os, "sched_getaffinity", lambda pid: {0})
    with compiling.compiled_by_two(PREPARE):
        compile_two(tmp_path, monkeypatch)
    assert not calls


def test_the_process_compiles_attention_of_several_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []
    done: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        compiling.subprocess, "Popen", lambda command, **_: commands.append(command)
    )
    monkeypatch.setattr(dispatch, "plan_attend", lambda *args: done.append(args[:4]))
    monkeypatch.setattr(compiling, "end_with", lambda parent, name: None)
    monkeypatch.setattr(compiling.gc, "disable", lambda: None)
    monkeypatch.setattr(compiling.importlib, "import_module", lambda name: None)
    compiling._start(PREPARE)
    (command,) = commands
    compiling.main(next(word for word in command if word.startswith("{")))
    assert done == [(LAYOUT, group, "float16", True) for group in (1, 3)]
