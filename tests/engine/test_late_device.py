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

LENGTHS = (3, 22, 11, 1)
NUM_TOKENS = 4
MODES: dict[str, dict[str, Any]] = {
    "lanes": {"lanes": 2, "workers": 2},
    "graphs": {"lanes": 3, "workers": 2, "captures": True},
    "split": {"lanes": 2, "workers": 3, "split_tokens": 16},
    "local": {"kv_placement": "gpu"},
    "local graphs": {"kv_placement": "gpu", "captures": True, "kernels": TorchKernels},
}


@pytest.fixture(scope="module")
def path(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[tuple[int, ...]]:
    with device_engine(path, None) as engine:
        return run(engine, LENGTHS, NUM_TOKENS)


@pytest.mark.parametrize(("mode", "seed"), [*((mode, None) for mode in MODES), ("split", 1)])
def test_equal_tokens(
    mode: str, seed: int | None, path: Path, expected: list[tuple[int, ...]]
) -> None:
    gpu = LateGpu(seed)
    with device_engine(path, gpu, **MODES[mode]) as engine:
        assert run(engine, LENGTHS, NUM_TOKENS) == expected
    assert gpu.num_late > 500
    assert (gpu.num_replays > 0) == ("captures" in MODES[mode])
