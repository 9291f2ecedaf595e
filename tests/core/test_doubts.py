"""What is odd about a profile."""

from __future__ import annotations

import pytest

from fastdecode.core.doubts import doubts
from fastdecode.core.measurement import DecodePoint, Machine, NetProfile, Point, RProfile, Timing

MACHINE = Machine("a CPU", 2, 1 << 30, "cpu", {"numpy": "2"})
CALM = (1.0, 1.01, 1.02)


def timing(median_s: float, spread: tuple[float, ...] = CALM) -> Timing:
    return Timing(tuple(median_s * each for each in spread))


def r_part(*decode: DecodePoint, ceiling: float = 1e10) -> RProfile:
    return RProfile(MACHINE, 8, 8, 64, "bfloat16", 64, 1, 1, 1 << 30, decode, (ceiling,))


def net(*transfer: Point) -> NetProfile:
    return NetProfile(MACHINE, "MPI", transfer, timing(1e-5), timing(1e-6))


def test_a_calm_machines_profile_is_not_doubted() -> None:
    points = [DecodePoint(n, c, timing(n * c * 1e-8)) for n in (1, 4) for c in (64, 256)]
    assert doubts(r_part(*points), bytes_per_s=1.5e10) == []
    assert doubts(net(Point(8, timing(1e-5)), Point(64, timing(0.95e-5)))) == []


def test_spreads_over_half_are_named() -> None:
    wide = Point(64, timing(2e-5, (0.2, 1.0, 3.0)))
    (said,) = doubts(net(Point(8, timing(1e-5)), wide))
    assert "transfer: 1 of 2 times spread by more than 50% (size 64: 70%)" in said


def test_times_that_fall_as_sizes_grow_are_named() -> None:
    decode = [
        DecodePoint(1, 64, timing(1e-5)),
        DecodePoint(4, 64, timing(5e-5)),
        DecodePoint(1, 256, timing(3e-5)),
        DecodePoint(4, 256, timing(2e-5)),
    ]
    (said,) = doubts(r_part(*decode))
    assert "times fall as sizes grow: 4 x 256 takes 0.40 of 4 x 64's" in said


@pytest.mark.parametrize(("times", "num"), [(1.9, 0), (30.0, 1), (float("inf"), 1)])
def test_a_rate_far_beyond_the_read_ceiling_is_named(times: float, num: int) -> None:
    profile = r_part(DecodePoint(1, 64, timing(1e-5)), ceiling=1e10)
    found = doubts(profile, bytes_per_s=times * 1e10)
    assert len(found) == num and all("the read ceiling of 10 GB/s" in each for each in found)
