"""What workers measure and the cost model reads: profiles, as versioned JSON
files.

Workers fill these dataclasses; ``cost_model`` fits them; nothing here measures.
A profile file is one JSON object:

=============  =================================================================
``format``     always ``"fastdecode.profile"``
``version``    ``SCHEMA_VERSION``; another one is refused
``kind``       ``"s"`` (S-part on a device), ``"r"`` (R-part on a host) or
               ``"net"`` (between two hosts)
the rest       the fields of ``SProfile``, ``RProfile`` or ``NetProfile`` below,
               nested objects for nested dataclasses, arrays for tuples; no
               field without a default may be missing, none may be added
=============  =================================================================

Every measurement is kept as all its repeats, in seconds, so that a reader can
judge the spread.
"""

from __future__ import annotations

import json
import math
import statistics
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

from fastdecode.core.errors import ConfigError
from fastdecode.core.json_file import read_object, write_whole
from fastdecode.core.model.spec import ModelSpec

FORMAT = "fastdecode.profile"
SCHEMA_VERSION = 2
MAX_FILE_BYTES = 16 << 20
MAX_POINTS = 4096

T = TypeVar("T")


@dataclass(frozen=True)
class Timing:
    """One quantity, measured several times."""

    seconds: tuple[float, ...]
    """Every repeat."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def calm_s(self) -> float:
        """What it takes when little disturbs it: a tenth of the repeats were
        faster. For machines that are shared."""
        if len(self.seconds) < 2:
            return self.seconds[0]
        return statistics.quantiles(self.seconds, n=10, method="inclusive")[0]

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / self.median_s


@dataclass(frozen=True)
class Point:
    """A time over one size: tokens in the batch, prompt tokens, or bytes."""

    size: int
    timing: Timing


@dataclass(frozen=True)
class DecodePoint:
    """One layer's append-then-attend of a decode step: ``num_sequences``
    queries, each over ``context_tokens`` keys."""

    num_sequences: int
    context_tokens: int
    timing: Timing


@dataclass(frozen=True)
class Machine:
    """Where it was measured."""

    cpu: str
    num_cores: int
    memory_bytes: int
    device: str
    """What the measured part ran on: ``cpu``, or the GPU's name."""
    software: dict[str, str]
    """Package → version."""


@dataclass(frozen=True)
class ModelShape:
    """What the S-part's times depend on."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    experts: str = "none"
    """Which layers have experts, how many, and of what size."""

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelShape:
        return cls(
            spec.num_layers,
            spec.hidden_size,
            spec.intermediate_size,
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.vocab_size,
            _experts_text(spec),
        )

    def __str__(self) -> str:
        experts = "" if self.experts == "none" else f", experts {self.experts}"
        return (
            f"{self.num_layers} layers, hidden {self.hidden_size}, MLP {self.intermediate_size}, "
            f"{self.num_q_heads}/{self.num_kv_heads} heads of {self.head_dim}, vocabulary "
            f"{self.vocab_size}{experts}"
        )


def _experts_text(spec: ModelSpec) -> str:
    moe = spec.moe
    if moe is None:
        return "none"
    num_layers = sum(map(spec.has_experts, range(spec.num_layers)))
    shared = f", shared {moe.shared_inner}" if moe.shared_inner else ""
    return f"{moe.top_k} of {moe.num_experts} with {moe.inner}{shared} in {num_layers} layers"


ENOUGH: Final = 0.95
"""Of the best rate."""


@dataclass(frozen=True)
class SProfile:
    """The S-part of one model on one device."""

    machine: Machine
    model: str
    shape: ModelShape
    dtype: str
    device_memory_bytes: int
    layer: tuple[Point, ...]
    """Seconds of one layer over tokens in the batch: T(B)."""
    head: tuple[Point, ...]
    """Seconds that the S-worker spends outside the layers (embedding, final
    norm, logits, sampling), likewise."""
    step: tuple[Point, ...]
    """Seconds of a whole decode step in the engine but for what the R-workers
    computed, over tokens in the batch: the S-part, scheduling, messages, text.
    Measured with one lane, and R-workers in the same process."""
    prefill: tuple[Point, ...]
    """Seconds of one prompt over its tokens, its own attention included."""
    prompt_attention: Literal["s", "r"]
    """Who attended those prompts, as is the default beside this device: ``s``,
    the S-worker, and its layers alone were timed; or ``r``, R-workers in the
    same process, and it was the prompt's whole way through the engine."""

    @property
    def batch_tokens(self) -> int:
        """The fewest prompt tokens of which nearly as many run a second as of
        any number: with more at once each prompt only waits longer."""
        rates = {point.size: point.size / point.timing.median_s for point in self.prefill}
        enough = ENOUGH * max(rates.values())
        return min(size for size, rate in rates.items() if rate >= enough)


