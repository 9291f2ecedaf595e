"""Profiles: what workers measure and the cost model reads, as versioned JSON files.

Nothing here measures. A profile file is one JSON object:

=============  =================================================================
``format``     always ``"fastdecode.profile"``
``version``    ``SCHEMA_VERSION``; another one is refused
``kind``       ``"s"`` (S-part on a device), ``"r"`` (R-part on a host) or
               ``"net"`` (between two hosts)
the rest       the fields of ``SProfile``, ``RProfile`` or ``NetProfile``; every field
               that has no default must be given, and no other field
=============  =================================================================

Every measurement is kept as all its repeats, in seconds, so that a reader can judge the spread.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

from msgspec import Meta, Struct, ValidationError, convert, to_builtins

from fastdecode.core.errors import ConfigError
from fastdecode.core.json_file import read_object, write_whole
from fastdecode.core.model.spec import ModelSpec

FORMAT = "fastdecode.profile"
SCHEMA_VERSION = 2
MAX_FILE_BYTES = 16 << 20
MAX_POINTS = 4096

T = TypeVar("T")
Count: TypeAlias = Annotated[int, Meta(gt=0, le=1 << 60)]
Amount: TypeAlias = Annotated[float, Meta(gt=0, le=1 << 60)]
Text: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1000)]
Series: TypeAlias = Annotated[tuple[T, ...], Meta(min_length=1, max_length=MAX_POINTS)]


class Measured(Struct, frozen=True, forbid_unknown_fields=True):
    """An object of a profile file."""


class Timing(Measured, frozen=True):
    """One quantity, measured several times."""

    seconds: Series[Amount]
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


class Point(Measured, frozen=True):
    """A time over one size: tokens in the batch, prompt tokens, or bytes."""

    size: Count
    timing: Timing


class DecodePoint(Measured, frozen=True):
    """One layer's append-then-attend of a decode step: ``num_sequences``
    queries, each over ``context_tokens`` keys."""

    num_sequences: Count
    context_tokens: Count
    timing: Timing


class Machine(Measured, frozen=True):
    """Where it was measured."""

    cpu: Text
    num_cores: Count
    memory_bytes: Count
    device: Text
    """What the measured part ran on: ``cpu``, or the GPU's name."""
    software: dict[str, str]
    """Package → version."""


class ModelShape(Measured, frozen=True):
    """What the S-part's times depend on."""

    num_layers: Count
    hidden_size: Count
    intermediate_size: Count
    num_q_heads: Count
    num_kv_heads: Count
    head_dim: Count
    vocab_size: Count
    experts: Text = "none"
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
"""Share of the best rate."""


class SProfile(Measured, frozen=True, tag_field="kind", tag="s"):
    """The S-part of one model on one device."""

    machine: Machine
    model: Text
    shape: ModelShape
    dtype: Text
    device_memory_bytes: Count
    layer: Series[Point]
    """Seconds of one layer over tokens in the batch: T(B)."""
    head: Series[Point]
    """Seconds that the S-worker spends outside the layers (embedding, final
    norm, logits, sampling), likewise."""
    step: Series[Point]
    """Seconds of a whole decode step in the engine but for what the R-workers
    computed, over tokens in the batch: the S-part, scheduling, messages, text.
    Measured with one lane, and R-workers in the same process."""
    prefill: Series[Point]
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


class RProfile(Measured, frozen=True, tag_field="kind", tag="r"):
    """The R-part of one head shape on one host."""

    machine: Machine
    num_q_heads: Count
    num_kv_heads: Count
    head_dim: Count
    kv_dtype: Text
    block_size: Count
    num_workers: Count
    """R-workers of the host, which ran at the same time: they share its memory's bandwidth."""
    num_threads: Count
    """Threads of each R-worker."""
    memory_bytes: Count
    """Bytes that the KV cache of each R-worker may take."""
    decode: Series[DecodePoint]
    """Times of the slowest R-worker; each R-worker has ``num_sequences``."""
    read_bytes_per_s: Series[Amount]
    """What one R-worker's threads can read while the others read too: the
    ceiling for ``decode``."""


class NetProfile(Measured, frozen=True, tag_field="kind", tag="net"):
    """The way between an S-worker and one R-worker."""

    machine: Machine
    transport: Text
    transfer: Series[Point]
    """Seconds one way over message bytes."""
    round_trip: Timing
    """Of a small message there and back."""
    message: Timing
    """What a small message out and its answer cost the S-worker's thread, waiting aside."""


