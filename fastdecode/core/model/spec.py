"""A decoder-only language model as numbers and flags, read from a Hugging Face ``config.json``.

Everything that builds or plans for a model (the S-part's modules, the R-part's ``AttentionSpec``,
the cost model's sizes) starts from one ``ModelSpec``; nothing else reads ``config.json``. Which
fields a family has, what they are called and what they default to is in
``fastdecode.core.model.families``, which reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from fastdecode.core.dtype import DType
from fastdecode.core.errors import UnsupportedModelError
from fastdecode.core.model.moe import MlpKind, Moe
from fastdecode.core.model.quantisation import Quantisation
from fastdecode.core.model.rope import RopeSpec
from fastdecode.core.spec import AttentionSpec, KVSpec

NormKind: TypeAlias = Literal["rms", "layer"]
NormPlacement: TypeAlias = Literal["pre", "post", "sandwich", "branch"]
QkNorm: TypeAlias = Literal["none", "head", "own", "full", "turned", "length"]
"""Which q and k are normed, before they turn if not said otherwise:

* head: each head, all with the same weights
* own: each head, with weights of its own
* full: all heads together
* turned: each head, after it has turned
* length: each head, after it has turned, without weights; heads that don't turn
  aren't normed
"""
Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "xielu"]
GateKind: TypeAlias = Literal["none", "head", "dim"]
GateActivation: TypeAlias = Literal["sigmoid", "softplus"]


@dataclass(frozen=True)
class ModelSpec:
    """One model. Frozen, and valid if it is ``families.read_model_spec``'s; needs no torch."""

    name: str  # for messages: usually the model's directory
    family: str  # ``model_type`` of ``config.json``
    architecture: str  # ``architectures`` of ``config.json``
    dtype: DType | None
    """The dtype that the checkpoint was saved in; None: float64, in which nothing runs."""

    vocab_size: int
    hidden_size: int
    embedding_size: int
    """Dims of a token embedding; projected in and out if it isn't ``hidden_size``."""
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    attention: tuple[AttentionSpec, ...]  # one per layer
    max_model_len: int  # most tokens a sequence may have, prompt and output together

    activation: Activation
    norm: NormKind
    norm_eps: float
    norm_placement: NormPlacement = "pre"
    """Of the attention and the MLP: norm before (pre), after the residual sum
    (post), before and after (sandwich), after, before the sum (branch)."""
    norm_offset: float = 0.0  # added to every norm's weight
    norm_affine: bool = True  # norms have weights
    norm_bias: bool = True  # LayerNorms that have weights have a bias, too
    shared_norm: bool = False  # one norm for attention and MLP, which are parallel
    qk_norm: QkNorm = "none"
    qkv_clip: float | None = None  # q, k and v are clamped to plus and minus this
    embedding_norm: bool = False
    final_norm: bool = True
    gated_mlp: bool = False  # act(gate(x)) · up(x), not act(up(x))
    parallel_residual: bool = False  # attention and MLP both read the layer's input
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    attn_gate: GateKind = "none"
    """Attention's output is multiplied by an activation of a projection of its
    input: one number a head, or a dim."""
    attn_gate_activation: GateActivation = "sigmoid"
    num_sinks: int = 0
    """Query heads that have a learned score that takes part in the softmax and
    has no value: all of the model's, also in a rank's part, or none."""
    rope_interleaved: bool = False
    """Checkpoints turn dims 2i and 2i + 1 of a head together, not i and n + i."""
    q_growth: tuple[float, int] | None = None
    """(β, n): q at position p is multiplied by 1 + β · ln(1 + ⌊p / n⌋)."""
    ropes: tuple[RopeSpec | None, ...] = ()  # how each layer turns q and k, or None
    num_learned_positions: int = 0  # rows of the learned position embedding; 0 without one
    learned_position_offset: int = 0  # row of position 0 in that embedding
    embedding_scale: float = 1.0  # multiplies the token embeddings
    residual_scale: float = 1.0  # multiplies what attention and MLP add
    logit_scale: float = 1.0  # multiplies the logits
    logit_softcap: float | None = None
    layer_q_heads: tuple[int, ...] = ()
    """Query heads of each layer in checkpoints, where layers differ: every layer
    here has as many as the one with most, and the rest of them give nothing."""
    moe: Moe | None = None  # the experts of the layers that have them
    mlps: tuple[MlpKind, ...] = ()
    """What each layer's MLP is; empty: experts everywhere if there are any."""
    mlp_limits: tuple[float, ...] = ()
    """Limit of the gate of each layer's dense MLP or shared expert, which is then
    clamped_after (see ``Moe``); 0: it is plain. Empty: all are."""
    expert_limits: tuple[float, ...] = ()
    """The same of each layer's routed experts; empty: ``moe`` says what their gate is."""
    quantisation: Quantisation | None = None
    """How the checkpoint's weights are quantised. They are decoded while they are
    loaded: the model computes with plain numbers."""
    tied_embeddings: bool = False  # the token embedding is the output projection too
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Any of these ends a text. Ids outside the vocabulary have been dropped:
    they can't be drawn."""

    def choose_dtype(self, asked: str) -> DType:
        """The dtype to run in.

        Args:
            asked: its name; auto: the checkpoint's own.

        Raises:
            ConfigError: there is none of this name.
            UnsupportedModelError: the checkpoint's own is float64.
        """
        if asked != "auto":
            return DType.parse(asked, or_auto=True)
        if self.dtype is None:
            raise UnsupportedModelError(
                f"{self.name}/config.json: the dtype 'float64' isn't implemented. Choose one to "
                "round the weights to: "
                "dtype float32, bfloat16 or float16."
            )
        return self.dtype

    def kv_spec(self, dtype: DType, block_size: int = 64) -> KVSpec:
        return KVSpec(self.num_layers, self.num_kv_heads, self.head_dim, dtype, block_size)

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Output dims of the q, k and v projections."""
        return (
            self.num_q_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        return self.moe is not None and (not self.mlps or self.mlps[layer] == "experts")

    def layer_moe(self, layer: int) -> Moe | None:
        """This layer's experts; None: its MLP is dense."""
        if self.moe is None or not self.has_experts(layer):
            return None
        moe = replace(self.moe, shared_limit=self.mlp_limit(layer))
        limit = self.expert_limits[layer] if self.expert_limits else 0.0
        return replace(moe, gate="clamped_after", limit=limit) if limit else moe

    def mlp_limit(self, layer: int) -> float:
        """Limit of the gate of this layer's dense MLP or shared expert; 0: none."""
        return self.mlp_limits[layer] if self.mlp_limits else 0.0

    def layer_parameters(self, layer: int) -> int:
        experts = self.moe.num_experts if self.moe is not None else 0
        return self._layer_parameters(layer, experts)

    def active_layer_parameters(self, layer: int) -> int:
        experts = self.moe.top_k if self.moe is not None else 0
        return self._layer_parameters(layer, experts)

    def _layer_parameters(self, layer: int, num_experts: int) -> int:
        """``num_experts``: how many routed experts count."""
        mlp = self._dense_mlp_parameters
        if self.moe is not None and self.has_experts(layer):
            hidden = self.hidden_size
            mlp = self.moe.num_router_parameters(hidden)
            mlp += num_experts * self.moe.num_expert_parameters(hidden)
            mlp += self.moe.num_shared_parameters(hidden, bias=self.mlp_bias)
        return self._attention_parameters(layer) + mlp

    def _attention_parameters(self, layer: int) -> int:
        heads = self.layer_q_heads[layer] if self.layer_q_heads else self.num_q_heads
        q_size, k_size = heads * self.head_dim, self.qkv_sizes[1]
        attention = self.hidden_size * 2 * (q_size + k_size)
        attention += (q_size + 2 * k_size) * self.qkv_bias + self.hidden_size * self.o_bias
        qk_norm = {"none": 0, "length": 0, "own": q_size + k_size, "full": q_size + k_size}
        gate = {"none": 0, "head": heads, "dim": q_size}[self.attn_gate]
        attention += qk_norm.get(self.qk_norm, 2 * self.head_dim) + gate * self.hidden_size
        norms = 1 if self.shared_norm else 4 if self.norm_placement == "sandwich" else 2
        return attention + norms * self._norm_parameters + self.num_sinks

    @property
    def _dense_mlp_parameters(self) -> int:
        ups = 2 if self.gated_mlp else 1
        biases = (ups * self.intermediate_size + self.hidden_size) * self.mlp_bias
        weights = (ups + 1) * self.hidden_size * self.intermediate_size
        return weights + biases + 2 * (self.activation == "xielu")

    @property
    def num_embedding_parameters(self) -> int:
        """Weights of the token and position embeddings, and of the projection
        and the norm that follow them."""
        projection = (
            self.hidden_size * self.embedding_size if self.embedding_size != self.hidden_size else 0
        )
        positions = self.num_learned_positions * self.hidden_size
        tokens = self.vocab_size * self.embedding_size
        return tokens + positions + projection + self._norm_parameters * self.embedding_norm

    @property
    def num_head_parameters(self) -> int:
        """Weights that turn the last layer's output to logits, without a token
        embedding that is used again."""
        projection = (
            self.hidden_size * self.embedding_size if self.embedding_size != self.hidden_size else 0
        )
        output = 0 if self.tied_embeddings else self.vocab_size * self.embedding_size
        output += self.vocab_size * self.head_bias
        return projection + output + self._norm_parameters * self.final_norm

    @property
    def num_parameters(self) -> int:
        return (
            self.num_embedding_parameters
            + sum(map(self.layer_parameters, range(self.num_layers)))
            + self.num_head_parameters
        )

    @property
    def _norm_parameters(self) -> int:
        has_bias = self.norm == "layer" and self.norm_bias
        return self.norm_affine * (1 + has_bias) * self.hidden_size
