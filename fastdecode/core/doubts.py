"""Doubts about a profile: it was measured on a busy machine, or is impossible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from fastdecode.core.measurement import DecodePoint, Point, Profile, RProfile, SProfile, Timing

MOST_SPREAD: Final = 0.5
"""Of a time's quartiles, relative to its median."""
LEAST_OF_SMALLER: Final = 0.9
"""A larger size takes at least this part of what a smaller one takes."""
MOST_OF_CEILING: Final = 2.0
"""A rate of reading K and V beyond so many times what memory gives is none; less
than that, caches may give."""


def doubts(profile: Profile, *, bytes_per_s: float | None = None) -> list[str]:
    """Sentences, of which none is expected on a calm machine.

    Args:
        bytes_per_s: of K and V, as the R-part's times have been fitted; None:
            not known.
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
        yield "R-part", [(_size_of(point), point.timing) for point in profile.decode]
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


def _size_of(point: DecodePoint) -> tuple[int, ...]:
    return point.num_sequences, point.context_tokens


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
    """A size that takes less time than one that it exceeds in every way."""
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
