"""A family of models as a row of a table, and how a row reads ``config.json``.

A row states where the family keeps each number of a ``ModelSpec``, the defaults of missing
fields, and the names of tensors in its checkpoints. Features that a config asks for and that are
not implemented are refused, never ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from fastdecode.core.errors import UnsupportedModelError
from fastdecode.core.model.config_reader import ConfigReader, read_dtype, refuse_feature
from fastdecode.core.model.names import CheckpointNames
from fastdecode.core.model.quantisation import Quantisation
from fastdecode.core.model.rope import MAX_POSITIONS, RopeSpec, RotaryRules, read_rope
from fastdecode.core.model.spec import Activation, ModelSpec
from fastdecode.core.spec import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, AttentionSpec

T = TypeVar("T")
Read: TypeAlias = Callable[[ConfigReader, ModelSpec], T]
"""Reads one value of a family. The spec has what was read before: sizes first,
then a row's fields in their order."""
LayerKinds: TypeAlias = tuple[str, ...]
"""Of each layer, as ``layer_types`` has it: full_attention, sliding_attention
(with a window) or chunked_attention."""

MAX_HIDDEN = 1 << 18
MAX_INTERMEDIATE = 1 << 22
_MAX_VOCAB = 1 << 24

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
_REFUSED_IF_TRUE = {
    "is_encoder_decoder": "an encoder-decoder",
    "add_cross_attention": "cross-attention",
    "use_bidirectional_attention": "bidirectional attention",
    "apply_residual_connection_post_layernorm": "a residual taken after the norm",
    "pruned_heads": "pruned heads",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


# --- Lookups


def integer(
    *names: str, low: int = 1, high: int = MAX_INTERMEDIATE, default: int | Read[int] | None = None
) -> Read[int]:
    """A whole number; ``default``: where the field is missing, or how to find it."""

    def read(reader: ConfigReader, spec: ModelSpec) -> int:
        found = default(reader, spec) if callable(default) else default
        return reader.integer(*names, low=low, high=high, default=found)

    return read


def number(*names: str, high: float = 1e12, default: float | None = None) -> Read[float]:
    """A number above 0."""
    return lambda reader, spec: reader.number(*names, high=high, default=default)


def optional_number(name: str, default: float | None = None) -> Read[float | None]:
    """A missing field is the default; null is None."""

    def read(reader: ConfigReader, spec: ModelSpec) -> float | None:
        return reader.optional_number(name, high=1e6) if name in reader.fields else default

    return read


def flag(name: str, default: bool) -> Read[bool]:
    return lambda reader, spec: reader.flag(name, default)


def activation(*names: str, default: str) -> Read[Activation]:
    def read(reader: ConfigReader, spec: ModelSpec) -> Activation:
        name = reader.string(*names, default=default)
        if name not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"{reader.where}: the activation {name!r} is not supported. Supported are "
                f"{', '.join(_ACTIVATIONS)}."
            )
        return _ACTIVATIONS[name]

    return read


def same_as(name: str) -> Read[Any]:
    """What the spec's field of this name is."""
    return lambda reader, spec: getattr(spec, name)


def window(default: int | None = None) -> Read[int | None]:
    """``sliding_window``: a missing field is the default; null is None."""

    def read(reader: ConfigReader, spec: ModelSpec) -> int | None:
        if "sliding_window" not in reader.fields:
            return default
        return reader.optional_integer("sliding_window", high=(1 << 31) - 1)

    return read


def no_value(reader: ConfigReader, spec: ModelSpec) -> None:
    return None


def by_root_of_head_dim(reader: ConfigReader, spec: ModelSpec, layer: int) -> float:
    return float(spec.head_dim**-0.5)


_QUERY_HEADS: Read[int] = same_as("num_q_heads")
_POSITIONS = integer("max_position_embeddings", high=MAX_POSITIONS)

# --- Rows


