"""``sworker.kernels.paged_triton`` in plain torch, so that it can be captured:
nothing depends on what the tensors hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sworker.kv_splits import PIECE_FIELDS, Splits
from sworker.prefill import chunk_attention


class TorchKernels:
    """See the module."""

    @staticmethod
    def paged_store(
        k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor, scales: Any
    ) -> None:
        assert scales is None
        # Rows that go nowhere store what the first row does, which goes somewhere.
        goes_nowhere = slots < 0
        slots = torch.where(goes_nowhere, slots[:1], slots)
        for pool, x in ((keys, k), (values, v)):
            pool.index_copy_(0, slots, torch.where(goes_nowhere[:, None, None], x[:1], x))

    @staticmethod
    def paged_decode(
        q: Tensor, keys: Tensor, values: Tensor, scales: Any, tables: Tensor, context_lens: Tensor,
        splits: Splits, spec: Any, slopes: Any, block_size: int, *, out: Tensor,
        lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert spec.sliding_window is None and slopes is None
        places = torch.arange(tables.shape[1] * block_size, device=q.device)
        slots = tables[:, places // block_size].long() * block_size + places % block_size
        hidden = places >= context_lens[:, None]  # [N, c]
        k, v = (x[slots].masked_fill(hidden[:, :, None, None], 0.0) for x in (keys, values))
        k, v = (x.repeat_interleave(spec.group_size, dim=2) for x in (k, v))
        scores = torch.einsum("nhd,nchd->nhc", q, k) * spec.scale
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        if lse is not None:
            lse.copy_(scores.logsumexp(-1))
        weights = scores.softmax(-1)
        out.copy_(torch.einsum("nhc,nchd->nhd", weights, v))

    @staticmethod
    def chunk_tokens(spec: Any, dtype: torch.dtype) -> int:
        return 4

    @staticmethod
    def paged_chunks(
        q: Tensor, keys: Tensor, values: Tensor, scales: Any, slots: Tensor, splits: Splits,
        spec: Any, slopes: Any, *, out: Tensor, lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Query tile by query tile, whole: it isn't captured."""
        assert scales is None
        pieces = splits.pieces.view(-1, PIECE_FIELDS)[:, :4].unique(dim=0)
        for row, num_tokens, position, first in pieces.tolist():
            rows = slice(row, row + num_tokens)
            seen = slots[first : first + position + num_tokens]
            own = None if lse is None else lse[rows]
            out[rows] = chunk_attention(q[rows], keys[seen], values[seen], spec, own)
