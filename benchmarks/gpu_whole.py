"""Decode steps of the GPU-only mode, attention included: as one graph, and layer
by layer; used by gpu_suite.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from fastdecode.core.dtype import DType
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.spec import KVSpec
from sworker.graphs import StepGraphs
from sworker.model.skeleton import Model, forward
from sworker.paged import PagedKV, PagedStep
from sworker.whole import WholeSteps

BLOCK_SIZE = 64


def make_cache(
    spec: ModelSpec, num_layers: int, dtype: DType, num_blocks: int, device: torch.device
) -> PagedKV:
    """Full of something."""
    kv = KVSpec(num_layers, spec.num_kv_heads, spec.head_dim, dtype, BLOCK_SIZE)
    cache = PagedKV(kv, spec.attention[:num_layers], num_blocks, device)
    if cache.scales is None:
        cache.pool.normal_()
    else:
        cache.pool.random_(-127, 128)
        cache.scales.fill_(0.01)
    return cache


def decode_step(batch: int, context: int, device: torch.device) -> PagedStep:
    """One more token of sequences whose blocks lie anywhere."""
    width = -(-context // BLOCK_SIZE)
    tables = torch.randperm(batch * width).view(batch, width).int().to(device)
    lens = np.full(batch, context, np.int32)
    slots = (tables[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE).contiguous()
    return PagedStep(
        slots, tables, torch.from_numpy(lens).to(device), lens, (), slice(batch, batch), ()
    )


def decode_ways(
    model: Model, cache: PagedKV, batch: int, context: int, capture: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """How a step is run, and what runs it."""
    device = cache.pool.device
    step = decode_step(batch, context, device)
    rows = torch.stack((torch.arange(batch), torch.full((batch,), context - 1)))
    token_ids, positions = rows.to(device)

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        return cache.attend(layer, q, k, v, step)

    yield "layer by layer", partial(forward, model, token_ids, positions, attend)
    if cache.kernels is not None:
        graphs = StepGraphs(model, device, capture=capture)
        whole = WholeSteps(graphs, cache, context)
        whole.prepare([graphs.buckets.of(batch)])
        yield "one graph", partial(whole.run, 0, rows, step)