Profile: TypeAlias = SProfile | RProfile | NetProfile


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile file, whole or not at all.

    Raises:
        ConfigError: If the path can't be written.
    """
    tree = {"format": FORMAT, "version": SCHEMA_VERSION, **to_builtins(profile)}
    text = json.dumps(tree, indent=1)
    write_whole(path, text + "\n", refuse=lambda why: ConfigError(f"the profile {path}: {why}"))


def read_profile(path: Path) -> Profile:
    """Read and check a profile file of any kind.

    Raises:
        ConfigError: If the file is missing, or not a valid profile; names the field.
    """
    tree = read_object(path, most_bytes=MAX_FILE_BYTES, refuse=partial(_broken, path))
    if tree.get("format") != FORMAT:
        raise _broken(path, f'"format" must be "{FORMAT}"')
    if tree.get("version") != SCHEMA_VERSION:
        raise _broken(
            path, f'"version" is {tree.get("version")!r}; this release reads {SCHEMA_VERSION}'
        )
    body = {name: tree[name] for name in tree if name not in ("format", "version")}
    try:
        profile: Profile = convert(body, Profile)
    except ValidationError as error:
        raise _broken(path, str(error)) from None
    return profile


def _broken(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is not a usable profile: {why}. Write it again with: fastdecode calibrate "
        f"s|r|net --out {path.name}",
        code="invalid_profile",
    )


# --- Doubts: a profile was measured on a busy machine, or is impossible

MOST_SPREAD: Final = 0.5
"""Largest spread of a time: half the distance of its quartiles, relative to its median."""
LEAST_OF_SMALLER: Final = 0.9
"""A larger size takes at least this part of what a smaller one takes."""
MOST_OF_CEILING: Final = 2.0
"""A rate of reading K and V beyond this multiple of the memory's is impossible. Below it, caches
may explain the rate."""


def doubts(profile: Profile, *, bytes_per_s: float | None = None) -> list[str]:
    """Return reasons to doubt a profile, as sentences: none on a calm machine.

    Args:
        bytes_per_s: Rate of reading K and V that the R-part's times were fitted to, if known.
    """
    found: list[str] = []
    for name, times in _series(profile):
        found += _wide(name, times)
        found += _falling(name, times)
    if isinstance(profile, RProfile) and bytes_per_s is not None:
        found += _beyond_ceiling(profile, bytes_per_s)
    return found


def _series(profile: Profile) -> Iterator[tuple[str, list[tuple[tuple[int, ...], Timing]]]]:
    if isinstance(profile, RProfile):
        yield "R-part", [((x.num_sequences, x.context_tokens), x.timing) for x in profile.decode]
    elif isinstance(profile, SProfile):
        named = (
            ("layer", profile.layer),
            ("head", profile.head),
            ("step", profile.step),
            ("prompt", profile.prefill),
        )
        for name, points in named:
            yield name, _sized(points)
    else:
        yield "transfer", _sized(profile.transfer)
        yield "round trip", [((0,), profile.round_trip)]
        yield "message", [((0,), profile.message)]


def _sized(points: Sequence[Point]) -> list[tuple[tuple[int, ...], Timing]]:
    return [((point.size,), point.timing) for point in points]


def _shown(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))


def _wide(name: str, times: Sequence[tuple[tuple[int, ...], Timing]]) -> list[str]:
    wide = [(timing.spread, size) for size, timing in times if timing.spread > MOST_SPREAD]
    if not wide:
        return []
    spread, size = max(wide)
    return [
        f"{name}: {len(wide)} of {len(times)} times spread by more than {MOST_SPREAD:.0%} (size "
        f"{_shown(size)}: {spread:.0%})"
    ]


def _falling(name: str, times: Sequence[tuple[tuple[int, ...], Timing]]) -> list[str]:
    """Find sizes that take less time than one that they exceed in every way."""
    falls = [
        (larger.median_s / smaller.median_s, a, b)
        for a, smaller in times
        for b, larger in times
        if a != b
        and all(one <= other for one, other in zip(a, b, strict=True))
        and larger.median_s < LEAST_OF_SMALLER * smaller.median_s
    ]
    if not falls:
        return []
    ratio, a, b = min(falls)
    return [f"{name}: times fall as sizes grow: {_shown(b)} takes {ratio:.2f} of {_shown(a)}'s"]


def _beyond_ceiling(profile: RProfile, bytes_per_s: float) -> list[str]:
    ceiling = sorted(profile.read_bytes_per_s)[len(profile.read_bytes_per_s) // 2]
    if bytes_per_s <= MOST_OF_CEILING * ceiling:
        return []
    return [
        f"R-part: K and V are read at {bytes_per_s / ceiling:.3g} times the read ceiling of "
        f"{ceiling / 1e9:.3g} GB/s: the times say nothing of a cached token. Measure larger "
        "--contexts and --sequences"
    ]
