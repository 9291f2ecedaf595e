"""Attention in plain torch, with a plain KV cache: an oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastdecode.core.spec import AttentionSpec


class ReferenceAttention:
    """Appends, then attends, one sequence at a time.

    ``begin_step`` names the sequences of the coming pass; then this is its ``attend``.
    """

    def __init__(
        self, attention: Sequence[AttentionSpec], sinks: Sequence[Tensor] | None = None
    ) -> None:
        self.attention, self.sinks = tuple(attention), sinks
        # (sequence, layer) → K, V [L, Hkv, D]
        self._cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._lengths: dict[int, int] = {}
        self._step: list[tuple[int, int]] = []

    def begin_step(self, sequence_ids: Sequence[int], num_new: Sequence[int]) -> Tensor:
        """Append ``num_new`` tokens to each sequence. Returns their positions, int64 [T]."""
        self._step = list(zip(sequence_ids, num_new, strict=True))
        positions = []
        for sequence, count in self._step:
            past = self._lengths.get(sequence, 0)
            positions.append(torch.arange(past, past + count))
            self._lengths[sequence] = past + count
        return torch.cat(positions)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        counts = [count for _, count in self._step]
        outputs = []
        for (sequence, _), *qkv in zip(
            self._step, *(torch.split(x, counts) for x in (q, k, v)), strict=True
        ):
            q_new, k_new, v_new = qkv
            if (sequence, layer) in self._cache:
                k_past, v_past = self._cache[sequence, layer]
                k_new, v_new = torch.cat((k_past, k_new)), torch.cat((v_past, v_new))
            self._cache[sequence, layer] = k_new, v_new
            sinks = None if self.sinks is None else self.sinks[layer]
            outputs.append(causal_attention(self.attention[layer], q_new, k_new, v_new, sinks))
        return torch.cat(outputs)


def causal_attention(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Let the last n tokens of one sequence attend: q [n, Hq, D], k and v [L, Hkv, D]. ``sinks``:
    scores [Hq] that have no value."""
    length, num_queries = k.shape[0], q.shape[0]
    k, v = (x.float().repeat_interleave(spec.group_size, dim=1) for x in (k, v))  # [L, Hq, D]
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * spec.scale
    if spec.logit_softcap is not None:
        scores = spec.logit_softcap * torch.tanh(scores / spec.logit_softcap)
    keys = torch.arange(length, device=q.device)
    # [n, L]: key's position - query's position.
    distance = keys[None, :] - keys[length - num_queries :, None]
    if spec.alibi_slopes is not None:
        scores = scores + torch.tensor(spec.alibi_slopes, device=q.device)[:, None, None] * distance
    hidden = distance > 0
    if spec.sliding_window is not None:
        hidden = hidden | (distance <= -spec.sliding_window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        of_none = sinks.float()[:, None, None].expand(-1, num_queries, 1)
        scores = torch.cat((scores, of_none), dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
