"""An R-worker that crashes, closes or hangs in the middle of a run: the others
go on, and no token changes."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path

import pytest
from checkpoints import prompts
from trouble import Trouble, crash_after, give

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import WorkerError
from fastdecode.engine.figures import EngineFigures

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FORKED = SamplingParams(temperature=0.9, seed=5, max_tokens=20, n=3, ignore_eos=True)


def run(
    path: Path | str, lanes: int, timeout_s: float = 30.0
) -> tuple[list[list[tuple[int, ...]]], int]:
    """Everybody's tokens, and how many sequences were recomputed."""
    options = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01, "prefill_chunk": 8}
    with LLM(str(path), r_workers=3, lanes=lanes, worker_timeout_s=timeout_s, **options) as llm:
        asked = prompts([3, 30, 11, 1, 19, 8, 5], seed=2)
        outputs = llm.generate(asked, [GREEDY] * 5 + [FORKED] * 2)
        return [
            [c.token_ids for c in output.completions] for output in outputs
        ], llm.stats.num_recomputed


@cache
def undisturbed(path: Path | str, lanes: int) -> list[list[tuple[int, ...]]]:
    """Everybody's tokens where nothing happens."""
    tokens, num_recomputed = run(path, lanes)
    assert num_recomputed == 0
    return tokens


def test_figures_say_once_which_r_worker_is_lost(
    monkeypatch: pytest.MonkeyPatch, llama: str
) -> None:
    crash_after(monkeypatch, {"r1": 0})
    options = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01, "r_workers": 2}
    with LLM(llama, **options) as llm:
        llm.generate(prompts([3, 5]), GREEDY)
        figures: list[EngineFigures] = []
        llm.service.call(lambda running: figures.append(running.engine.figures()))
    alive, lost = figures[0].r_workers
    assert alive.lost is None and lost.lost is not None
    assert lost.name not in lost.lost and lost.lost.startswith("it "), lost


def test_a_hung_worker_is_given_up(monkeypatch: pytest.MonkeyPatch, llama: str) -> None:
    expected = undisturbed(llama, 1)
    woken = threading.Event()
    give(monkeypatch, {"r1": lambda: Trouble(13, lambda: assert_woken(woken))})
    try:
        tokens, num_recomputed = run(
            llama, 1, timeout_s=3.0
        )  # others may be slow on a busy machine
    finally:
        woken.set()
    assert tokens == expected
    assert num_recomputed > 0


def assert_woken(event: threading.Event) -> None:
    assert event.wait(60)


def test_when_all_are_lost_every_request_says_so(
    monkeypatch: pytest.MonkeyPatch, llama: str
) -> None:
    """But for what was done by then."""
    crash_after(monkeypatch, {"r0": 20, "r1": 20})
    options = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01, "r_workers": 2}
    with LLM(llama, **options) as llm:
        short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        outputs = llm.generate(prompts([3, 4, 5], seed=2), [short, GREEDY, GREEDY])
        assert outputs[0].ok
        for output in outputs[1:]:
            assert isinstance(output.error, WorkerError)
            assert "no more memory" in str(output.error)
        (later,) = llm.generate([[5]], short)  # it takes no more requests, and says why
        assert isinstance(later.error, WorkerError)
