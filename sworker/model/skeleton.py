"""The model: a stack of layers that stop short of attention.

A layer is two halves. ``pre_attention`` turns hidden states to q, k and v; ``post_attention``
turns attention's output to the next layer's hidden states. Who computes attention in between, and
where the KV cache is, is the caller's affair: ``forward`` takes it as a parameter. Tokens always
lie on one flat axis [T], whatever sequences they belong to.

Nothing here waits for the device or depends on the data, so the halves can be captured in CUDA
graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from fastdecode.core.model.moe import Moe
from fastdecode.core.model.spec import ModelSpec
from sworker.model.linear import MLP, AttentionGate, Embedding, Linear, Sinks
from sworker.model.moe import Experts
from sworker.model.norms import make_norm, make_qk_norm
from sworker.model.rope import QueryGrowth, RotaryTable


class Attend(Protocol):
    """One layer's attention over the tokens of a step, and the cached tokens before them."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] → o [T, Hq, D]. The inputs may be
        views; only their last dim is dense."""
        ...


AddNorm = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""x and what is added [T, hidden], and where the sum goes → the sum, and its norm."""
QKV: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""q [T, Hq, D], k and v [T, Hkv, D]."""
RotateSplit = Callable[[Tensor, Tensor, Tensor, QKV], None]
"""q and k [T, Hq + Hkv, D], v [T, Hkv, D], positions [T], and where they go, the first turned."""
_UNNORMED = ("post", "branch")
"""Placements of norms where attention and MLP take the residual as it is."""


@dataclass(frozen=True)
class LayerRoom:
    """Memory that a layer's first half writes to."""

    x: Tensor  # [T, hidden]
    qkv: QKV


def new_qkv(like: Tensor, num_q_heads: int, num_kv_heads: int, head_dim: int) -> QKV:
    """Memory for q, k and v of as many rows as ``like`` has, each dense."""
    k = like.new_empty((like.shape[0], num_kv_heads, head_dim))
    return like.new_empty((like.shape[0], num_q_heads, head_dim)), k, torch.empty_like(k)


def make_rooms(model: Model, num_rows: int, count: int) -> tuple[LayerRoom, ...]:
    """Memory for so many layers of a model on a CPU; x is the same."""
    spec, x = model.spec, torch.empty((num_rows, model.spec.hidden_size), dtype=model.dtype)
    sizes = spec.num_q_heads, spec.num_kv_heads, spec.head_dim
    return tuple(LayerRoom(x, new_qkv(x, *sizes)) for _ in range(count))


class LayerHalves(Protocol):
    """A layer as steps run it: a ``Layer``, or what a device has in place of one."""

    def pre_attention(
        self, x: Tensor, added: Tensor | None, positions: Tensor, room: LayerRoom | None = None
    ) -> tuple[Tensor, QKV]:
        """See ``Layer``."""

    def post_attention(self, x: Tensor, o: Tensor) -> tuple[Tensor, Tensor | None]:
        """See ``Layer``."""


