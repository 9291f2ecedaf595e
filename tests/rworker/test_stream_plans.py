"""What goes where, and in which chunks: every layer, head and token once."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_suite import KV, RESERVED, Memory
from values import replace

from examples import examples
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import HolderId, PartId, SequenceId
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import MAX_CHUNK_BYTES
from rworker.stream.chunks import ChunkShape, layout_of
from rworker.stream.cutting import CacheKind, cut_pieces
from rworker.stream.pieces import Box, Placing, Region, redistribute
from rworker.stream.streams import expect_pieces, stream_out

LAYERS, HEADS = 5, 4


def cuts(draw: st.DrawFn, size: int) -> list[range]:
    """0 … size in consecutive ranges."""
    inner = draw(st.sets(st.integers(1, size - 1), max_size=2)) if size > 1 else set()
    bounds = [0, *sorted(inner), size]
    return [range(a, b) for a, b in pairwise(bounds)]


@st.composite
def placings(draw: st.DrawFn, lengths: dict[int, int], first_holder: int) -> Placing:
    """Sequences over a few caches: each has some layers and heads, and parts
    of sequences are on any."""
    layers, heads = cuts(draw, LAYERS), cuts(draw, HEADS)
    placing: dict[SequenceId, list[Region]] = {}
    part_ids = iter(range(1000))
    for sequence, length in lengths.items():
        parts = [(tokens, next(part_ids)) for tokens in cuts(draw, length)]
        placing[SequenceId(sequence)] = [
            Region(
                HolderId(first_holder + len(heads) * index + number),
                PartId(part),
                Box(some, several, tokens),
            )
            for (index, some), (number, several), (tokens, part) in product(
                enumerate(layers), enumerate(heads), parts
            )
        ]
    return placing


LENGTHS = st.dictionaries(st.integers(0, 50), st.integers(1, 40), min_size=1, max_size=4)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT4])
@settings(max_examples=examples(100))
@given(data=st.data(), lengths=LENGTHS, most_bytes=st.integers(2000, 20_000))
def test_what_arrives_is_what_was_there(
    dtype: DType, data: st.DataObject, lengths: dict[int, int], most_bytes: int
) -> None:
    """Between any two ways of sharing out layers, heads and tokens, with blocks
    of one size or two: streamed to the target and back to one cache."""
    kv = KVSpec(LAYERS, HEADS, 12, dtype, data.draw(st.sampled_from([4, 7])))
    whole = {
        SequenceId(s): [Region(HolderId(0), PartId(s), Box(range(LAYERS), range(HEADS), range(n)))]
        for s, n in lengths.items()
    }
    home, back = Memory(kv), Memory(kv)
    home.fill(lengths, seed=len(lengths))
    spread = data.draw(placings(lengths, 100))
    caches = {HolderId(0): home}
    for regions in spread.values():
        for region in regions:
            shape = {"num_layers": len(region.box.layers), "num_kv_heads": len(region.box.heads)}
            caches.setdefault(region.holder, Memory(replace(kv, block_size=4, **shape), 200))
    for source, target, memory in ((whole, spread, home), (spread, whole, back)):
        both = {**caches, HolderId(0): memory}
        pieces = redistribute(source, target)
        for part in {(x.target.holder, x.target.part_id) for x in pieces}:
            both[part[0]].open(int(part[1]), RESERVED)
        expect_pieces(pieces, both)
        stream_out(pieces, both, both, most_bytes)
        for cache in both.values():
            cache.books.check_invariants()
            assert not list(cache.books.arrivals), "all that was expected has come"
    for sequence, length in lengths.items():
        for one, other in zip(
            home.stored(sequence, 0, length), back.stored(sequence, 0, length), strict=True
        ):
            assert one.tobytes() == other.tobytes()


@given(
    kv=st.builds(
        KVSpec,
        st.integers(1, 80),
        st.sampled_from([1, 2, 8, 96]),
        st.sampled_from([64, 128, 256]),
        st.sampled_from(DType),
        st.sampled_from([16, 64, 256]),
    ),
    start=st.integers(0, 100),
    num_tokens=st.integers(1, 600),
)
def test_no_chunk_is_too_large_and_none_but_the_last_of_a_layer_small(
    kv: KVSpec, start: int, num_tokens: int
) -> None:
    kind = CacheKind("hash", kv)
    box = Box(range(kv.num_layers), range(kv.num_kv_heads), range(start + num_tokens))
    here, there = (Region(HolderId(i), PartId(7), box) for i in range(2))
    (piece,) = redistribute({SequenceId(0): [here]}, {SequenceId(0): [there]})
    rest = replace(piece, box=replace(box, tokens=range(start, start + num_tokens)))
    layout = layout_of(kv)
    made = list(cut_pieces([rest], kind, kind))
    sizes = [ChunkShape.of(layout, cut.request).num_bytes for cut in made]
    assert max(sizes) <= MAX_CHUNK_BYTES
    tokens = sum(int(x.request.num_tokens.sum()) * x.request.num_layers * x.request.num_heads
                 for x in made)  # fmt: skip
    assert tokens == num_tokens * kv.num_layers * kv.num_kv_heads
    assert len(sizes) <= 3 * kv.num_layers + 4 * sum(sizes) // MAX_CHUNK_BYTES


def test_plans_that_cannot_be_are_refused() -> None:
    def regions(*tokens: range, first: int = 0) -> Placing:
        boxes = [Box(range(2), range(2), some) for some in tokens]
        made = [Region(HolderId(first + i), PartId(i), box) for i, box in enumerate(boxes)]
        return {SequenceId(3): made}

    with pytest.raises(ConfigError, match=r"holder 9 is to keep .* of sequence 3"):
        redistribute(regions(range(10)), regions(range(11), first=9))
    with pytest.raises(ConfigError, match="source holders 0 and 1 both keep"):
        redistribute(regions(range(10), range(9, 11)), regions(range(11), first=9))
    assert redistribute(regions(range(10)), regions(range(10))) == (), "it is there already"


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (replace(KV, dtype=DType.INT8), "KV dtype int8 can't go to a cache of float32"),
        (replace(KV, head_dim=8), "head_dim 8 can't go to a cache of 24"),
    ],
)
def test_caches_of_other_elements_take_nothing(other: KVSpec, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        list(cut_pieces([], CacheKind("hash", other), CacheKind("hash", KV)))
    with pytest.raises(ConfigError, match="the model a can't go to a cache of b"):
        list(cut_pieces([], CacheKind("a", KV), CacheKind("b", KV)))
