"""What gpu_first.py measures where there are kernels that read KV blocks where they
lie: torch stands for Triton's, right or wrong."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastdecode.core.dtype import DType
from sworker import paged
from sworker.dtypes import quantize
from sworker.prefill import chunk_attention

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
    q, keys, values, scales, tables, lens, _, spec, slopes, block_size = args
    paged.gathered_decode(
        q, keys, values, tables, lens.numpy(), spec, slopes, block_size, out=out, scales=scales
    )


def chunks(*args: Any, out: torch.Tensor) -> None:
    """As ``paged_triton.paged_chunks``, of one chunk."""
    q, keys, values, scales, slots, _, spec, _ = args
    seen = [x[slots].float() for x in (keys, values)]
    if scales is not None:
        seen = [x * of[slots][..., None] for x, of in zip(seen, scales, strict=True)]
    out.copy_(chunk_attention(q.float(), *seen, spec))


class Kernels:
    """By how they are tiled; wrong with so many stages."""

    def __init__(self, tiling: SimpleNamespace | None = None, wrong_stages: int = 0) -> None:
        self._is_wrong = tiling is not None and tiling.num_stages == wrong_stages
        self.paged_store, self.paged_chunks = store, chunks

    def chunk_tokens(self, spec: Any, dtype: torch.dtype) -> int:
        return 8

    def paged_decode(self, *args: Any, out: torch.Tensor) -> None:
        decode(*args, out=out)
        if self._is_wrong:
            out *= 1.5


@pytest.fixture
def rows_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rows of a step, with these kernels."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_fast
    from gpu_setup import Setup

    def rows_of(step: str, wrong_stages: int = 0) -> list[dict[str, Any]]:
        tiled = SimpleNamespace(
            Tiling=lambda tile, num_stages: SimpleNamespace(tile=tile, num_stages=num_stages),
            WithTiling=partial(Kernels, wrong_stages=wrong_stages),
        )
        monkeypatch.setitem(sys.modules, "sworker.kernels.paged_triton", tiled)
        monkeypatch.setattr(paged, "_kernels_of", lambda device: Kernels())
        setup = Setup(torch.device("cpu"), torch.bfloat16, smoke=True, deadline_s=float("inf"))
        with torch.inference_mode():
            return list(getattr(gpu_fast, step)(setup))

    return rows_of


def test_a_whole_step_is_held_against_gathered_attention(rows_of: Any) -> None:
    """Steps are made before any is run: to capture one writes to the cache."""
    rows = rows_of("whole_steps")
    assert [(row["kv"], row["how"]) for row in rows] == [
        (kv, how)
        for kv in ("bfloat16", "int8")
        for how in ("layer by layer", "unit by unit", "one graph")
    ]
    assert all("step_us" in row and row["max_error"] < 0.05 for row in rows), rows


def test_the_kernel_is_measured_with_several_tilings(rows_of: Any) -> None:
    rows = rows_of("decode_attention")
    tilings = [(row.get("tile"), row.get("buffers")) for row in rows]
    assert tilings == [(None, None), (64, 1), (64, 2), (64, 3), (32, 2), (32, 3)] * 2
    assert all("kv_gbps" in row for row in rows)


def test_a_kernel_that_is_wrong_shows_no_rate(rows_of: Any) -> None:
    rows = rows_of("decode_attention", wrong_stages=4)
    for row in rows:
        is_wrong = row.get("buffers") == 3
        assert ("kv_gbps" in row) == (not is_wrong)
        assert ("no rate is shown" in row.get("error", "")) == is_wrong
