"""Engines on a GPU whose operators run as late as they may, or at random
moments (``late_gpu``): the tokens are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from device_engine import device_engine, run
from late_gpu import LateGpu
from torch_kernels import TorchKernels
from trouble import crash_after

from fastdecode.engine.step import mixed_step
from fastdecode.measure.steady import cancel_all
from fastdecode.schedule.hybrid.forecast import Layout
from sworker import whole

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


@pytest.mark.parametrize(
    ("mode", "seed"),
    [
        *((mode, None) for mode in MODES),
        *((mode, 1) for mode in ("split", "held", "both sides", "both sides, slices")),
    ],
)
def test_equal_tokens(
    mode: str,
    seed: int | None,
    path: Path,
    expected: tuple[Tokens, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps begin with tokens that only the device knows; and one that they
    are begun with turns out to be a text's last."""
    monkeypatch.setattr(mixed_step, "_TIMED_FIRST", 0)
    monkeypatch.setattr(whole, "SLICE_LAYERS", 2)
    gpu, (tokens, stop) = LateGpu(seed), expected
    with device_engine(path, gpu, **MODES[mode]) as engine:
        assert run(engine, LENGTHS, NUM_TOKENS, (stop,)) == tokens
        assert engine.stats.num_ahead > 0
        if "device_blocks" in MODES[mode]:
            assert engine.stats.hybrid is not None and len(engine.stats.hybrid.steps) > 1
        cancel_all(engine)  # of the last step that was begun too much
        assert not engine.has_work
    assert gpu.num_late > 500
    assert (gpu.num_replays > 0) == ("captures" in MODES[mode])


def test_equal_tokens_though_an_r_worker_is_lost(
    path: Path, expected: tuple[Tokens, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tokens on their way, or in steps that were fed them."""
    crash_after(monkeypatch, {"r1": 16})
    tokens, stop = expected
    with device_engine(path, LateGpu(None), lanes=2, workers=2) as engine:
        assert run(engine, LENGTHS, NUM_TOKENS, (stop,)) == tokens
        assert engine.stats.num_ahead > 0 and engine.stats.num_recomputed > 0
