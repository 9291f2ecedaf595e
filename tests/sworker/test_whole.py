"""Decode steps as one graph, KV on the device: as layer by layer. Kernels are
plain torch's here, the GPU a recorded one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from recorded_gpu import RecordedGpu
from torch_kernels import TorchKernels

from fastdecode.core.dtype import DType
from fastdecode.core.spec import KVSpec
from sworker.graphs import StepGraphs
from sworker.load.weights import load_model
from sworker.model.skeleton import forward
from sworker.paged import PagedKV, PagedStep
from sworker.whole import WholeSteps

CPU = torch.device("cpu")
BLOCK_SIZE, MAX_TOKENS = 16, 128


class Rows:
    """Sequences that decode, in blocks in random order."""

    def __init__(self, lengths: list[int], cache: PagedKV, generator: np.random.Generator) -> None:
        width = MAX_TOKENS // BLOCK_SIZE
        blocks = generator.permutation(len(cache.pool[0, 0]) // BLOCK_SIZE)
        self.tables = blocks[: len(lengths) * width].reshape(len(lengths), width).astype(np.int32)
        self.lengths = np.array(lengths)

    def step(self, num_rows: int) -> PagedStep:
        """One more token of each of the first sequences."""
        self.lengths[:num_rows] += 1
        lens = self.lengths[:num_rows].astype(np.int32)
        last = lens - 1
        blocks = self.tables[np.arange(num_rows), last // BLOCK_SIZE].astype(np.int64)
        used = -(-int(lens.max()) // BLOCK_SIZE)
        return PagedStep(
            slots=torch.from_numpy(blocks * BLOCK_SIZE + last % BLOCK_SIZE),
            tables=torch.from_numpy(self.tables[:num_rows, :used]),
            context_lens=torch.from_numpy(lens),
            context_lens_host=lens,
            later=(),
            first_rows=slice(num_rows, num_rows),
            first_starts=(),
        )


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@torch.inference_mode()
def test_as_layer_by_layer(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Steps of other sizes, one after another, in the same memory; and a step
    is one call of the driver, whatever its layers."""
    spec, model = load_model(tiny_checkpoint(family), device=CPU, dtype=torch.float32)
    kv = KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, DType.FLOAT32, BLOCK_SIZE)
    num_blocks = 8 * MAX_TOKENS // BLOCK_SIZE
    gpu, rng = RecordedGpu(), np.random.default_rng(4)
    plain = PagedKV(kv, spec.attention, num_blocks, CPU)
    captured = PagedKV(kv, spec.attention, num_blocks + 1, CPU, TorchKernels)
    captured.pool.fill_(float("nan"))
    with gpu:
        graphs = StepGraphs(model, CPU, capture=True, max_rows=8, gpu=gpu)
        whole = WholeSteps(graphs, captured, MAX_TOKENS)
        whole.prepare()
    assert graphs.num_graphs == len(graphs.buckets.sizes)
    rows = Rows([5, 0, 40, 17, 63, 2, 9, 31], plain, rng)
    of_sequences = captured.pool[:, :, :-BLOCK_SIZE]
    of_sequences.copy_(plain.pool.normal_())
    for num_rows in (5, 8, 3, 1, 7):
        step = rows.step(num_rows)
        ids, positions = rng.integers(0, spec.vocab_size, num_rows), rows.lengths[:num_rows] - 1
        assert whole.takes(step)
        gpu.calls.clear()
        with gpu:
            found = whole.run(0, torch.from_numpy(np.stack((ids, positions))), step)
        assert gpu.calls["replay"] == 1 and gpu.calls["aten::mm"] == 0
        assert sum(gpu.calls.values()) < 50
        expected = forward(
            model,
            torch.from_numpy(ids),
            torch.from_numpy(positions),
            lambda layer, q, k, v, step=step: plain.attend(layer, q, k, v, step),  # type: ignore[misc]
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(of_sequences, plain.pool, atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_stage_by_stage(tiny_checkpoint: Callable[..., Path]) -> None:
    """Steps that begin with what the stage before has come to."""
    path, num_rows = tiny_checkpoint("llama"), 5
    spec, model = load_model(path, device=CPU, dtype=torch.float32)
    num_blocks = num_rows * MAX_TOKENS // BLOCK_SIZE
    kv = KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, DType.FLOAT32, BLOCK_SIZE)
    plain, rng = PagedKV(kv, spec.attention, num_blocks, CPU), np.random.default_rng(4)
    plain.pool.normal_()
    step = Rows([5, 0, 40, 17, 63], plain, rng).step(num_rows)
    ids = rng.integers(0, spec.vocab_size, num_rows)
    rows = torch.from_numpy(np.stack((ids, step.context_lens_host - 1)))
    x, first = None, 0
    for num_layers in (2, spec.num_layers - 2):
        layers = range(first, first + num_layers)
        own, stage = load_model(
            path, device=CPU, dtype=torch.float32, layers=layers, with_embedding=not first,
            with_head=not first,
        )  # fmt: skip
        own_kv = replace(kv, num_layers=num_layers)
        cache = PagedKV(
            own_kv, own.attention[layers.start : layers.stop], num_blocks, CPU, TorchKernels
        )
        cache.pool.copy_(plain.pool[layers.start : layers.stop])
        whole = WholeSteps(StepGraphs(stage, CPU, capture=False), cache, MAX_TOKENS)
        x = whole.run(0, rows, step, x=x).clone()
        first = layers.stop
    expected = forward(
        model, rows[0], rows[1], lambda layer, q, k, v: plain.attend(layer, q, k, v, step)
    )
    torch.testing.assert_close(x, expected, atol=2e-5, rtol=1e-4)