@dataclass(frozen=True)
class RProfile:
    """The R-part of one head shape on one host."""

    machine: Machine
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    block_size: int
    num_workers: int
    """R-workers of the host, which ran at the same time: they share its memory's bandwidth."""
    num_threads: int
    """Of each R-worker."""
    memory_bytes: int
    """That the KV cache of each R-worker may take."""
    decode: tuple[DecodePoint, ...]
    """Of the slowest R-worker, each with so many sequences."""
    read_bytes_per_s: tuple[float, ...]
    """What one R-worker's threads can read while the others read too: the
    ceiling for ``decode``."""


@dataclass(frozen=True)
class NetProfile:
    """The way between an S-worker and one R-worker."""

    machine: Machine
    transport: str
    transfer: tuple[Point, ...]
    """Seconds one way over message bytes."""
    round_trip: Timing
    """Of a small message there and back."""
    message: Timing
    """What a small message out and its answer cost the S-worker's thread, waiting aside."""


Profile: TypeAlias = SProfile | RProfile | NetProfile
_KINDS: dict[str, type[Profile]] = {"s": SProfile, "r": RProfile, "net": NetProfile}


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile file, whole or not at all.

    Raises:
        ConfigError: the path can't be written.
    """
    kind = next(kind for kind, cls in _KINDS.items() if isinstance(profile, cls))
    text = json.dumps(
        {"format": FORMAT, "version": SCHEMA_VERSION, "kind": kind, **asdict(profile)}, indent=1
    )
    write_whole(path, text + "\n", refuse=lambda why: ConfigError(f"the profile {path}: {why}"))


def read_profile(path: Path) -> Profile:
    """Read and check a profile file of any kind.

    Raises:
        ConfigError: there is no such file, or it isn't a valid profile; names
            the field and what it must be.
    """
    tree = read_object(path, most_bytes=MAX_FILE_BYTES, refuse=partial(_broken, path))
    if tree.get("format") != FORMAT:
        raise _broken(path, f'"format" must be "{FORMAT}"')
    if tree.get("version") != SCHEMA_VERSION:
        raise _broken(
            path, f'"version" is {tree.get("version")!r}; this release reads {SCHEMA_VERSION}'
        )
    kind = _KINDS.get(str(tree.get("kind")))
    if kind is None:
        raise _broken(
            path, f'"kind" is {tree.get("kind")!r}; it must be one of {", ".join(_KINDS)}'
        )
    body = {
        name: value for name, value in tree.items() if name not in ("format", "version", "kind")
    }
    try:
        profile = _decode(kind, body, "")
    except _MismatchError as mismatch:
        raise _broken(path, str(mismatch)) from None
    assert isinstance(profile, kind)
    return profile


def _broken(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a usable profile: {why}. Write it again with: fastdecode calibrate "
        f"s|r|net --out {path.name}",
        code="invalid_profile",
    )


class _MismatchError(Exception):
    """Where and how a JSON tree differs from its dataclass."""


def _decode(kind: Any, value: object, where: str) -> object:
    """A JSON value as ``kind``, a dataclass, tuple[X, ...], dict[str, str],
    Literal of strings, int, float or str."""
    origin = typing.get_origin(kind)
    if is_dataclass(kind):
        return _decode_object(typing.cast(type, kind), value, where)
    if origin is tuple:
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_POINTS:
            raise _MismatchError(f"{where} must be a list of 1 to {MAX_POINTS} items")
        item = typing.get_args(kind)[0]
        return tuple(_decode(item, each, f"{where}[{i}]") for i, each in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
            raise _MismatchError(f"{where} must be an object of strings")
        return dict(value)
    if origin is Literal:
        if value not in typing.get_args(kind):
            raise _MismatchError(f"{where} must be one of {', '.join(typing.get_args(kind))}")
        return value
    if kind is str:
        if not isinstance(value, str) or not 0 < len(value) <= 1000:
            raise _MismatchError(f"{where} must be a string")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _MismatchError(f"{where} must be a number")
    if not (math.isfinite(value) and 0 < value <= 1 << 60):
        raise _MismatchError(f"{where} is {value}; it must be above 0 and sane")
    if kind is int and not isinstance(value, int):
        raise _MismatchError(f"{where} must be a whole number")
    return value if kind is int else float(value)


def _decode_object(kind: type[T], value: object, where: str) -> T:
    if not isinstance(value, Mapping):
        raise _MismatchError(f"{where or 'the file'} must be an object")
    hints = typing.get_type_hints(kind)
    lead = f"{where}." if where else ""
    defaults = {field.name: field.default for field in fields(typing.cast(Any, kind))}
    for name, default in defaults.items():
        if name not in value and default is MISSING:
            raise _MismatchError(f'"{lead}{name}" is missing')
    unknown = sorted(set(value) - set(defaults))
    if unknown:
        raise _MismatchError(f'"{lead}{unknown[0]}" is not a field of version {SCHEMA_VERSION}')
    return kind(**{name: _decode(hints[name], value[name], lead + name) for name in value})
