"""Tensor parallelism, put on a model from outside: which part of every weight a rank holds, and
where ranks sum.

The model's code knows nothing of it. A rank builds the model of a smaller spec (``shard_spec``):
its share of the heads, of the MLP's inner dims, of the experts or of the dims inside them, and of
the vocabulary. ``parallelize`` then exchanges the modules whose results are partial sums:
attention's output projection and the MLP's second one (Megatron-LM's row-parallel layers, Shoeybi
et al., arXiv 1909.08053) and the token embedding; a block of experts sums once, at its end.
Everything else works on whole hidden states, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.model.moe import Moe
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.spec import AttentionSpec, HeadShare, KVSpec
from sworker.model.linear import Embedding, Linear
from sworker.model.moe import Experts
from sworker.model.norms import FullNorm
from sworker.model.skeleton import Model

AddUp = Callable[[Tensor], None]


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model."""

    rank: int
    size: int
    ep: int = 1
    """Into how many parts of whole experts the routed experts are divided; divides ``size``."""

    @property
    def of_experts(self) -> Shard:
        """The rank's part of each expert that it has."""
        size = self.size // self.ep
        return Shard(self.rank % size, size)

    def experts(self, num_experts: int) -> tuple[int, int]:
        """The first expert that the rank has, and how many."""
        count = num_experts // self.ep
        return self.rank // (self.size // self.ep) * count, count

    def cut(self, source: Tensor, shape: torch.Size) -> Tensor:
        """The part of a whole weight that fills a parameter of this shape:
        along each dim where the parameter is smaller, the rank's share. The
        last rank's share of a dim that doesn't divide evenly is shorter."""
        for dim, num in enumerate(shape):
            if num < source.shape[dim]:
                first = min(self.rank * num, source.shape[dim])
                source = source.narrow(dim, first, min(num, source.shape[dim] - first))
        return source


def shard_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The model that one rank builds.

    Raises:
        ConfigError: the KV heads, the MLP or the experts don't divide evenly.
    """
    _check_divides(spec, "KV heads", spec.num_kv_heads, "tp", shard.size)
    if shard.ep > 1 and spec.moe is None:
        raise ConfigError(
            Given("ep", shard.ep), f": {spec.name} has no experts to divide. Remove it"
        )
    has_dense = not all(map(spec.has_experts, range(spec.num_layers)))
    if has_dense:
        what = "dims inside its MLP"
        _check_divides(spec, what, spec.intermediate_size, "tp", shard.size)
    return replace(
        spec,
        num_q_heads=spec.num_q_heads // shard.size,
        num_kv_heads=spec.num_kv_heads // shard.size,
        intermediate_size=max(1, spec.intermediate_size // shard.size),
        vocab_size=-(-spec.vocab_size // shard.size),
        moe=None if spec.moe is None else _shard_moe(spec, spec.moe, shard),
        attention=(),  # attention sees whole heads, on rank 0
    )


def shard_kv(
    kv: KVSpec, attention: Sequence[AttentionSpec], shard: Shard
) -> tuple[KVSpec, tuple[AttentionSpec, ...]]:
    """What a rank keeps on its own device, and how it attends: its KV heads, and the
    query heads that share them."""

    def own(spec: AttentionSpec) -> AttentionSpec:
        num_kv, num_q = spec.num_kv_heads // shard.size, spec.num_q_heads // shard.size
        first_kv, first_q = shard.rank * num_kv, shard.rank * num_q
        heads = HeadShare(slice(first_kv, first_kv + num_kv), slice(first_q, first_q + num_q))
        return heads.of(spec)

    num_heads = kv.num_kv_heads // shard.size
    return replace(kv, num_kv_heads=num_heads), tuple(map(own, attention))


def shard_sinks(sinks: Sequence[Tensor] | None, shard: Shard) -> tuple[Tensor, ...] | None:
    """Of a rank's query heads; a rank's model has those of all."""
    return None if sinks is None else tuple(x.chunk(shard.size)[shard.rank] for x in sinks)


def _shard_moe(spec: ModelSpec, moe: Moe, shard: Shard) -> Moe:
    inner_size = shard.size // shard.ep
    _check_divides(spec, "experts", moe.num_experts, "ep", shard.ep)
    _check_divides(spec, "dims inside its shared expert", moe.shared_inner, "tp", shard.size)
    if moe.inner % inner_size:
        raise ConfigError(
            Given("tp", shard.size),
            f" cuts each expert of {spec.name} into {inner_size}, which doesn't divide the "
            f"{moe.inner} dims inside it: give ranks whole experts with ",
            Given("ep", shard.size),
            ", or choose a tp that divides",
        )
    return replace(
        moe,
        inner=moe.inner // inner_size,
        shared_inner=moe.shared_inner // shard.size,
        held=shard.experts(moe.num_experts),
    )


def _check_divides(spec: ModelSpec, what: str, num: int, option: str, parts: int) -> None:
    if num % parts:
        raise ConfigError(
            Given(option, parts),
            f" doesn't divide the {num} {what} of {spec.name}: choose one that does",
        )


class RowParallelLinear(nn.Module):
    """A projection whose input dims are spread over ranks: partial products,
    summed; the bias is added once."""

    def __init__(self, linear: Linear, add_up: AddUp) -> None:
        super().__init__()
        self.splits, self.bias = linear.splits, linear.bias
        self.partial, linear.bias = linear, None
        self._add_up = add_up

    def forward(self, x: Tensor) -> Tensor:  # [T, in_size / ranks] → [T, out_size]
        y: Tensor = self.partial(x)
        self._add_up(y)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Row lookup in a table whose rows are spread over ranks."""

    def __init__(self, embedding: Embedding, shard: Shard, add_up: AddUp) -> None:
        super().__init__()
        self.table, self._num_rows = embedding, embedding.weight.shape[0]
        self._first = shard.rank * self._num_rows
        self._add_up = add_up

    def forward(self, rows: Tensor) -> Tensor:  # [T] → [T, size]
        own = rows - self._first
        elsewhere = (own < 0) | (own >= self._num_rows)
        x: Tensor = self.table(own.masked_fill(elsewhere, 0)).masked_fill(elsewhere[:, None], 0)
        self._add_up(x)
        return x

    def project(self, x: Tensor) -> Tensor:
        """See ``Embedding``: this rank's part of the vocabulary."""
        return self.table.project(x)


