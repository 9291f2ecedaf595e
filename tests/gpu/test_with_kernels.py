"""What gpu_first.py measures where there are kernels that read KV blocks where they
lie: torch stands for Triton's, right or wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastdecode.core.dtype import DType
from sworker import paged
from sworker.dtypes import quantize

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: Any,
) -> None:
    """As ``paged_triton.paged_store``."""
    stored = slots >= 0
    for half, (x, held) in enumerate(((k[stored], keys), (v[stored], values))):
        if scales is not None:
            x, scale = quantize(x, DType.INT8)
            scales[half].index_copy_(0, slots[stored], scale)
        held.index_copy_(0, slots[stored], x.to(held.dtype))


def decode(*args: Any, out: torch.Tensor) -> None:
    """As ``paged_triton.paged_decode``."""
    q, keys, values, scales, tables, lens, spec, slopes, block_size, _ = args
    paged.gathered_decode(
        q, keys, values, tables, lens.numpy(), spec, slopes, block_size, out=out, scales=scales
    )


class Kernels:
    """That take a number of stages; wrong with some."""

    def __init__(self, wrong_stages: tuple[int, ...] = ()) -> None:
        self.stages: list[int | None] = []
        self._wrong = wrong_stages
        self.paged_store = store

    def paged_decode(self, *args: Any, out: torch.Tensor, num_stages: int | None = None) -> None:
        self.stages.append(num_stages)
        decode(*args, out=out)
        if num_stages in self._wrong:
            out *= 1.5


@pytest.fixture
def rows_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rows of a step, with these kernels."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_fast
    from gpu_setup import Setup

    def rows_of(step: str, kernels: Any) -> list[dict[str, Any]]:
        monkeypatch.setattr(paged, "_kernels_of", lambda device: kernels)
        setup = Setup(torch.device("cpu"), torch.bfloat16, smoke=True, deadline_s=float("inf"))
        with torch.inference_mode():
            return list(getattr(gpu_fast, step)(setup))

    return rows_of


def test_a_whole_step_is_held_against_gathered_attention(rows_of: Any) -> None:
    """Steps are made before any is run: to capture one writes to the cache."""
    rows = rows_of("whole_steps", Kernels())
    assert [(row["kv"], row["how"]) for row in rows] == [
        (kv, how) for kv in ("bfloat16", "int8") for how in ("layer by layer", "one graph")
    ]
    assert all("step_us" in row and row["max_error"] < 0.05 for row in rows), rows


def test_the_kernel_is_measured_with_three_and_with_five_stages(rows_of: Any) -> None:
    kernels = Kernels()
    rows = rows_of("decode_attention", kernels)
    assert [row.get("num_stages") for row in rows] == [None, 3, 5] * 2
    assert all("kv_gbps" in row for row in rows) and {3, 5} <= set(kernels.stages)
    old = SimpleNamespace(paged_store=store, paged_decode=decode)
    assert [row.get("num_stages") for row in rows_of("decode_attention", old)] == [None] * 2


def test_a_kernel_that_is_wrong_shows_no_rate(rows_of: Any) -> None:
    rows = rows_of("decode_attention", Kernels(wrong_stages=(5,)))
    for row in rows:
        assert ("kv_gbps" in row) == (row.get("num_stages") != 5)
        assert ("no rate is shown" in row.get("error", "")) == (row.get("num_stages") == 5)
