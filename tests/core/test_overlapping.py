"""Against seconds that are counted one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastdecode.core.overlapping import Overlapping


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), max_size=60))
def test_seconds_count_once(each: list[tuple[int, int]]) -> None:
    end_s, found, covered = 0, Overlapping(), set[int]()
    total_s = 0.0
    for later_s, seconds in each:
        end_s += later_s
        total_s += found.over(float(end_s), float(seconds))
        covered |= set(range(end_s - seconds, end_s))
        assert total_s == len(covered)