class Layer(nn.Module):
    """One layer of any family; which norms there are and where, biases and
    residuals, is by the spec's flags."""

    add_norm_kernel: AddNorm | None = None
    """What a device may have in place of a sum and ``mlp_norm``. Operators
    kept here would be a cycle, as in ``MLP``."""
    attn_add_norm_kernel: AddNorm | None = None
    """The same of ``attn_norm``, and the sum that ends the layer before."""
    rotate_split_kernel: RotateSplit | None = None
    """In place of ``rope``: q, k and v come out dense, each in memory of its own."""

    def __init__(
        self,
        spec: ModelSpec,
        rope: RotaryTable | None,
        moe: Moe | None = None,
        mlp_limit: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_q_heads = spec.num_q_heads
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.parallel, self.placement = spec.parallel_residual, spec.norm_placement
        self.residual_scale, self.qkv_clip = spec.residual_scale, spec.qkv_clip
        self.rope = rope
        self.attn_norm = make_norm(spec)
        self.mlp_norm = self.attn_norm if spec.shared_norm else make_norm(spec)
        if spec.norm_placement == "sandwich":
            self.attn_out_norm, self.mlp_out_norm = make_norm(spec), make_norm(spec)
        self.qkv = Linear(spec.hidden_size, spec.qkv_sizes, spec.qkv_bias)
        self.norms_turned = spec.qk_norm in ("turned", "length")
        has_qk_norm = rope is not None or spec.qk_norm != "length"
        self.q_norm = make_qk_norm(spec, spec.num_q_heads) if has_qk_norm else None
        self.k_norm = make_qk_norm(spec, spec.num_kv_heads) if has_qk_norm else None
        self.growth = QueryGrowth(*spec.q_growth, spec.max_model_len) if spec.q_growth else None
        self.gate = AttentionGate(spec) if spec.attn_gate != "none" else None
        self.sinks = Sinks(spec.num_sinks) if spec.num_sinks else None
        self.o = Linear(spec.num_q_heads * spec.head_dim, (spec.hidden_size,), spec.o_bias)
        self.mlp = MLP(spec, limit=mlp_limit) if moe is None else Experts(spec, moe)

    def pre_attention(
        self, x: Tensor, added: Tensor | None, positions: Tensor, room: LayerRoom | None = None
    ) -> tuple[Tensor, QKV]:
        """x and what is added to it, if anything is, [T, hidden], positions [T]
        → the sum, and q [T, Hq, D], k and v [T, Hkv, D] of it, ready to be
        cached and attended. With a room, all are there."""
        total, h = self._summed(x, added, None if room is None else room.x)
        heads = self.qkv(h).unflatten(-1, (-1, self.head_dim))  # [T, Hq + 2 Hkv, D]
        qk, v = heads.tensor_split((self.num_q_heads + self.num_kv_heads,), dim=1)
        if not self.norms_turned:
            qk = self._normed(qk)
        if self.qkv_clip is not None:
            qk, v = (part.clamp(-self.qkv_clip, self.qkv_clip) for part in (qk, v))
        if self.rotate_split_kernel is not None:
            sizes = self.num_q_heads, self.num_kv_heads, self.head_dim
            qkv = new_qkv(v, *sizes) if room is None else room.qkv
            self.rotate_split_kernel(qk, v, positions, qkv)
            return total, qkv
        if self.rope is not None:
            qk = self.rope(qk, positions)
        if self.norms_turned:
            qk = self._normed(qk)
        q, k = qk.tensor_split((self.num_q_heads,), dim=1)
        if self.growth is not None:
            q = self.growth(q, positions)
        if room is None:
            return total, (q, k, v)
        for target, source in zip(room.qkv, (q, k, v), strict=True):
            target.copy_(source)
        return total, room.qkv

    def _normed(self, qk: Tensor) -> Tensor:  # [T, Hq + Hkv, D] → same
        if self.q_norm is None or self.k_norm is None:
            return qk
        q, k = qk.tensor_split((self.num_q_heads,), dim=1)
        return torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)

    def post_attention(self, x: Tensor, o: Tensor) -> tuple[Tensor, Tensor | None]:
        """The layer's input x [T, hidden] and attention's output o [T, Hq, D] → x, and what is to
        be added to it, if anything is: the next layer's input [T, hidden] is their sum."""
        if self.gate is not None:
            h = x if self.placement in _UNNORMED else self.attn_norm(x)
            o = self.gate(h, o)
        a = self._scaled(self.o(o.flatten(1)))  # [T, hidden]
        match self.placement:
            case "post":
                x = self.attn_norm(x + a)
                return self.mlp_norm(x + self._scaled(self.mlp(x))), None
            case "branch":
                x = x + self.attn_norm(a)
                return x, self.mlp_norm(self.mlp(x))
            case "sandwich":
                x = x + self.attn_out_norm(a)
                return x, self.mlp_out_norm(self.mlp(self.mlp_norm(x)))
        if self.parallel:
            return x + a, self._scaled(self.mlp(self.mlp_norm(x)))
        x, h = self.add_norm(x, a)
        return x, self._scaled(self.mlp(h))

    def _scaled(self, a: Tensor) -> Tensor:  # [T, hidden] → same
        return a if self.residual_scale == 1.0 else a * self.residual_scale

    def add_norm(self, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """x, a [T, hidden] → x + a, and what ``mlp_norm`` makes of it."""
        if self.add_norm_kernel is not None:
            return self.add_norm_kernel(x, a, None)
        x = x + a
        return x, self.mlp_norm(x)

    def _summed(
        self, x: Tensor, added: Tensor | None, room: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x + added, in its room, and what ``qkv`` takes of it."""
        if added is not None and self.attn_add_norm_kernel is not None:
            return self.attn_add_norm_kernel(x, added, room)
        if added is not None:
            total = torch.add(x, added, out=room)
        else:
            total = x if room is None else room.copy_(x)
        return total, total if self.placement in _UNNORMED else self.attn_norm(total)


class Model(nn.Module):
    """Embedding, layers, logits; or some layers of a model, of which other stages have the rest.
    Made by ``sworker.load.weights.load_model``, which fills in the weights.

    Args:
        spec: of the layers that it has.
        with_embedding: it begins with token ids, not with hidden states.
    """

    embed_positions: Embedding | None
    project_in: Linear | None
    embed_norm: nn.Module | None
    final_norm: nn.Module | None
    project_out: Linear | None
    lm_head: Linear | None

    def __init__(
        self, spec: ModelSpec, *, with_embedding: bool = True, with_head: bool = True
    ) -> None:
        super().__init__()
        self.spec = spec
        self.with_embedding, self.with_head = with_embedding, with_head
        self.dtype = torch.get_default_dtype()
        """Dtype of activations, once it is loaded, and of weights that are not packed narrower."""
        has_table = with_embedding or (with_head and spec.tied_embeddings)
        self.embed_tokens = Embedding(spec.vocab_size, spec.embedding_size) if has_table else None
        self.embed_positions = self.project_in = self.embed_norm = None
        self.final_norm = self.project_out = self.lm_head = None
        if with_embedding:
            self._make_embedding(spec)
        tables = {rope: RotaryTable(rope, spec.max_model_len) for rope in spec.ropes if rope}
        self.layers = cast(
            "Sequence[Layer]",
            nn.ModuleList(
                Layer(
                    spec,
                    tables[rope] if rope else None,
                    spec.layer_moe(layer),
                    spec.mlp_limit(layer),
                )
                for layer, rope in enumerate(spec.ropes)
            ),
        )
        # Of a ModuleList a length or an item takes microseconds.
        self.step_layers: Sequence[LayerHalves] = tuple(self.layers)
        """The layers, as steps run them one by one."""
        if with_head:
            self._make_head(spec)

    def _make_embedding(self, spec: ModelSpec) -> None:
        hidden, embedding = spec.hidden_size, spec.embedding_size
        if spec.num_learned_positions:
            self.embed_positions = Embedding(spec.num_learned_positions, hidden)
        if embedding != hidden:
            self.project_in = Linear(embedding, (hidden,), bias=False)
        if spec.embedding_norm:
            self.embed_norm = make_norm(spec)

    def _make_head(self, spec: ModelSpec) -> None:
        hidden, embedding = spec.hidden_size, spec.embedding_size
        if spec.final_norm:
            self.final_norm = make_norm(spec)
        if embedding != hidden:
            self.project_out = Linear(hidden, (embedding,), bias=False)
        if not spec.tied_embeddings:
            self.lm_head = Linear(embedding, (spec.vocab_size,), spec.head_bias)

    @property
    def sinks(self) -> tuple[Tensor, ...] | None:
        """Of each layer's attention, float32 [Hq]; None: it has none. The code that
        attends adds them (``sworker.prefill``)."""
        found = tuple(layer.sinks.sinks.float() for layer in self.layers if layer.sinks is not None)
        return found or None

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids [T], positions [T] (int32 or int64) → hidden states [T, hidden]."""
        assert self.embed_tokens is not None
        x: Tensor = self.embed_tokens(token_ids).to(self.dtype)  # [T, embedding]
        if self.spec.embedding_scale != 1.0:
            # Rounded to the activations' dtype, as Gemma was trained; a CPU
            # scalar, so nothing is copied to the device.
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype, device="cpu")
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions + self.spec.learned_position_offset)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """The last layer's output for the rows that need a next token, x [R,
        hidden] → float32 [R, vocab]."""
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.project_out is not None:
            x = self.project_out(x)
        if self.lm_head is not None:
            logits: Tensor = self.lm_head(x).float()
        else:
            assert self.embed_tokens is not None
            logits = self.embed_tokens.project(x).float()
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def forward(model: Model, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """One pass: token_ids [T], positions [T] → the last layer's output [T,
    hidden], for ``model.logits``."""
    x = model.embed(token_ids, positions)
    added = None
    for index, layer in enumerate(model.layers):
        x, (q, k, v) = layer.pre_attention(x, added, positions)
        o = attend(index, q, k, v)
        x, added = layer.post_attention(x, o)
    return x if added is None else x + added
