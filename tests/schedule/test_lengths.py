"""Forecasts of lengths: bounded, learnt, and conditional on how far a sequence has got."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.schedule.lengths import LearntLengths


def sequence(num_generated: int, max_tokens: int, params: SamplingParams | None = None) -> Sequence:
    request = Request("r", (1, 2, 3), params or SamplingParams(), max_tokens, seed=0)
    made = Sequence(0, request, 0)
    made.token_ids.extend([0] * num_generated)
    return made


def test_learns_mean_and_quantile_of_those_that_got_as_far() -> None:
    lengths = LearntLengths(0.75, min_observed=4)
    assert lengths.safe(sequence(0, 500)) == 500
    for length in (10, 20, 30, 40, 100, 200, 300, 400):
        lengths.observe(sequence(length, 500))
    assert lengths.safe(sequence(0, 500)) == 200
    assert lengths.expected(sequence(0, 500)) == round(1100 / 8)
    assert lengths.expected(sequence(0, 60)) == 60
    # Of those longer than 40: 100, 200, 300, 400.
    assert lengths.safe(sequence(40, 500)) == 300
    assert lengths.expected(sequence(40, 500)) == 250
    assert lengths.safe(sequence(100, 500)) == 500, "three are too few"


def test_without_a_quantile_only_the_load_is_forecast() -> None:
    lengths = LearntLengths(min_observed=2)
    for length in (10, 20):
        lengths.observe(sequence(length, 500))
    assert (lengths.expected(sequence(0, 500)), lengths.safe(sequence(0, 500))) == (15, 500)


def test_the_length_of_what_only_max_tokens_can_end_is_known() -> None:
    lengths = LearntLengths(0.5, min_observed=2)
    for length in (10, 20):
        lengths.observe(sequence(length, 500))
    known = sequence(0, 500, SamplingParams(ignore_eos=True))
    assert lengths.expected(known) == lengths.safe(known) == 500
    stopped = sequence(0, 500, SamplingParams(ignore_eos=True, stop=("x",)))
    assert (lengths.expected(stopped), lengths.safe(stopped)) == (15, 10)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 50), max_size=60),
    st.floats(0.01, 1.0),
    st.integers(1, 8),
    st.integers(0, 59),
)
def test_forecasts_lie_between_now_and_max_tokens(
    seen: list[int], quantile: float, min_observed: int, num_generated: int
) -> None:
    lengths = LearntLengths(quantile, window=20, min_observed=min_observed)
    for length in seen:
        lengths.observe(sequence(length, 60))
    now = sequence(num_generated, 60)
    for forecast in (lengths.expected(now), lengths.safe(now)):
        assert num_generated < forecast <= 60
    longer = sorted(length for length in seen[-20:] if length > num_generated)
    if len(longer) >= min_observed:
        within = sum(length <= lengths.safe(now) for length in longer)
        assert within >= quantile * len(longer)


def test_a_first_guess_serves_until_enough_is_known() -> None:
    lengths = LearntLengths(0.9, min_observed=2, first_guess=100)
    assert lengths.safe(sequence(0, 5000)) == lengths.expected(sequence(0, 5000)) == 100
    assert lengths.safe(sequence(99, 5000)) == 100 and lengths.safe(sequence(100, 5000)) == 200
    assert lengths.safe(sequence(900, 1000)) == 1000 and lengths.safe(sequence(0, 30)) == 30
    for length in (10, 20):
        lengths.observe(sequence(length, 5000))
    assert lengths.safe(sequence(0, 5000)) == 20 and lengths.safe(sequence(20, 5000)) == 100
    endless = SamplingParams(ignore_eos=True)
    assert lengths.safe(sequence(0, 5000, endless)) == 5000