@dataclass(frozen=True)
class Row:
    """One family. Another one like it is ``derive`` of it."""

    family: str  # ``model_type`` of ``config.json``, or of its text part
    architectures: tuple[str, ...]
    """The language model, and the base model that it is made of: a checkpoint
    of either is a language model's if it has an output projection or its token
    embedding is one. Models whose text part is one, too."""
    names: CheckpointNames
    models: str = ""  # common names of its models
    fields: Mapping[str, object] = field(default_factory=dict)
    """Of ``ModelSpec``: constants, or ``Read``."""
    layer_q_heads: Read[tuple[int, ...]] | None = None
    """Query heads of each layer; None: all layers have as many."""
    kv_heads: Read[int] = _QUERY_HEADS
    head_dim: Read[int | None] = no_value  # None if the heads divide the hidden size
    positions: Read[int] = _POSITIONS
    scale: Callable[[ConfigReader, ModelSpec, int], float] = by_root_of_head_dim
    """Of a layer's scores."""
    window: Read[int | None] = no_value  # tokens that a layer with a window sees
    slides: Read[Callable[[int], bool]] | None = None
    """Which layers have a window where ``layer_types`` is missing; None: all,
    and layers of several kinds are refused."""
    has_chunks: bool = False
    """Layers may see their chunk only; ``positions`` are one chunk's at most."""
    softcap: Read[float | None] = no_value  # soft-cap of a layer's scores
    alibi: Read[tuple[float, ...] | None] = no_value
    rotary: RotaryRules | None = None
    rotates: Callable[[ConfigReader, ModelSpec, LayerKinds], tuple[bool, ...]] | None = None
    """Which layers turn q and k; None: all, if any."""
    newer: Callable[[ConfigReader], ConfigReader] | None = None
    """Gives an older config the fields that newer ones have; None: as it is."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Config field → the feature that it asks for when it is true."""

    def derive(
        self,
        family: str,
        *architectures: str,
        fields: Mapping[str, object] | None = None,
        **changes: Any,
    ) -> Row:
        """Return a family with other attributes. ``fields`` are added to this one's."""
        own = {**self.fields, **(fields or {})}
        return replace(self, family=family, architectures=architectures, fields=own, **changes)

    def refuse_features(self, reader: ConfigReader) -> None:
        """Refuse what the config asks for and is not implemented."""
        others = {} if "moe" in self.fields else dict.fromkeys(_EXPERTS, "a mixture of experts")
        for name, feature in {**_REFUSED_IF_TRUE, **others, **self.refused}.items():
            value = reader.fields.get(name)
            if (value and value != 1) or value is True:
                raise refuse_feature(reader, name, feature)

    def read(
        self,
        reader: ConfigReader,
        name: str,
        architecture: str,
        quantisation: Quantisation | None,
        max_len: int | None,
    ) -> ModelSpec:
        """Read all but the tokens that begin and end a text.

        Args:
            max_len: the length limit that was asked for, if any.

        Raises:
            UnsupportedModelError, CheckpointError: As ``read_model_spec``.
        """
        self.refuse_features(reader)
        reader = self.newer(reader) if self.newer else reader
        spec = self._read_shape(reader, name, architecture, quantisation)
        positions = self.positions(reader, spec)
        kinds = self._read_kinds(reader, spec)
        spec = replace(spec, max_model_len=positions)
        for field_name, value in self.fields.items():
            found: Any = value(reader, spec) if callable(value) else value
            spec = replace(spec, **{field_name: found})
        ropes, served = self._read_ropes(reader, spec, kinds, positions, max_len)
        attention = self._read_attention(reader, spec, kinds)
        return replace(spec, ropes=ropes, max_model_len=served, attention=attention)

    def _read_shape(
        self, reader: ConfigReader, name: str, architecture: str, quantisation: Quantisation | None
    ) -> ModelSpec:
        """Read sizes. What depends on them is read later."""
        hidden = reader.integer("hidden_size", "n_embd", "n_embed", "d_model", high=MAX_HIDDEN)
        spec = ModelSpec(
            name=name,
            family=self.family,
            architecture=architecture,
            dtype=read_dtype(reader, "float32" if quantisation is None else "bfloat16"),
            vocab_size=reader.integer("vocab_size", high=_MAX_VOCAB),
            hidden_size=hidden,
            embedding_size=hidden,
            intermediate_size=4 * hidden,
            num_layers=reader.integer(
                "num_hidden_layers", "n_layer", "n_layers", "num_layers", high=MAX_LAYERS
            ),
            num_q_heads=reader.integer("num_attention_heads", "n_head", "n_heads", high=MAX_HEADS),
            num_kv_heads=1,
            head_dim=1,
            attention=(),
            max_model_len=1,
            activation="silu",
            norm="rms",
            norm_eps=1e-6,
            quantisation=quantisation,
        )
        heads = self.layer_q_heads(reader, spec) if self.layer_q_heads else ()
        if heads:
            own = heads if len(set(heads)) > 1 else ()
            spec = replace(spec, num_q_heads=max(heads), layer_q_heads=own)
        kv_heads = self.kv_heads(reader, spec)
        for num in heads or (spec.num_q_heads,):
            if num % kv_heads:
                rule = f"a divisor of the {num} query heads"
                raise reader.refuse("num_key_value_heads", kv_heads, rule)
        head_dim = self.head_dim(reader, spec) or _divided_head_dim(reader, spec)
        return replace(spec, num_kv_heads=kv_heads, head_dim=head_dim)

    def _read_kinds(self, reader: ConfigReader, spec: ModelSpec) -> LayerKinds:
        named = reader.strings("layer_types")
        if self.slides is None:
            if len(set(named)) > 1:
                raise UnsupportedModelError(
                    f"{reader.where}: this family with different 'layer_types' isn't implemented."
                )
            return ("full_attention",) * spec.num_layers
        if not named:
            slides = self.slides(reader, spec)
            return tuple(
                "sliding_attention" if slides(layer) else "full_attention"
                for layer in range(spec.num_layers)
            )
        if len(named) != spec.num_layers:
            raise reader.refuse(
                "layer_types", named, f"a list of {spec.num_layers} entries, one a layer"
            )
        return tuple(self._known_kind(reader, kind) for kind in named)

    def _known_kind(self, reader: ConfigReader, kind: str) -> str:
        chunked = ("chunked_attention",) if self.has_chunks else ()
        if kind in ("full_attention", "sliding_attention", *chunked):
            return kind
        raise UnsupportedModelError(
            f"{reader.where}: layers of the type {kind!r} aren't implemented."
        )

    def _read_attention(
        self, reader: ConfigReader, spec: ModelSpec, kinds: LayerKinds
    ) -> tuple[AttentionSpec, ...]:
        size = self.window(reader, spec)
        if self.slides is None:
            windows = (size,) * spec.num_layers
        else:
            windows = tuple(size if kind == "sliding_attention" else None for kind in kinds)
            if size is None and "sliding_attention" in reader.strings("layer_types"):
                rule = "a number of tokens, since layer_types has sliding_attention"
                raise reader.refuse("sliding_window", None, rule)
        softcap, alibi = self.softcap(reader, spec), self.alibi(reader, spec)
        return tuple(
            AttentionSpec(
                num_q_heads=spec.num_q_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                scale=self.scale(reader, spec, layer),
                sliding_window=windows[layer],
                alibi_slopes=alibi,
                logit_softcap=softcap,
            )
            for layer in range(spec.num_layers)
        )

    def _read_ropes(
        self,
        reader: ConfigReader,
        spec: ModelSpec,
        kinds: LayerKinds,
        positions: int,
        max_len: int | None,
    ) -> tuple[tuple[RopeSpec | None, ...], int]:
        """Of each layer, and the most tokens that they serve."""
        if self.rotary is None:
            return (None,) * spec.num_layers, positions
        by_kind = {
            kind: read_rope(reader, spec.head_dim, positions, max_len, self.rotary, kind)
            for kind in sorted(set(kinds))
        }
        turned = self.rotates(reader, spec, kinds) if self.rotates else (True,) * len(kinds)
        ropes = tuple(
            by_kind[kind][0] if turns else None for kind, turns in zip(kinds, turned, strict=True)
        )
        return ropes, min(served for _, served in by_kind.values())


def _divided_head_dim(reader: ConfigReader, spec: ModelSpec) -> int:
    hidden, heads = spec.hidden_size, spec.num_q_heads
    if hidden % heads or not 1 <= hidden // heads <= MAX_HEAD_DIM:
        rule = f"a multiple of the {heads} heads, at most {MAX_HEAD_DIM} dims a head"
        raise reader.refuse("hidden_size", hidden, rule)
    return hidden // heads