class ParallelFullNorm(nn.Module):
    """``FullNorm`` of heads that are spread over ranks: sums of squares, summed."""

    def __init__(self, norm: FullNorm, num_ranks: int, add_up: AddUp) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self._size = norm.size[0] * num_ranks
        self._add_up = add_up

    def forward(self, x: Tensor) -> Tensor:  # [T, H / ranks, D] → same
        wide = x.float()
        squares = wide.square().sum((1, 2))
        self._add_up(squares)
        normed = wide * torch.rsqrt(squares / self._size + self.eps)[:, None, None]
        return (normed * self.weight.float().view(x.shape[1:])).to(x.dtype)


def parallelize(model: Model, shard: Shard, add_up: AddUp) -> None:
    """Exchange the modules of a rank's model whose results are partial sums.

    Args:
        add_up: sums all ranks' tensors in place (``Ranks.add_up``).
    """
    if shard.size == 1:
        return
    if model.embed_tokens is not None:
        own = VocabParallelEmbedding(model.embed_tokens, shard, add_up)
        model.add_module("embed_tokens", own)
    for layer in model.layers:
        if isinstance(layer.q_norm, FullNorm) and isinstance(layer.k_norm, FullNorm):
            layer.q_norm = ParallelFullNorm(layer.q_norm, shard.size, add_up)
            layer.k_norm = ParallelFullNorm(layer.k_norm, shard.size, add_up)
        layer.add_module("o", RowParallelLinear(layer.o, add_up))
        if isinstance(layer.mlp, Experts):
            _parallelize_experts(layer.mlp, shard, add_up)
        else:
            layer.mlp.add_module("down", RowParallelLinear(layer.mlp.down, add_up))


def _parallelize_experts(experts: Experts, shard: Shard, add_up: AddUp) -> None:
    """Sum the block once. Of a bias that several ranks have, one keeps it."""
    experts.add_up = add_up
    if experts.down.bias is not None and shard.of_experts.rank:
        experts.down.bias.zero_()
    if experts.shared is not None and experts.shared.down.bias is not None and shard.rank:
        experts.shared.down.bias.zero_()
