"""The model: a stack of layers that stop short of attention.

A layer is two halves. ``pre_attention`` turns hidden states to q, k and v;
``post_attention`` turns attention's output to the next layer's hidden states.
Who computes attention in between, and where the KV cache is, is the caller's
affair: ``forward`` takes it as a parameter. Tokens always lie on one flat axis
[T], whatever sequences they belong to.

Nothing here waits for the device or depends on the data, so the halves can be
captured in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdecode.core.model.spec import ModelSpec
from sworker.model.linear import MLP, Embedding, Linear
from sworker.model.norms import RMSNorm, make_norm
from sworker.model.rope import RotaryTable


class Attend(Protocol):
    """One layer's attention over the tokens of a step, and the cached tokens before them."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] → o [T, Hq, D]. The inputs may be
        views; only their last dim is dense."""
        ...


AddNorm = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Layer(nn.Module):
    """One layer of any family; which norms there are and where, biases and
    residuals, is by the spec's flags."""

    add_norm_kernel: AddNorm | None = None
    """What a device may have in place of ``_add_norm``. That itself, kept here,
    would be a cycle, as in ``MLP``."""

    def __init__(self, spec: ModelSpec, rope: RotaryTable | None) -> None:
        super().__init__()
        self.num_q_heads = spec.num_q_heads
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.parallel, self.placement = spec.parallel_residual, spec.norm_placement
        self.rope = rope
        self.attn_norm, self.mlp_norm = make_norm(spec), make_norm(spec)
        if spec.norm_placement == "sandwich":
            self.attn_out_norm, self.mlp_out_norm = make_norm(spec), make_norm(spec)
        self.qkv = Linear(spec.hidden_size, spec.qkv_sizes, spec.qkv_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.o = Linear(spec.num_q_heads * spec.head_dim, (spec.hidden_size,), spec.o_bias)
        self.mlp = MLP(spec)

    def pre_attention(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden], positions [T] → q [T, Hq, D], k and v [T, Hkv, D],
        ready to be cached and attended."""
        h = x if self.placement == "post" else self.attn_norm(x)
        heads = self.qkv(h).unflatten(-1, (-1, self.head_dim))  # [T, Hq + 2 Hkv, D]
        qk, v = heads.tensor_split((self.num_q_heads + self.num_kv_heads,), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.tensor_split((self.num_q_heads,), dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        if self.rope is not None:
            qk = self.rope(qk, positions)
        q, k = qk.tensor_split((self.num_q_heads,), dim=1)
        return q, k, v

    def post_attention(self, x: Tensor, o: Tensor) -> Tensor:
        """The layer's input x [T, hidden] and attention's output o [T, Hq, D] →
        the next layer's input [T, hidden]."""
        a = self.o(o.flatten(1))  # [T, hidden]
        if self.placement == "post":
            x = self.attn_norm(x + a)
            x = self.mlp_norm(x + self.mlp(x))
        elif self.placement == "sandwich":
            x = x + self.attn_out_norm(a)
            x = x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)))
        elif self.parallel:
            x = x + a + self.mlp(self.mlp_norm(x))
        else:
            x, h = self.add_norm(x, a)
            x = x + self.mlp(h)
        return x

    def add_norm(self, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        """x, a [T, hidden] → x + a, and what ``mlp_norm`` makes of it."""
        return (self.add_norm_kernel or self._add_norm)(x, a)

    def _add_norm(self, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        x = x + a
        return x, self.mlp_norm(x)


class Model(nn.Module):
    """Embedding, layers, logits. Made by ``sworker.load.weights.load_model``,
    which fills in the weights."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        hidden, embedding = spec.hidden_size, spec.embedding_size
        self.embed_tokens = Embedding(spec.vocab_size, embedding)
        self.embed_positions = (
            Embedding(spec.num_learned_positions, hidden) if spec.num_learned_positions else None
        )
        self.project_in = Linear(embedding, (hidden,), bias=False) if embedding != hidden else None
        self.embed_norm = make_norm(spec) if spec.embedding_norm else None
        rope = RotaryTable(spec.rope, spec.max_model_len) if spec.rope else None
        self.layers = cast(
            "Sequence[Layer]", nn.ModuleList(Layer(spec, rope) for _ in range(spec.num_layers))
        )
        self.final_norm = make_norm(spec) if spec.final_norm else None
        self.project_out = Linear(hidden, (embedding,), bias=False) if embedding != hidden else None
        self.lm_head = (
            None if spec.tied_embeddings else Linear(embedding, (spec.vocab_size,), bias=False)
        )

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids [T], positions [T] (int32 or int64) → hidden states [T, hidden]."""
        x: Tensor = self.embed_tokens(token_ids)  # [T, embedding]
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
        head: Tensor = (
            F.linear(x, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)
        )
        logits = head.float()
        cap = self.spec.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def forward(model: Model, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """One pass: token_ids [T], positions [T] → the last layer's output [T,
    hidden], for ``model.logits``."""
    x = model.embed(token_ids, positions)
    for index, layer in enumerate(model.layers):
        q, k, v = layer.pre_attention(x, positions)
        o = attend(index, q, k, v)
        x = layer.post_attention(x, o)
    return x
