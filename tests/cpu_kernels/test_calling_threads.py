"""Kernels called from many short-lived threads, whose memory the allocator gives back at once."""

from __future__ import annotations

import threading

import numpy as np

from cpu_kernels import BlockLayout, allocate_pool, append, attend

LAYOUT = BlockLayout(4, 32, "bfloat16")  # its kernel is compiled by other tests, too
NUM_SEQUENCES, NUM_TOKENS = 4, 2048


def attend_often(times: int, results: list[np.ndarray]) -> None:
    """Fill a cache and attend to it; the last result is kept."""
    rng = np.random.default_rng(0)
    blocks = NUM_SEQUENCES * NUM_TOKENS // LAYOUT.block_size
    pool = allocate_pool(LAYOUT, 1, blocks)[0]
    slots = np.arange(NUM_SEQUENCES * NUM_TOKENS, dtype=np.int64)
    k, v = (rng.integers(0, 1 << 14, (len(slots), 4, 32), np.uint16) for _ in range(2))
    append(LAYOUT, pool, k, v, slots, source="bfloat16")
    q = rng.integers(0, 1 << 14, (NUM_SEQUENCES, 12, 32), np.uint16)
    out = np.empty_like(q)
    for _ in range(times):
        attend(
            LAYOUT,
            pool,
            q,
            np.arange(blocks, dtype=np.int32).reshape(NUM_SEQUENCES, -1),
            np.arange(NUM_SEQUENCES + 1, dtype=np.int32),
            np.full(NUM_SEQUENCES, NUM_TOKENS - 1, np.int32),
            np.full(NUM_SEQUENCES, NUM_TOKENS, np.int32),
            scale=0.125,
            out=out,
            source="bfloat16",
        )
    results.append(out)


def test_every_thread_gets_the_same() -> None:
    results: list[np.ndarray] = []
    attend_often(1, results)
    for _ in range(10):
        threads = [threading.Thread(target=attend_often, args=(4, results)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 21
    assert all((out == results[0]).all() for out in results)
