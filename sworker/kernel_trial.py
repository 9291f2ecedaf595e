"""A trial of the kernels that read and write KV blocks where they lie: with an engine's own
heads, dtypes, block size, window, soft-cap and ALiBi, against plain torch. It runs at every
start, so it is also the first correctness check on a new card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.spec import AttentionSpec, KVSpec
from sworker.paged import NOWHERE, BlockKernels, PagedKV, PagedStep, Prompt

MAX_ERRORS: Final = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest deviation that rounding explains, relative to the largest value, by the activations'
dtype."""
_INT8_ERROR = 1e-2
"""With a cache of int8, at the least: a value at the middle between two whole numbers may be
rounded to either, a step of 1/127."""
_LONG = 1000  # tokens of the longest context: enough for several splits, which are merged
CHUNK_TOKENS = 20  # tokens of a later prompt chunk


def refusal(
    kernels: BlockKernels,
    kv: KVSpec,
    attention: Sequence[AttentionSpec],
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    """Return why an engine can't use the kernels, or None. ``dtype`` is the activations'."""
    bound = MAX_ERRORS[dtype] if kv.dtype.is_float else max(MAX_ERRORS[dtype], _INT8_ERROR)
    for spec in dict.fromkeys(attention):
        try:
            error = _error(kernels, replace(kv, num_layers=1), spec, device, dtype)
        except Exception as raised:  # a compiler, a driver and Triton raise what they like
            lines = str(raised).strip().splitlines()
            return lines[0] if lines else type(raised).__name__
        if not error <= bound:
            return (
                f"their results are off by {error:.2g} of the largest value, where rounding "
                f"explains {bound:.2g}"
            )
    return None


@torch.inference_mode()
def _error(
    kernels: BlockKernels, kv: KVSpec, spec: AttentionSpec, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the largest deviation from plain torch, relative to the largest value. NaN stays.

    The rows are a decoded token of each sequence, and the last tokens of the longest one as a
    later chunk. Blocks are in random order; one row is stored nowhere, and one block is unused.
    """
    rng, size = np.random.default_rng(0), kv.block_size
    beyond = min(spec.sliding_window or _LONG, _LONG) + 7
    lens = np.array([1, size - 1, size + 1, 3 * size + 5, _LONG, beyond], np.int32)
    widths = -(-lens // size)
    blocks = np.split(rng.permutation(int(widths.sum())).astype(np.int32), np.cumsum(widths)[:-1])
    tables = np.zeros((len(lens), int(widths.max())), np.int32)
    slots = []
    for row, (num_tokens, own) in enumerate(zip(lens, blocks, strict=True)):
        tables[row, : len(own)], places = own, np.arange(num_tokens)
        slots.append(own[places // size].astype(np.int64) * size + places % size)

    def there(array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device)

    def draw(num_rows: int, num_heads: int) -> Tensor:
        drawn = rng.standard_normal((num_rows, num_heads, kv.head_dim), np.float32)
        return torch.from_numpy(drawn).to(device, dtype)

    stored = there(np.concatenate(slots))
    ends, longest = np.cumsum(lens, dtype=np.int64), int(lens.argmax())
    rows = there(np.concatenate((ends - 1, np.arange(ends[longest] - CHUNK_TOKENS, ends[longest]))))
    later = (Prompt(slice(len(lens), len(rows)), there(slots[longest])),)
    step = PagedStep(
        stored[rows], there(tables), there(lens), lens, later, slice(0, 0), first_starts=()
    )
    q, k, v = draw(len(rows), spec.num_q_heads), *(draw(len(stored), kv.num_kv_heads) for _ in "kv")
    found = []
    for used, queries in ((kernels, q), (None, q.float())):
        cache = PagedKV(kv, (spec,), int(widths.sum()) + 1, device, used, dtype, is_tried=True)
        for part in (cache.pool, cache.scales):
            if part is not None:
                part.fill_(torch.nan if part.dtype.is_floating_point else 0)
        if used is not None:
            nothing = torch.full_like(k[:1], torch.nan), there(np.array([NOWHERE]))
            keys, values = (torch.cat((x, nothing[0])) for x in (k, v))
            cache.store(0, keys, values, torch.cat((stored, nothing[1])))
        else:
            cache.store(0, k, v, stored)
        found.append(cache.attend(0, queries, k[rows], v[rows], step).float())
    parts = zip(*(x.split((len(lens), CHUNK_TOKENS)) for x in found), strict=True)
    return float(np.max([((a - b).abs().max() / b.abs().max()).item() for a, b in parts]))
