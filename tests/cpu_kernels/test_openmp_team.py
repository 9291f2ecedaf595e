"""Kernels on the threads of torch's OpenMP runtime, and called from many threads: the same
results, to the bit, as on threads of our own."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from cpu_kernels import BlockLayout, allocate_pool, append, attend
from cpu_kernels.team import OpenMPTeam
from sworker.kernels.threads import openmp_library

LAYOUT = BlockLayout(4, 32, "bfloat16")  # its kernel is compiled by other tests, too
LENGTHS = np.array([1, 700, 64, 2500, 33], np.int32)
Q_HEADS = 12


def results(team: OpenMPTeam | None) -> np.ndarray:
    """Fill a cache and attend to it."""
    rng = np.random.default_rng(0)
    num_blocks = -(-LENGTHS // LAYOUT.block_size)
    pool = allocate_pool(LAYOUT, 1, int(num_blocks.sum()))[0]
    tables = np.zeros((len(LENGTHS), num_blocks.max()), np.int32)
    for table, first, count in zip(
        tables, np.cumsum(num_blocks) - num_blocks, num_blocks, strict=True
    ):
        table[:count] = np.arange(first, first + count)
    slots = np.concatenate(
        [
            np.arange(table[0] * LAYOUT.block_size, table[0] * LAYOUT.block_size + n)
            for table, n in zip(tables, LENGTHS, strict=True)
        ]
    )
    k, v = (rng.integers(0, 1 << 14, (len(slots), 4, 32), np.uint16) for _ in range(2))
    append(LAYOUT, pool, k, v, slots.astype(np.int64), source="bfloat16", num_threads=2, team=team)
    q = rng.integers(0, 1 << 14, (len(LENGTHS), Q_HEADS, 32), np.uint16)
    out = np.zeros_like(q)
    starts = np.arange(len(LENGTHS) + 1, dtype=np.int32)
    attend(
        LAYOUT, pool, q, tables, starts, LENGTHS - 1, LENGTHS,
        scale=0.125, out=out, source="bfloat16", num_threads=2, team=team,
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def team() -> OpenMPTeam:
    library = openmp_library()
    assert library is not None, "this torch has no OpenMP"
    return OpenMPTeam(2, library)


def test_results_are_the_same(team: OpenMPTeam) -> None:
    expected = results(None)
    assert expected.any()
    for _ in range(5):
        torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # a region of torch's own in between
        assert (results(team) == expected).all()


@pytest.mark.parametrize("is_in_a_team", [False, True])
def test_any_thread_may_call(is_in_a_team: bool, team: OpenMPTeam) -> None:
    """Also short-lived ones, whose memory the allocator gives back at once."""
    found = [results(None)]

    def run() -> None:
        found.append(results(team if is_in_a_team else None))

    for _ in range(5):
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 21 and all((out == found[0]).all() for out in found)


def test_refuses_what_is_no_runtime() -> None:
    with pytest.raises(OSError, match="isn't an OpenMP runtime"):
        OpenMPTeam(2, "libc.so.6")
    with pytest.raises(OSError):
        OpenMPTeam(2, "/no/such/library.so")
    with pytest.raises(ValueError, match="num_threads=0"):
        OpenMPTeam(0, "libc.so.6")
