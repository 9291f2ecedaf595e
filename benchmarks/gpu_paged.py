"""Paged KV on a device with something in it, decode steps over it, and what
attention over it is in float64: used by the steps of gpu_first.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fastdecode.core.dtype import DType
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.spec import AttentionSpec, KVSpec
from sworker.graphs import StepGraphs
from sworker.model.skeleton import Model, forward
from sworker.paged import PagedKV, PagedStep
from sworker.whole import WholeSteps
from sworker.worker import SWorker

BLOCK_SIZE = 64


def make_cache(
    spec: ModelSpec,
    num_layers: int,
    dtype: DType,
    num_blocks: int,
    device: torch.device,
    block_size: int = BLOCK_SIZE,
) -> PagedKV:
    """Full of something."""
    kv = KVSpec(num_layers, spec.num_kv_heads, spec.head_dim, dtype, block_size)
    cache = PagedKV(kv, spec.attention[:num_layers], num_blocks, device)
    if cache.scales is None:
        cache.pool.normal_()
    else:
        cache.pool.random_(-127, 128)
        cache.scales.fill_(0.01)
    return cache


def num_blocks_for(lens: Sequence[int], block_size: int = BLOCK_SIZE) -> int:
    """Blocks of so many sequences together."""
    return sum(-(-length // block_size) for length in lens)


def decode_step(
    lens: Sequence[int], device: torch.device, block_size: int = BLOCK_SIZE
) -> PagedStep:
    """One more token, the last of ``lens``, of sequences whose blocks lie anywhere."""
    widths = [-(-length // block_size) for length in lens]
    # On the host: a generator's numbers don't depend on the device.
    blocks = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(0)).int()
    tables = torch.zeros((len(lens), max(widths)), dtype=torch.int32)
    for row, own in enumerate(blocks.split(widths)):
        tables[row, : len(own)] = own
    last = torch.tensor(lens) - 1
    homes = tables.gather(1, (last // block_size)[:, None])[:, 0].long()
    host = np.array(lens, np.int32)
    return PagedStep(
        (homes * block_size + last % block_size).to(device),
        tables.to(device),
        torch.from_numpy(host).to(device),
        host,
        (),
        slice(len(lens), len(lens)),
        (),
    )


def poison_unseen(cache: PagedKV, step: PagedStep) -> None:
    """Fill with NaN what no row of the step sees: it mustn't be weighed in."""
    memory = cache.pool if cache.scales is None else cache.scales
    is_seen = torch.zeros(cache.num_slots, dtype=torch.bool, device=memory.device)
    for row in range(len(step.context_lens_host)):
        is_seen[_slots(step, row, cache.kv.block_size)] = True
    memory[:, :, ~is_seen] = math.nan


def attended(q: torch.Tensor, cache: PagedKV, step: PagedStep, rows: Sequence[int]) -> torch.Tensor:
    """What layer 0's attention of these rows is, by the numbers that the cache
    holds. q [N, Hq, D] → float64 [rows, Hq, D]."""
    spec = cache.attention[0]
    found = []
    for row in rows:
        slots = _slots(step, row, cache.kv.block_size)
        if spec.sliding_window is not None:
            slots = slots[-spec.sliding_window :]
        k, v = (half[slots].double() for half in cache.pool[0])  # [L, Hkv, D]
        if cache.scales is not None:
            k_scales, v_scales = (half[slots].double()[..., None] for half in cache.scales[0])
            k, v = k * k_scales, v * v_scales
        found.append(dense(q[row : row + 1].double(), k, v, spec)[0])
    return torch.stack(found)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Plain causal attention of the last tokens of one sequence: q [n, Hq, D], k
    and v [L, Hkv, D] → [n, Hq, D], in q's dtype. The window is not applied."""
    grouped = q.unflatten(1, (spec.num_kv_heads, spec.group_size))  # [n, Hkv, G, D]
    scores = torch.einsum("nkgd,lkd->kgnl", grouped * spec.scale, k).flatten(0, 1)  # [Hq, n, L]
    if spec.logit_softcap is not None:
        scores = spec.logit_softcap * (scores / spec.logit_softcap).tanh()
    positions = torch.arange(len(k), device=q.device)
    ahead = positions[None, :] - positions[len(k) - len(q) :, None]  # [n, L]
    if spec.alibi_slopes is not None:
        slopes = torch.tensor(spec.alibi_slopes, dtype=q.dtype, device=q.device)
        scores = scores + slopes[:, None, None] * ahead
    weights = scores.masked_fill(ahead > 0, -math.inf).softmax(dim=-1)
    by_group = weights.unflatten(0, (spec.num_kv_heads, spec.group_size))
    return torch.einsum("kgnl,lkd->nkgd", by_group, v).flatten(1, 2)


def _slots(step: PagedStep, row: int, block_size: int) -> torch.Tensor:
    """Of all tokens of a row's sequence."""
    places = torch.arange(int(step.context_lens_host[row]), device=step.tables.device)
    return step.tables[row, places // block_size].long() * block_size + places % block_size


def decode_ways(
    model: Model, cache: PagedKV, lens: Sequence[int], capture: bool
) -> Iterator[tuple[str, Any]]:
    """How a decode step is run, and what runs it → hidden states. The first way
    is in plain torch's attention. To make the last one writes to the cache."""
    device = cache.pool.device
    step = decode_step(lens, device)
    rows = torch.stack((torch.arange(len(lens)), torch.tensor(lens) - 1))
    token_ids, positions = rows.to(device)

    def attend(layer: int, q: Any, k: Any, v: Any, place: Any = None) -> Any:
        return cache.attend(layer, q, k, v, step, place)

    layer_by_layer = partial(forward, model, token_ids, positions, attend)
    yield "gathered", partial(_without_kernels, cache, layer_by_layer)
    yield "layer by layer", layer_by_layer
    if cache.kernels is not None:
        graphs = StepGraphs(model, device, capture=capture)
        buckets = [graphs.buckets.of(len(lens))]
        graphs.prepare(buckets)
        worker = SWorker(model.spec, model, device, graphs)
        yield "unit by unit", lambda: worker.begin(rows).run(attend).output
        whole = WholeSteps(graphs, cache, max(lens))
        whole.prepare(buckets)
        yield "one graph", partial(whole.run, 0, rows, step)


def _without_kernels(cache: PagedKV, run: Any) -> Any:
    kernels, cache.kernels = cache.kernels, None
    try:
        return run()
    finally:
        cache.kernels = kernels
