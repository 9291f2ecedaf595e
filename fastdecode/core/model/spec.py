"""A decoder-only language model as numbers and flags, read from a Hugging Face
``config.json``.

Everything that builds or plans for a model (the S-part's modules, the R-part's
``AttentionSpec``, the cost model's sizes) starts from one ``ModelSpec``;
nothing else reads ``config.json``. Which fields a family has, what they are
called and what they default to is in ``fastdecode.core.model.families``, which
reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from fastdecode.core.dtype import DType
from fastdecode.core.errors import UnsupportedModelError
from fastdecode.core.model.moe import MlpKind, Moe
from fastdecode.core.model.rope import RopeSpec
from fastdecode.core.spec import AttentionSpec, KVSpec

NormKind: TypeAlias = Literal["rms", "layer"]
NormPlacement: TypeAlias = Literal["pre", "post", "sandwich"]
QkNorm: TypeAlias = Literal["none", "head"]
Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"]


@dataclass(frozen=True)
class ModelSpec:
    """One model. Frozen, and valid if it is ``families.read_model_spec``'s; needs no torch."""

    name: str
    """For messages: usually the model's directory."""
    family: str
    """``model_type`` of ``config.json``."""
    architecture: str
    """``architectures`` of ``config.json``."""
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
    attention: tuple[AttentionSpec, ...]
    """One a layer."""
    max_model_len: int
    """Most tokens a sequence may have, prompt and output together."""

    activation: Activation
    norm: NormKind
    norm_eps: float
    norm_placement: NormPlacement = "pre"
    """Of the attention and the MLP: norm before (pre), after the residual sum
    (post), before and after (sandwich)."""
    norm_offset: float = 0.0
    """Added to every norm's weight."""
    norm_affine: bool = True
    """False: norms have no weights."""
    qk_norm: QkNorm = "none"
    """Of q and k before they turn: each head alone."""
    embedding_norm: bool = False
    final_norm: bool = True
    gated_mlp: bool = False
    """act(gate(x)) · up(x), not act(up(x))."""
    parallel_residual: bool = False
    """Attention and MLP both read the layer's input."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    ropes: tuple[RopeSpec | None, ...] = ()
    """How each layer turns q and k; None: not at all."""
    num_learned_positions: int = 0
    """Rows of the learned position embedding; 0 without one."""
    learned_position_offset: int = 0
    """Row of position 0."""
    embedding_scale: float = 1.0
    """Multiplies the token embeddings."""
    logit_softcap: float | None = None
    moe: Moe | None = None
    """The experts of the layers that have them."""
    mlps: tuple[MlpKind, ...] = ()
    """What each layer's MLP is; empty: experts everywhere if there are any."""
    tied_embeddings: bool = False
    """The token embedding is the output projection too."""
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
            return DType.parse(asked)
        if self.dtype is None:
            raise UnsupportedModelError(
                f"{self.name}/config.json: the dtype 'float64' isn't implemented. Choose one to "
                "round the weights to: "
                "dtype float32, bfloat16 or float16."
            )
        return self.dtype

    def kv_spec(self, dtype: DType, block_size: int = 64) -> KVSpec:
        """The KV cache of this model in ``dtype``."""
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

    def layer_parameters(self, layer: int) -> int:
        """Weights of one layer."""
        experts = self.moe.num_experts if self.moe is not None else 0
        return self._layer_parameters(layer, experts)

    def active_layer_parameters(self, layer: int) -> int:
        """Weights of one layer that one token passes."""
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
        return self._attention_parameters + mlp

    @property
    def _attention_parameters(self) -> int:
        """Weights of a layer without its MLP."""
        q_size = self.qkv_sizes[0]
        attention = self.hidden_size * (sum(self.qkv_sizes) + q_size)
        attention += sum(self.qkv_sizes) * self.qkv_bias + self.hidden_size * self.o_bias
        norms = (4 if self.norm_placement == "sandwich" else 2) * self._norm_parameters
        return attention + norms + 2 * self.head_dim * (self.qk_norm != "none")

    @property
    def _dense_mlp_parameters(self) -> int:
        ups = 2 if self.gated_mlp else 1
        biases = (ups * self.intermediate_size + self.hidden_size) * self.mlp_bias
        return (ups + 1) * self.hidden_size * self.intermediate_size + biases

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
        return projection + output + self._norm_parameters * self.final_norm

    @property
    def num_parameters(self) -> int:
        """All weights, shared ones counted once."""
        return (
            self.num_embedding_parameters
            + sum(map(self.layer_parameters, range(self.num_layers)))
            + self.num_head_parameters
        )

    @property
    def _norm_parameters(self) -> int:
        return self.norm_affine * (2 if self.norm == "layer" else 1) * self.hidden_size
