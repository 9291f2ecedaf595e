"""Workload of a model, and its costs per token and layer: bytes, FLOPs, cached tokens."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from fastdecode.core.config.options import REQUIRED, check_options, option
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.model.spec import ModelSpec

MAX_TOKENS = 10_000_000

FP8 = "fp8"
"""A KV dtype for rivals only, with one scale per tensor: FastDecode has no such cache."""


@dataclass(frozen=True)
class Workload:
    """Sequences of one length. Every sequence has a prompt and decodes ``output_tokens`` steps.

    Sequences start evenly spread, a micro-batch every ``start_interval_steps`` (F in the paper,
    section 4.2). At any step their outputs are F, 2F, … long, and the load over B sequences is
    B·(prompt + (output + F)/2): about half of what it grows to when all start at once (F = output).
    """

    prompt_tokens: int = option(REQUIRED, "prompt tokens a sequence", low=0, high=MAX_TOKENS)
    output_tokens: int = option(REQUIRED, "output tokens a sequence", low=1, high=MAX_TOKENS)
    start_interval_steps: int = option(
        1, "steps between starts", low=1, flag="--start-interval", metavar="F"
    )
    prefix_hit: float = option(0.0, "part of a prompt that the prefix cache holds", metavar="X")
    """This part isn't computed, and not sent. Each sequence still reserves memory for all of it."""

    def __post_init__(self) -> None:
        check_options(self)
        if not 0.0 <= self.prefix_hit < 1.0:
            given = Given("prefix_hit", self.prefix_hit)
            raise ConfigError(given, " is not a part from 0 to below 1")
        if self.start_interval_steps > self.output_tokens:
            given = Given("start_interval_steps", self.start_interval_steps)
            raise ConfigError(given, f" is more than the {self.output_tokens} output tokens")

    @property
    def peak_context_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def cached_prompt_tokens(self) -> float:
        return self.prompt_tokens * self.prefix_hit

    @property
    def mean_context_tokens(self) -> float:
        """Cached tokens of a running sequence, averaged over those that run together."""
        return self.prompt_tokens + (self.output_tokens + self.start_interval_steps) / 2

    def mean_attended_tokens(self, sliding_window: int | None) -> float:
        """Return the keys that a running sequence's query sees in a layer with this window,
        averaged in the same way."""
        mean = self.mean_context_tokens
        if sliding_window is None or self.peak_context_tokens <= sliding_window:
            return mean
        # Outputs are spread evenly over F .. output, so contexts over low .. high, and
        # min(context, window) has the mean of a ramp that is cut off at the window.
        low, high = self.prompt_tokens + self.start_interval_steps, self.peak_context_tokens
        if low >= sliding_window or low == high:
            return float(min(sliding_window, mean))
        ramp = sliding_window - low
        return (ramp * (low + sliding_window) / 2 + (high - sliding_window) * sliding_window) / (
            high - low
        )

    def attended_tokens(self, spec: ModelSpec) -> float:
        kinds = Counter(attention.sliding_window for attention in spec.attention)
        total = sum(count * self.mean_attended_tokens(window) for window, count in kinds.items())
        return total / len(spec.attention)


@dataclass(frozen=True)
class WeightBytes:
    experts: float
    layers: float
    """All other weights of layers."""
    others: float
    """Embeddings, head and final norm."""

    @classmethod
    def decoded(cls, dtype: DType) -> WeightBytes:
        return cls(dtype.size_bytes, dtype.size_bytes, dtype.size_bytes)

    @classmethod
    def kept(cls, spec: ModelSpec, dtype: DType) -> WeightBytes:
        """Return bytes as the checkpoint holds weights, in ``dtype`` where it isn't quantised."""
        quantisation, plain = spec.quantisation, float(dtype.size_bytes)
        if quantisation is None:
            return cls.decoded(dtype)
        layer = f"model.layers.{spec.num_layers // 2}"
        experts = quantisation.module_bytes(f"{layer}.mlp.experts.0.up_proj", plain)
        module = "mlp.up_proj" if spec.moe is None else "self_attn.q_proj"
        return cls(experts, quantisation.module_bytes(f"{layer}.{module}", plain), plain)


