"""Rotary position embedding as numbers: which frequencies turn which part of a
head (arXiv 2104.09864)."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from fastdecode.core.errors import UnsupportedModelError
from fastdecode.core.model.config_reader import ConfigReader

RopeKind: TypeAlias = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]

MAX_POSITIONS = 1 << 27

_KINDS: dict[str, RopeKind] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}
_LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
_KNOWN = frozenset((
    "rope_type", "type", "rope_theta", "rotary_emb_base", "partial_rotary_factor", "rotary_pct",
    "rotary_dim", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "truncate", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor",
    "short_factor", "long_factor",
    "mrope_interleaved",  # the order of sections, which are the same for text
    "finetuned",  # YaRN's first code: how the checkpoint was made
))  # fmt: skip
"""Keys that a kind of scaling reads, or that change nothing; ``RotaryRules.keys`` has more."""


@dataclass(frozen=True)
class RopeSpec:
    """The first ``2 * num_frequencies`` dims of every q and k head turn by ``position *
    frequency``.

    ``dynamic`` scaling is decided by each token's own position p: it turns as it would in a
    sequence of exactly p + 1 tokens. So a token's q and k never depend on what else is in the
    batch, on chunking, or on what comes later. Within the original length this is what every
    implementation computes, and beyond it what decoding token by token with a cache computes; it
    differs only for *prompts* longer than the original length, which others turn as a whole.

    ``longrope`` has two sets of factors, for texts up to the original length and for longer ones.
    A cache can't switch midway, so the model's length limit chooses once: long factors only if
    more than the original length is asked for."""

    kind: RopeKind
    theta: float
    dim: int
    """Dims of a head that turn, as the frequencies' formula has it; if odd, one more turns."""
    original_max_len: int  # tokens that the model was trained with, before scaling
    factor: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()  # divisor of each frequency, for longrope

    @property
    def num_frequencies(self) -> int:
        return (self.dim + 1) // 2


@dataclass(frozen=True)
class RotaryRules:
    """What a family means by silence, and where it differs from others."""

    theta: float = 10000.0
    partial: float = 1.0  # share of a head's dims that turn
    is_phi3: bool = False
    """Phi-3 keeps its original length beside the scaling, and calls longrope "su" or "yarn"."""
    keys: tuple[str, ...] = ()
    """Keys of the scaling that this family alone reads: ``alpha`` (``dynamic`` scaling with
    one fixed base), ``llama_4_scaling_beta``, ``mrope_section`` (sections of a head turn by
    time, height and width of an image's patch, which are the same for text)."""
    scales_local: bool = True  # layers with a window are scaled as others are
    local_theta: float | None = None
    """Of layers with a window that aren't; ``rope_local_base_freq`` has
    precedence. None: what all have."""


def read_rope(
    config: ConfigReader,
    head_dim: int,
    max_positions: int,
    max_len: int | None,
    rules: RotaryRules,
    kind: str = "full_attention",
) -> tuple[RopeSpec, int]:
    """The rotary part of ``config.json``, in the old style (``rope_theta``, ``rope_scaling``) or
    the new one (``rope_parameters``, which may have an entry for each kind of layer). Where both
    are, the old one counts.

    Args:
        max_positions: ``max_position_embeddings``.
        max_len: the length limit that was asked for, if any; chooses longrope's factors.
        kind: of the layer, as ``layer_types`` has it.

    Returns:
        The spec, and the most tokens that the scaled embedding serves.

    Raises:
        UnsupportedModelError: the scaling is none of ours.
        CheckpointError: a field is missing or out of range.
    """
    rope, is_own = _find_rope(config, kind)
    if kind == "sliding_attention" and not rules.scales_local and not is_own:
        local = config.optional_number("rope_local_base_freq") or rules.local_theta
        theta = rope.optional_number("rope_theta") if local is None else local
        rope = ConfigReader({"rope_theta": theta}, config.where)
    return _read_one(config, rope, head_dim, max_positions, max_len, rules)


def _read_one(
    config: ConfigReader,
    rope: ConfigReader,
    head_dim: int,
    max_positions: int,
    max_len: int | None,
    rules: RotaryRules,
) -> tuple[RopeSpec, int]:
    _refuse_unknown_keys(rope, (*_KNOWN, *rules.keys))
    kind = _read_kind(rope, rules)
    given = {name: value for name, value in rope.fields.items() if value is not None}
    shared = ConfigReader({**config.fields, **given}, rope.where)
    theta = shared.number("rope_theta", "rotary_emb_base", default=rules.theta)
    if theta <= 1:
        raise rope.refuse("rope_theta", theta, "a number above 1")
    dim = _turning_dims(shared, head_dim, rules.partial)
    alpha = rope.optional_number("alpha", high=1e9) if kind == "dynamic" else None
    if kind == "dynamic" and dim <= 2:
        raise rope.refuse("head_dim", head_dim, "such that more than 2 dims turn")
    if alpha is not None:
        kind, theta = "default", theta * alpha ** (dim / (dim - 2))
    base = RopeSpec(kind, theta, dim, max_positions)
    match kind:
        case "default":
            return base, max_positions
        case "linear" | "dynamic":
            factor = _factor(rope)
            served = min(int(max_positions * factor), MAX_POSITIONS)
            return replace(base, factor=factor), served
        case "llama3":
            return _llama3(config, rope, base), max_positions
        case "yarn":
            return _yarn(config, rope, base)
        case "longrope":
            default = 4096 if rules.is_phi3 else max_positions
            return _longrope(config, rope, base, max_len, default=default)


