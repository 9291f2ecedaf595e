"""Steady batches: what is predicted for them, and the twins that stand in for
plans too large for a machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sizing import setup

from cost_model.steady import SteadyBatch, predict_steady, scale_down


def test_a_steady_step_has_the_context_and_no_prompts() -> None:
    layers, s = 32, setup(prompt=100, output=500).system()
    predicted = predict_steady(s, SteadyBatch(64, 1, 4, 700))
    assert predicted["s_part_s"] == pytest.approx(layers * s.s.t_of_b(64))
    assert predicted["r_part_s"] == pytest.approx(layers * s.r.r_s(16, 16 * 700))
    assert predicted["step_s"] > predicted["s_part_s"] + predicted["r_part_s"], (
        "one lane: nothing overlaps"
    )
    assert predicted["tokens_per_s"] == pytest.approx(64 / predicted["step_s"])


@given(
    st.integers(1, 5000), st.integers(1, 4), st.integers(1, 200), st.integers(1, 100_000),
    st.integers(1, 64), st.integers(100, 10**6), st.booleans(),
)  # fmt: skip
def test_twins_fit(
    batch: int, lanes: int, sockets: int, context: int, cores: int, kv_tokens: int, one_lane: bool
) -> None:
    planned = SteadyBatch(batch, lanes, sockets, context)
    twin = scale_down(planned, cores=cores, kv_tokens=kv_tokens, max_batch=64, one_lane=one_lane)
    assert 1 <= twin.r_workers <= min(sockets, cores)
    assert twin.r_workers <= twin.batch and 1 <= twin.lanes <= (1 if one_lane else lanes)
    assert twin.context_tokens <= max(16, context)
    assert twin.batch * twin.context_tokens <= max(kv_tokens, 16 * twin.r_workers)
