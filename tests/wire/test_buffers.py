"""The buffer pool: what is lent is never lent twice, and what is free is used again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.codec import ALIGNMENT


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 4097, 1 << 20])
def test_buffers_are_aligned_and_of_the_size_asked_for(num_bytes: int) -> None:
    buffer = BufferPool().take(num_bytes)
    assert buffer.shape == (num_bytes,) and buffer.dtype == np.uint8
    assert num_bytes == 0 or buffer.ctypes.data % ALIGNMENT == 0


def test_a_buffer_is_lent_until_its_last_view_is_gone() -> None:
    pool = BufferPool()
    first = pool.take(5000)
    address = first.ctypes.data
    view = np.ndarray((10, 10), np.float32, first, 64)[3:]
    row = view[2]
    del first, view
    assert pool.take(5000).ctypes.data != address
    del row
    assert pool.take(5000).ctypes.data == address


def test_free_buffers_of_one_size_serve_all_sizes_up_to_it() -> None:
    pool = BufferPool()
    address = pool.take(8000).ctypes.data
    assert [pool.take(n).ctypes.data for n in (4097, 8192, 5000)] == [address] * 3


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1 << 14)), max_size=40))
@settings(deadline=None)
def test_what_is_lent_never_overlaps(moves: list[tuple[bool, int]]) -> None:
    pool = BufferPool(idle_bytes=1 << 15)
    lent: list[np.ndarray] = []
    for take, number in moves:
        if take or not lent:
            buffer = pool.take(number)
            assert not any(np.shares_memory(buffer, other) for other in lent)
            lent.append(buffer)
        else:
            lent.pop(number % len(lent))


def test_free_memory_beyond_the_bound_is_let_go() -> None:
    pool = BufferPool(idle_bytes=1 << 20)
    keep = [pool.take(1 << 19) for _ in range(4)]
    assert pool.num_bytes == 1 << 21
    del keep
    pool.take(1 << 12)
    assert pool.num_bytes <= 1 << 20