def _turning_dims(rope: ConfigReader, head_dim: int, default: float) -> int:
    part = rope.optional_number("partial_rotary_factor", "rotary_pct", high=1.0)
    if part is None:
        dim = rope.optional_integer("rotary_dim", high=head_dim) or int(head_dim * default)
        part = dim / head_dim
    else:
        dim = int(head_dim * part)
    if dim < 1 or dim + dim % 2 > head_dim:
        evenly = f"such that an even part of a head's {head_dim} dims turns"
        raise rope.refuse("partial_rotary_factor", part, evenly)
    return dim


def _find_rope(config: ConfigReader, kind: str) -> tuple[ConfigReader, bool]:
    """The scaling of layers of this kind, and whether it is theirs alone."""
    for name in ("rope_scaling", "rope_parameters"):
        found = config.mapping(name)
        if found is None or not found.fields:
            continue
        if any(own in found.fields for own in _LAYER_KINDS):
            _refuse_unknown_keys(found, (*_KNOWN, *_LAYER_KINDS))
            return found.mapping(kind) or ConfigReader({}, found.where), True
        return found, False
    return ConfigReader({}, config.where), False


def _refuse_unknown_keys(rope: ConfigReader, known: Collection[str]) -> None:
    if unknown := rope.unknown(known):
        raise UnsupportedModelError(
            f"{rope.where}: {unknown[0]!r} isn't known for this family's rotary embedding, and "
            "leaving it out could give wrong text. Use a checkpoint without it."
        )


def _read_kind(rope: ConfigReader, rules: RotaryRules) -> RopeKind:
    name = rope.string("rope_type", "type", default="default")
    if rules.is_phi3 and name == "yarn":
        name = "longrope"
    if "mrope_section" in rules.keys and name == "mrope":
        name = "default"
    if name not in _KINDS:
        raise UnsupportedModelError(
            f"{rope.where}: RoPE scaling {name!r} is not supported. Supported are "
            f"{', '.join(sorted(_KINDS))}."
        )
    return _KINDS[name]


def _factor(rope: ConfigReader, default: float | None = None) -> float:
    return rope.number("factor", high=1e6, default=default)


def _original_max_len(config: ConfigReader, rope: ConfigReader, default: int) -> int:
    """A field beside the scaling has precedence over one within it."""
    name = "original_max_position_embeddings"
    reader = config if config.fields.get(name) is not None else rope
    return reader.integer(name, low=2, high=MAX_POSITIONS, default=default)


def _llama3(config: ConfigReader, rope: ConfigReader, base: RopeSpec) -> RopeSpec:
    low, high = rope.number("low_freq_factor", high=1e6), rope.number("high_freq_factor", high=1e6)
    if high < low:
        raise rope.refuse("high_freq_factor", high, f"low_freq_factor ({low:g}) or more")
    original = _original_max_len(config, rope, base.original_max_len)
    return replace(
        base, original_max_len=original, factor=_factor(rope), low_freq_factor=low,
        high_freq_factor=high,
    )  # fmt: skip


def _yarn(config: ConfigReader, rope: ConfigReader, base: RopeSpec) -> tuple[RopeSpec, int]:
    """arXiv 2309.00071."""
    original = _original_max_len(config, rope, base.original_max_len)
    factor = _factor(rope, default=base.original_max_len / original)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = rope.optional_number("attention_factor", high=1e6)
    if attention_factor is None:
        top = rope.optional_number("mscale", high=1e6)
        bottom = rope.optional_number("mscale_all_dim", high=1e6)
        attention_factor = mscale(top) / mscale(bottom) if top and bottom else mscale(1.0)
    spec = replace(
        base, original_max_len=original, factor=factor, attention_factor=attention_factor,
        beta_fast=rope.number("beta_fast", high=1e6, default=32.0),
        beta_slow=rope.number("beta_slow", high=1e6, default=1.0),
        truncate=rope.flag("truncate", True),
    )  # fmt: skip
    return spec, min(max(base.original_max_len, int(original * factor)), MAX_POSITIONS)


def _longrope(
    config: ConfigReader, rope: ConfigReader, base: RopeSpec, max_len: int | None, *, default: int
) -> tuple[RopeSpec, int]:
    """arXiv 2402.13753."""
    max_positions = base.original_max_len
    original = min(_original_max_len(config, rope, default), max_positions)
    factor = _factor(rope, default=max_positions / original)
    attention_factor = rope.optional_number("attention_factor", high=1e6)
    if attention_factor is None:
        attention_factor = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        )
    short = rope.numbers("short_factor", base.num_frequencies, high=1e6)
    long = rope.numbers("long_factor", base.num_frequencies, high=1e6)
    use_long = max_len is not None and max_len > original
    spec = replace(
        base, original_max_len=original, factor=factor, attention_factor=attention_factor,
        frequency_factors=long if use_long else short,
    )  # fmt: skip
    return spec, max_positions if use_long else original
