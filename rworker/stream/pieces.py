"""Which part of K and V goes from which cache to which, when the same sequences
are to be kept in another way: other layers, heads, tokens to a cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest
from math import prod
from typing import TypeAlias

from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import HolderId, PartId, SequenceId


@dataclass(frozen=True)
class Box:
    """Layers, KV heads and tokens; ranges of step 1."""

    layers: range
    heads: range
    tokens: range

    @property
    def sides(self) -> tuple[range, range, range]:
        return self.layers, self.heads, self.tokens

    @property
    def volume(self) -> int:
        return prod(map(len, self.sides))

    def common(self, other: Box) -> Box:
        """What is in both; perhaps nothing."""
        both = zip(self.sides, other.sides, strict=True)
        return Box(*[range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in both])

    def within(self, outer: Box) -> Box:
        """The same, counted from where ``outer`` begins."""
        both = zip(self.sides, outer.sides, strict=True)
        return Box(*[range(a.start - b.start, a.stop - b.start) for a, b in both])


@dataclass(frozen=True)
class Region:
    """What one cache keeps of a sequence."""

    holder: HolderId
    part_id: PartId
    """The sequence, as the holder calls it."""
    box: Box
    """Of the model and the whole sequence."""


Placing: TypeAlias = Mapping[SequenceId, Sequence[Region]]
"""Where sequences are: of each, regions that don't overlap."""


@dataclass(frozen=True)
class Piece:
    """K and V that one cache has and another is to get."""

    source: Region
    target: Region
    box: Box
    """Of the model and the whole sequence, as in both regions."""

    @property
    def at_source(self) -> Box:
        """As the source counts."""
        return self.box.within(self.source.box)

    @property
    def at_target(self) -> Box:
        """As the target counts."""
        return self.box.within(self.target.box)


def redistribute(source: Placing, target: Placing) -> tuple[Piece, ...]:
    """All that has to be sent so that sequences which are kept as ``source``
    says are kept as ``target`` says. What stays where it is isn't sent.

    Raises:
        ConfigError: regions overlap, or the target is to keep what nobody has.
    """
    pieces: list[Piece] = []
    for sequence, regions in target.items():
        present = source.get(sequence, ())
        for placing, named in ((present, "source"), (regions, "target")):
            _check_apart(sequence, placing, named)
        for region in regions:
            pieces += _pieces_of(sequence, region, present)
    return tuple(pieces)


def turns(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Pieces in an order in which tokens of each part come one after the other:
    the first lot has the first tokens of every part, and so on."""
    of_part: dict[tuple[HolderId, PartId], dict[int, list[Piece]]] = {}
    for piece in pieces:
        starts = of_part.setdefault((piece.target.holder, piece.target.part_id), {})
        starts.setdefault(piece.box.tokens.start, []).append(piece)
    in_order = [[starts[start] for start in sorted(starts)] for starts in of_part.values()]
    lots = zip_longest(*in_order, fillvalue=[])
    return [[piece for some in lot for piece in some] for lot in lots]


def _pieces_of(sequence: SequenceId, target: Region, present: Iterable[Region]) -> Iterable[Piece]:
    """That make up one region."""
    common = [(region, region.box.common(target.box)) for region in present]
    num_found = sum(box.volume for _, box in common)
    if num_found < target.box.volume:
        raise ConfigError(
            f"holder {target.holder} is to keep {target.box} of sequence {sequence}, of which "
            f"{num_found} of {target.box.volume} layers x heads x tokens are anywhere"
        )
    return [
        Piece(region, target, box)
        for region, box in common
        if box.volume and not _stays(region, target)
    ]


def _stays(source: Region, target: Region) -> bool:
    """Whether what is in both lies in the same place."""
    starts = [[side.start for side in region.box.sides] for region in (source, target)]
    same_part = (source.holder, source.part_id) == (target.holder, target.part_id)
    return same_part and starts[0] == starts[1]


def _check_apart(sequence: SequenceId, regions: Iterable[Region], named: str) -> None:
    for one, other in combinations(regions, 2):
        if one.box.common(other.box).volume:
            raise ConfigError(
                f"of sequence {sequence}, {named} holders {one.holder} and {other.holder} both "
                f"keep {one.box.common(other.box)}"
            )
