"""The time in which anything was fetched."""

from __future__ import annotations

from fastdecode.engine.transfers import FetchingTime


def test_moments_in_which_several_were_fetched_count_once() -> None:
    time = FetchingTime()
    assert time.add(3.0, 2.0) == 2.0  # 1 to 3
    assert time.add(4.0, 2.0) == 1.0  # 2 to 4
    assert time.add(6.0, 1.0) == 1.0  # 5 to 6
    assert time.add(10.0, 8.0) == 5.0, "2 to 10: that from 4 to 5, and from 6 on"
    assert time.add(12.0, 12.0) == 3.0, "0 to 12: the first second, and the last two"