@dataclass(frozen=True)
class TokenCosts:
    """A model in ``dtype`` with its KV cache in ``kv_dtype``, as bytes and FLOPs."""

    spec: ModelSpec
    dtype: DType
    kv_dtype: str
    kept: WeightBytes | None = None
    """What weights take in memory. None if all are in ``dtype``."""
    has_ends: bool = True
    """False for a later pipeline stage, without embedding, final norm and head."""

    @cached_property
    def weights(self) -> WeightBytes:
        return self.kept or WeightBytes.decoded(self.dtype)

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers

    @cached_property
    def weight_bytes(self) -> float:
        layers = range(self.num_layers)
        others = self.spec.num_parameters - sum(map(self.spec.layer_parameters, layers))
        others *= self.has_ends
        return self.read_bytes(math.inf) + others * self.weights.others

    @cached_property
    def layer_weight_bytes(self) -> float:
        """Mean of all layers, with every expert."""
        return self.read_bytes(math.inf) / self.num_layers

    def layer_read_bytes(self, layer: int, batch: float) -> float:
        """Return the weights that a step of this many rows reads in one layer, with the experts
        that the router chooses."""
        others, experts = self._read_parts[self.spec.has_experts(layer)]
        moe = self.spec.moe
        return others + (experts * moe.experts_hit(batch) if moe and experts else 0)

    @cached_property
    def _read_parts(self) -> dict[bool, tuple[float, float]]:
        """By whether a layer has experts: bytes that every step reads, and bytes of one expert."""
        spec, moe, weights, parts = self.spec, self.spec.moe, self.weights, {}
        for layer, _ in self.layer_kinds:
            others, expert = spec.layer_parameters(layer), 0
            if moe is not None and spec.has_experts(layer):
                expert = moe.num_expert_parameters(spec.hidden_size)
                others -= moe.num_experts * expert
            parts[spec.has_experts(layer)] = (others * weights.layers, expert * weights.experts)
        return parts

    def read_bytes(self, batch: float) -> float:
        """Return the weights that a step of this many rows reads in all layers."""
        return sum(count * self.layer_read_bytes(each, batch) for each, count in self.layer_kinds)

    def layer_flops(self, layer: int) -> float:
        return 2.0 * self.spec.active_layer_parameters(layer)

    def layer_activation_bytes(self, layer: int) -> float:
        """Return what one token's activations move through the GPU's memory: each is written and
        read once."""
        spec = self.spec
        elements = 6 * spec.hidden_size + sum(spec.qkv_sizes) + spec.qkv_sizes[0]
        return 2.0 * (elements + self._mlp_elements(layer)) * self.dtype.size_bytes

    @cached_property
    def layer_kinds(self) -> tuple[tuple[int, int], ...]:
        """A layer of each kind of MLP, and how many layers are of that kind."""
        kinds: dict[bool, list[int]] = {}
        for layer in range(self.spec.num_layers):
            kinds.setdefault(self.spec.has_experts(layer), []).append(layer)
        return tuple((layers[0], len(layers)) for layers in kinds.values())

    def _mlp_elements(self, layer: int) -> int:
        spec, moe = self.spec, self.spec.moe
        if moe is None or not spec.has_experts(layer):
            return (3 if spec.gated_mlp else 2) * spec.intermediate_size
        routed = moe.top_k * (2 * spec.hidden_size + 3 * moe.inner)  # sorted, and put back
        return routed + 3 * moe.shared_inner

    @property
    def head_parameters(self) -> int:
        """Weights of the logits, whether or not they are the token embedding's."""
        return self.spec.vocab_size * self.spec.embedding_size * self.has_ends

    @cached_property
    def peak_activation_bytes(self) -> float:
        """GPU memory of one token: its widest layer, or its logits in fp32 and their copy."""
        spec = self.spec
        mlp = max(self._mlp_elements(layer) for layer, _ in self.layer_kinds)
        widest = 4 * spec.hidden_size + 2 * sum(spec.qkv_sizes) + mlp
        return max(widest * self.dtype.size_bytes, 8.0 * spec.vocab_size * self.has_ends)

    @cached_property
    def out_bytes(self) -> int:
        """q, k and v of one token and layer, on the wire."""
        return sum(self.spec.qkv_sizes) * self.dtype.size_bytes

    @cached_property
    def prompt_out_bytes(self) -> int:
        """k and v of a prompt token and layer, on the wire, if the S-worker attends."""
        return (self.spec.qkv_sizes[1] + self.spec.qkv_sizes[2]) * self.dtype.size_bytes

    @cached_property
    def back_bytes(self) -> int:
        """o of one token and layer, on the wire."""
        return self.spec.qkv_sizes[0] * self.dtype.size_bytes

    @cached_property
    def kv_layer_bytes(self) -> float:
        """K and V of one cached token and layer."""
        if self.kv_dtype == FP8:
            return 2.0 * self.spec.num_kv_heads * self.spec.head_dim
        kv = self.spec.kv_spec(DType.parse(self.kv_dtype, of_kv=True))
        return kv.token_bytes / self.num_layers

    @property
    def kv_bytes(self) -> float:
        return self.num_layers * self.kv_layer_bytes

    @property
    def group(self) -> int:
        return self.spec.num_q_heads // self.spec.num_kv_heads

    @property
    def attention_flops(self) -> float:
        """FLOPs of one query over one key, all heads of one layer: q·k and p·v."""
        return 4.0 * self.spec.num_q_heads * self.spec.head_dim
