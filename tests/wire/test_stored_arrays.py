"""uint8 arrays in messages: what a KV cache stores, beside scales that only some caches have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as arrays_of
from messages_for_tests import same
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.arrays import ALIGNMENT, MAX_BODY_BYTES
from fastdecode.wire.codec import _Layout

UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True, eq=False)
class Piece:
    """As messages of KV will be."""

    layer: int
    k: Annotated[NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.uint8], "T H D"]
    v: Annotated[NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.uint8], "T H D"]
    scales: Annotated[NDArray[np.float32] | None, "T H two"]
    blocks: Annotated[NDArray[np.uint8] | None, "n block_bytes"]


LAYOUT = _Layout(Piece, 200)


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    dtype = draw(st.sampled_from([np.dtype(np.float32), np.dtype(np.uint16), UINT8]))
    tokens, heads, dim = (draw(st.integers(0, 5)) for _ in range(3))
    k, v = (draw(arrays_of(dtype, (tokens, heads, dim))) for _ in range(2))
    scales = draw(st.none() | arrays_of(np.float32, (tokens, heads, 2)))
    blocks = draw(st.none() | arrays_of(np.uint8, st.tuples(st.integers(0, 3), st.integers(0, 70))))
    return Piece(draw(st.integers(0, 99)), k, v, scales, blocks)


def read(head: bytes, body: np.ndarray) -> object:
    start = LAYOUT.read_start(head, 0, len(body))
    return LAYOUT.read(start, head).message(body)


@settings(deadline=None)
@given(piece=pieces())
def test_round_trip(piece: Piece) -> None:
    frame = LAYOUT.encode(piece, 0)
    body = np.full(frame.body_bytes, 0xA5, np.uint8)
    frame.write_body(body.data)
    assert same(read(frame.head, body), piece)


def test_odd_lengths_leave_the_next_array_aligned() -> None:
    rows = np.arange(2 * 3 * 7, dtype=np.uint8).reshape(2, 3, 7)
    piece = Piece(0, rows, rows + 1, np.ones((2, 3, 2), np.float32), np.ones((1, 65), np.uint8))
    frame = LAYOUT.encode(piece, 0)
    assert [place.start % ALIGNMENT for place in frame.start.body.places] == [0] * 4
    assert [place.stop - place.start for place in frame.start.body.places] == [42, 42, 48, 65]


def test_slices_of_bytes_travel_and_strided_bytes_do() -> None:
    rows = np.arange(10 * 2 * 8, dtype=np.uint8).reshape(10, 2, 8)
    piece = Piece(0, rows[3:5], rows[::3][:2], None, None)
    frame = LAYOUT.encode(piece, 0)
    body = np.zeros(frame.body_bytes, np.uint8)
    frame.write_body(body.data)
    assert same(read(frame.head, body), piece)


BYTES = np.zeros((2, 3, 4), np.uint8)


@pytest.mark.parametrize(
    ("piece", "match"),
    [
        (Piece(0, BYTES.view(np.int8), BYTES, None, None),
         "int8 .* where k: float32 or uint16 or uint8"),
        (Piece(0, BYTES.astype(bool), BYTES, None, None), "bool .* where k"),
        (Piece(0, BYTES, BYTES[0], None, None), r"uint8 \[3, 4\] where v"),
        (Piece(0, BYTES, BYTES[:1], None, None), "dim T of v is 1, but 2 elsewhere"),
        (Piece(0, BYTES, BYTES, BYTES, None), "uint8 .* where scales: float32"),
        (Piece(0, BYTES, BYTES, np.ones((2, 2, 2), np.float32), None),
         "dim H of scales is 2, but 3 elsewhere"),
        (Piece(0, BYTES, BYTES, None, BYTES[0].astype(np.uint16)), "uint16 .* where blocks: uint8"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_at_once(piece: Piece, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        LAYOUT.encode(piece, 0)


def test_what_a_peer_says_of_bytes_is_checked() -> None:
    words = LAYOUT.encode(Piece(0, BYTES, BYTES, None, None), 0).start.body.words
    assert words[0] == 5
    for at, value, match in (
        (0, 6, "dtype 6 where k"),
        (0, 4, "dtype int64 where k"),
        (1, 3, "dim T of v is 2, but 3 elsewhere"),
        (8, 5, "dtype uint8 where scales"),
        (12, 2, "dtype uint16 where blocks"),
    ):
        forged = (*words[:at], value, *words[at + 1 :])
        with pytest.raises(ProtocolError, match=match):
            LAYOUT.arrays.of_words(forged)


def test_bytes_count_against_the_bound_of_a_message() -> None:
    """Before any memory is taken."""
    words = (5, 1, 1, 1, 5, 1, 1, 1, 0, 0, 0, 0, 5, 1, MAX_BODY_BYTES)
    with pytest.raises(ProtocolError, match="exceed"):
        LAYOUT.arrays.of_words(words)
