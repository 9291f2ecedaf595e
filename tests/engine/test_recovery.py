"""An R-worker that crashes, closes or hangs in the middle of a run: the others go on, and no token changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import prompts
from full_stores import keep_one_sequence_each

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import CapacityError, WorkerError
from fastdecode.engine import workers
from fastdecode.wire.messages import AttendResult
from rworker.attention import AttentionExecutor
from rworker.instructions import Compute
from rworker.kv_store import KVStore
from rworker.worker import WorkerThread, start_worker_thread

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FORKED = SamplingParams(temperature=0.9, seed=5, max_tokens=20, n=3, ignore_eos=True)


class Trouble(AttentionExecutor):
    """Works until its ``after``-th layer, then has the trouble."""

    def __init__(self, after: int, trouble: Callable[[], None]) -> None:
        super().__init__(num_threads=1)
        self._left = after
        self._trouble = trouble

    def compute(self, compute: Compute) -> AttendResult:
        self._left -= 1
        if self._left < 0:
            self._trouble()
        return super().compute(compute)


@pytest.fixture
def troubled(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Callable[[], Trouble]]], None]:
    """Give some R-workers, by name, an executor with trouble."""

    def trouble(executors: dict[str, Callable[[], Trouble]]) -> None:
        def start(name: str, **options: object) -> WorkerThread:
            executor = executors[name]() if name in executors else None
            return start_worker_thread(name, **options, executor=executor)  # type: ignore[arg-type]

        monkeypatch.setattr(workers, "start_worker_thread", start)

    return trouble


def run(path: Path, lanes: int, timeout_s: float = 30.0) -> tuple[list[list[tuple[int, ...]]], int]:
    """Everybody's tokens, and how many sequences were recomputed."""
    options = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01, "prefill_chunk": 8}
    with LLM(str(path), r_workers=3, lanes=lanes, worker_timeout_s=timeout_s, **options) as llm:
        asked = prompts([3, 30, 11, 1, 19, 8, 5], seed=2)
        outputs = llm.generate(asked, [GREEDY] * 5 + [FORKED] * 2)
        return [[c.token_ids for c in output.completions] for output in outputs], llm.stats.num_recomputed


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_r_worker_with_less_room_than_it_said_makes_sequences_wait(
    lanes: int, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint("llama")
    expected, _ = run(path, lanes)
    refused = keep_one_sequence_each(monkeypatch)
    assert run(path, lanes)[0] == expected
    assert refused


def test_what_an_empty_r_worker_refuses_has_failed(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Callable[..., Path]
) -> None:
    def refuse(store: KVStore, sequence_id: int, num_reserved: int) -> None:
        raise CapacityError("no room at all")

    monkeypatch.setattr(KVStore, "open", refuse)
    with LLM(str(tiny_checkpoint("llama")), dtype="float32", r_threads=1, kv_memory_gb=0.01) as llm:
        (output,) = llm.generate([[5, 6]], GREEDY)
    assert isinstance(output.error, CapacityError) and "no room at all" in str(output.error)


def crash() -> None:
    raise MemoryError("no more memory")


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("after", [0, 7, 40])
def test_a_crashed_worker_changes_no_token(
    after: int, lanes: int, troubled: Callable[..., None], tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint("llama")
    expected, num_recomputed = run(path, lanes)
    assert num_recomputed == 0
    troubled({"r1": lambda: Trouble(after, crash)})
    tokens, num_recomputed = run(path, lanes)
    assert tokens == expected
    assert num_recomputed > 0


def test_two_of_three_may_go(troubled: Callable[..., None], tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("llama")
    expected, _ = run(path, 2)
    troubled({"r0": lambda: Trouble(11, crash), "r2": lambda: Trouble(33, crash)})
    assert run(path, 2)[0] == expected


def test_a_hung_worker_is_given_up(troubled: Callable[..., None], tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("llama")
    expected, _ = run(path, 1)
    woken = threading.Event()
    troubled({"r1": lambda: Trouble(13, lambda: assert_woken(woken))})
    try:
        tokens, num_recomputed = run(path, 1, timeout_s=3.0)  # others may be slow on a busy machine
    finally:
        woken.set()
    assert tokens == expected
    assert num_recomputed > 0


def assert_woken(event: threading.Event) -> None:
    assert event.wait(60)


def test_when_all_are_lost_every_request_says_so(
    troubled: Callable[..., None], tiny_checkpoint: Callable[..., Path]
) -> None:
    """But for what was done by then."""
    troubled({f"r{i}": lambda: Trouble(20, crash) for i in range(2)})
    options = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01, "r_workers": 2}
    with LLM(str(tiny_checkpoint("llama")), **options) as llm:
        short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        outputs = llm.generate(prompts([3, 4, 5], seed=2), [short, GREEDY, GREEDY])
        assert outputs[0].ok
        for output in outputs[1:]:
            assert isinstance(output.error, WorkerError)
            assert "no more memory" in str(output.error)
        (later,) = llm.generate([[5]], short)  # it takes no more requests, and says why
        assert isinstance(later.error, WorkerError)
