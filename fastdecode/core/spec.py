"""What the R-part must know about a model, and nothing more.

R-workers know no model names. One ``AttentionSpec`` per layer and one ``KVSpec`` for the cache
hold everything that append-then-attend depends on; they are sent once, when an S-worker greets an
R-worker. RoPE and q/k norms belong to the S-part, which applies them to q and k before it sends
those; ALiBi, windows and soft-caps belong to the R-part."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError

MAX_HEADS = 1024
MAX_HEAD_DIM = 512
MAX_LAYERS = 4096
MAX_BLOCK_SIZE = 256
MAX_SEQUENCE_TOKENS = 1 << 23
"""Of the longest sequence: kernels count positions in float32, exactly up to twice as many."""


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention: o = softmax(f(scale · q·kᵀ) + bias) · v over the visible tokens.

    The query at position p sees the keys j with ``p - sliding_window < j <= p`` (no lower bound
    without a window). ``f(s) = logit_softcap · tanh(s / logit_softcap)``; the ALiBi bias is
    ``alibi_slopes[h] · (j - p)``."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    """Tokens seen, the query's own included; None sees all."""
    alibi_slopes: tuple[float, ...] | None = None
    """One slope a query head."""
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_kv_heads <= self.num_q_heads <= MAX_HEADS:
            raise ConfigError(
                f"attention needs 1 <= num_kv_heads <= num_q_heads <= {MAX_HEADS}, "
                f"got {self.num_kv_heads} KV heads and {self.num_q_heads} query heads"
            )
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_q_heads={self.num_q_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if not 1 <= self.head_dim <= MAX_HEAD_DIM:
            raise ConfigError(f"head_dim={self.head_dim} is not within 1..{MAX_HEAD_DIM}")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ConfigError(f"attention scale must be finite and > 0, got {self.scale}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window must be >= 1 token, got {self.sliding_window}")
        if self.alibi_slopes is not None:
            if len(self.alibi_slopes) != self.num_q_heads:
                raise ConfigError(
                    f"alibi_slopes has {len(self.alibi_slopes)} entries for {self.num_q_heads} "
                    "query heads"
                )
            if not all(math.isfinite(slope) for slope in self.alibi_slopes):
                raise ConfigError("alibi_slopes must all be finite")
        if self.logit_softcap is not None and not (
            math.isfinite(self.logit_softcap) and self.logit_softcap > 0
        ):
            raise ConfigError(f"logit_softcap must be finite and > 0, got {self.logit_softcap}")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head (G in GQA)."""
        return self.num_q_heads // self.num_kv_heads


@dataclass(frozen=True)
class HeadShare:
    """Some of the heads: consecutive KV heads, and the query heads that share them."""

    kv: slice
    q: slice

    @property
    def num_kv_heads(self) -> int:
        return int(self.kv.stop - self.kv.start)

    @property
    def num_q_heads(self) -> int:
        return int(self.q.stop - self.q.start)

    def of(self, spec: AttentionSpec) -> AttentionSpec:
        """A layer as whoever has these heads needs to know it."""
        slopes = None if spec.alibi_slopes is None else spec.alibi_slopes[self.q]
        return replace(
            spec,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            alibi_slopes=slopes,
        )


@dataclass(frozen=True)
class Shard:
    """What one member of a cache group keeps of every sequence."""

    heads: HeadShare | None = None
    """None: all."""
    layers: range | None = None
    """As the group's S-worker counts them; None: all."""


def longest_window(layers: Iterable[AttentionSpec]) -> int | None:
    """The tokens that the layer which sees most of them does; None: a layer sees all."""
    windows = [layer.sliding_window for layer in layers]
    return None if None in windows else max(window for window in windows if window is not None)


def first_seen(num_past: int, window: int | None) -> int:
    """The first token that any layer sees from behind so many.

    Args:
        window: see ``longest_window``.
    """
    return 0 if window is None else max(0, num_past + 1 - window)


@dataclass(frozen=True)
class KVSpec:
    """The KV cache of one model on one R-worker. A KV block holds
    ``block_size`` tokens' K and V of one layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    block_size: int = 64

    def __post_init__(self) -> None:
        for name, value, most in (
            ("num_layers", self.num_layers, MAX_LAYERS),
            ("num_kv_heads", self.num_kv_heads, MAX_HEADS),
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
            ("block_size", self.block_size, MAX_BLOCK_SIZE),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{name}={value} is not within 1..{most}")

    @property
    def token_bytes(self) -> int:
        """Raw K and V bytes of one token over all layers, scales included."""
        head_bytes = -(-self.head_dim * self.dtype.bits // 8) + self.dtype.scale_bytes
        return 2 * self.num_layers * self.num_kv_heads * head_bytes

    @property
    def block_bytes(self) -> int:
        """Raw bytes of one block id over all layers (a block id names one block in every layer)."""
        return self.block_size * self.token_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` cached tokens of one sequence fill."""
        return -(-num_tokens // self.block_size)
