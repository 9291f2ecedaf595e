"""Measuring the R-part: every size is measured once, through the real worker; what doesn't fit is
left out or refused.

Times themselves are not looked at: a fake clock ticks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError
from fastdecode.core.spec import AttentionSpec, KVSpec
from rworker.measure import (
    Effort,
    Host,
    decode_sizes,
    measure_decode,
    measure_r_part,
    measure_read_bandwidth,
)

SPEC = AttentionSpec(4, 2, 16, 0.25)
KV = KVSpec(2, 2, 16, DType.FLOAT16, 16)


def ticking() -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: float(next(ticks))


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.is_float])
def test_every_size_is_timed(num_workers: int, dtype: DType) -> None:
    sizes = [(1, 1), (3, 40), (2, 100)]
    points = measure_decode(Host(num_workers, 1), KV, (SPEC, SPEC), dtype, sizes, repeats=3)
    assert [(p.num_sequences, p.context_tokens) for p in points] == sizes
    assert all(len(p.timing.seconds) == 3 and min(p.timing.seconds) > 0 for p in points)


def test_one_layer_of_the_slowest_worker_counts() -> None:
    """A worker's clock ticks twice a layer, so a layer takes one tick, whatever
    the number of layers."""
    (point,) = measure_decode(
        Host(1, 1), KV, (SPEC, SPEC), DType.FLOAT32, [(2, 5)], repeats=2, clock=ticking()
    )
    assert point.timing.seconds == (1.0, 1.0)


def test_sizes_that_fit() -> None:
    token = KV.token_bytes
    assert decode_sizes(KV, 100 * token, (1, 2), (16, 64)) == [(1, 16), (1, 64), (2, 16)]
    assert decode_sizes(KV, 10 * token, (1, 2), (16, 64)) == []


def test_a_whole_profile() -> None:
    effort = Effort(
        sequences=(1, 2), contexts=(8, 40), repeats=2, max_kv_bytes=1 << 20, read_bytes=1 << 16
    )
    profile = measure_r_part(Host(1, 1), KV, (SPEC, SPEC), DType.BFLOAT16, 1 << 30, effort)
    assert (profile.num_q_heads, profile.num_kv_heads, profile.head_dim) == (4, 2, 16)
    assert profile.kv_dtype == "float16" and profile.block_size == 16
    assert profile.memory_bytes == 1 << 30
    assert len(profile.decode) == 4 and len(profile.read_bytes_per_s) == 6
    assert profile.machine.cpu and profile.machine.software["python"]


def test_too_little_room() -> None:
    with pytest.raises(ConfigError, match="3 are needed"):
        measure_r_part(Host(1, 1), KV, (SPEC, SPEC), DType.FLOAT32, 1, Effort(max_kv_bytes=1 << 10))


def test_read_bandwidth_counts_what_one_worker_reads() -> None:
    rates = measure_read_bandwidth(Host(2, 3), num_bytes=1 << 20, repeats=2, clock=ticking())
    assert rates == (3.0 * (1 << 20), 3.0 * (1 << 20))
