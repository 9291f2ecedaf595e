"""Numbers with units."""

from __future__ import annotations

import pytest

from cost_model.printing import times_text


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ((0.0123, 0.5, 0.98765), "12.3/500/988 ms"),
        ((0.2, 1.0, 34.56), "0.2/1/34.6 s"),
        ((None, None), "-/- ms"),
        ((None, 2.0), "-/2 s"),
    ],
)
def test_times_share_a_unit(times: tuple[float | None, ...], text: str) -> None:
    assert times_text(times) == text
