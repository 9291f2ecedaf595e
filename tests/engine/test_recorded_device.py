"""Engines on a recorded GPU: their tokens are the CPU's, and no two accesses race."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import prompts
from device_engine import device_engine, run
from recorded_gpu import RecordedGpu, record_places
from torch import Tensor
from torch_kernels import TorchKernels
from trouble import crash_after

from fastdecode import LLM, SamplingParams
from fastdecode.engine.step import mixed_step
from fastdecode.engine.step import remote as attend
from fastdecode.measure.calibrate import cancel_all
from fastdecode.schedule.hybrid.forecast import Layout
from sworker import whole
from sworker.buffers import LENT_LAYERS, Shipment, Staging

LENGTHS = (3, 22, 11, 1)
NUM_TOKENS = 4
Tokens = list[tuple[int, ...]]
MODES: dict[str, dict[str, Any]] = {
    "lanes": {"lanes": 2, "workers": 2},
    "graphs": {"lanes": 3, "workers": 2, "captures": True},
    "held": {"lanes": 2, "workers": 2, "held_tokens": 48},
    "held graphs": {"lanes": 1, "captures": True, "held_tokens": 48, "kernels": TorchKernels},
    "split": {"lanes": 2, "workers": 3, "split_tokens": 16},
    "direct": {"lanes": 2, "workers": 2, "captures": True, "direct": True},
    "both sides": {"lanes": 2, "workers": 2, "device_blocks": 2, "direct": True},
    "mixed": {"lanes": 1, "workers": 2, "device_blocks": 2, "layout": Layout.MIXED},
    "both sides, slices": {
        "lanes": 2,
        "workers": 2,
        "device_blocks": 2,
        "captures": True,
        "kernels": TorchKernels,
    },
    "local": {"kv_placement": "gpu"},
    "swapped": {"kv_placement": "swap", "lanes": 3},
    "swapped graphs": {
        "kv_placement": "swap",
        "lanes": 4,
        "captures": True,
        "kernels": TorchKernels,
    },
    "local graphs": {"kv_placement": "gpu", "captures": True, "kernels": TorchKernels},
}


@pytest.fixture(scope="module")
def path(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def expected(path: Path) -> tuple[Tokens, int]:
    """What comes of the prompts if a certain token ends them, and which."""
    with device_engine(path, None) as engine:
        stop = run(engine, LENGTHS, NUM_TOKENS)[1][1]
        found = run(engine, LENGTHS, NUM_TOKENS, (stop,))
        assert engine.stats.num_ahead == 0  # a CPU's tokens are known at once
    assert {len(tokens) for tokens in found} == {2, NUM_TOKENS}
    return found, stop


@pytest.mark.parametrize("mode", MODES)
def test_engine_equal_tokens_and_no_races(
    mode: str, path: Path, expected: tuple[Tokens, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps start with tokens that only the device knows. One of these ends its text."""
    monkeypatch.setattr(mixed_step, "_TIMED_FIRST", 0)
    monkeypatch.setattr(whole, "SLICE_LAYERS", 2)
    gpu, (tokens, stop) = RecordedGpu(), expected

    def see(attention: Any) -> None:
        for slot in attention.swap.kv.slots if mode.startswith("swapped") else ():
            gpu.stays(slot.cache.pool)
        for host in attention.swap.kv.hosts if mode.startswith("swapped") else ():
            record_places(gpu, host)

    with device_engine(path, gpu, see=see, **MODES[mode]) as engine:
        assert run(engine, LENGTHS, NUM_TOKENS, (stop,)) == tokens
        assert engine.stats.num_ahead > 0
        if "device_blocks" in MODES[mode]:
            assert engine.stats.hybrid is not None and len(engine.stats.hybrid.steps) > 1
        cancel_all(engine)  # of the last step that was begun too much
        assert not engine.has_work
    assert gpu.checker.num_accesses > 1000
    assert gpu.checker.races == [] and gpu.checker.unkept == []
    assert (gpu.calls["replay"] > 0) == ("captures" in MODES[mode])


@pytest.mark.parametrize("held_tokens", [0, 48])
def test_equal_tokens_though_an_r_worker_is_lost(
    held_tokens: int, path: Path, expected: tuple[Tokens, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tokens on their way, or in steps that were fed them."""
    crash_after(monkeypatch, {"r1": 16})
    tokens, stop = expected
    gpu = RecordedGpu()
    with device_engine(path, gpu, lanes=2, workers=2, held_tokens=held_tokens) as engine:
        assert run(engine, LENGTHS, NUM_TOKENS, (stop,)) == tokens
        assert engine.stats.num_ahead > 0 and engine.stats.num_recomputed > 0
    assert gpu.checker.races == []


class LateStaged:
    """Copies only when the loop waits for it: a write to the sources before that spoils it."""

    def __init__(
        self, staging: Staging, sources: tuple[Tensor, ...], slot: list[np.ndarray]
    ) -> None:
        self._staging, self._sources, self._slot = staging, sources, slot

    @property
    def done(self) -> bool:
        return not self._sources

    def wait(self) -> None:
        if self._sources:
            self._slot[:] = [source.numpy().copy() for source in self._sources]
            self._sources = ()

    @property
    def shipments(self) -> list[Shipment]:
        assert not self._sources, "sent before it was there"
        return self._staging.shipments(*self._slot)


class LateStaging(Staging):
    """A ring of host memory, as a GPU's: its slots are written again, in place,
    after ``LENT_LAYERS`` layers."""

    def __init__(self, gpu: None, slot_bytes: int) -> None:
        super().__init__()
        self._ring: list[list[np.ndarray]] = [[] for _ in range(LENT_LAYERS)]

    def send(self, q: Tensor, k: Tensor, v: Tensor) -> LateStaged:  # type: ignore[override]
        slot = self._ring.pop(0)
        self._ring.append(slot)
        for array in slot:
            array.fill(np.nan)  # who still reads it reads nonsense
        return LateStaged(self, (q, k, v), slot)


@pytest.mark.parametrize("lanes", [1, 3])
def test_what_a_lost_r_worker_was_to_get_is_not_sent_to_its_successor(
    lanes: int, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tiny_checkpoint("qwen3", num_attention_heads=10, num_key_value_heads=5))
    asked = prompts([3, 30, 11, 1, 19], seed=2)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = {
        "dtype": "float32",
        "r_threads": 1,
        "kv_memory_gb": 0.01,
        "prefill_chunk": 8,
        "lanes": lanes,
    }
    with LLM(path, **options) as llm:
        expected = [output.completions[0].token_ids for output in llm.generate(asked, params)]

    crash_after(monkeypatch, {"r1": 21})
    monkeypatch.setattr(attend, "make_staging", LateStaging)
    with LLM(path, r_workers=3, r_partition="heads", **options) as llm:
        assert [
            output.completions[0].token_ids for output in llm.generate(asked, params)
        ] == expected
        assert llm.snapshot().engine.num_live_r_workers == 2
