"""A workload fitted to a trace, and drawn again."""

from __future__ import annotations

import numpy as np
import pytest

from cost_model.goodput.workload import (
    Lengths,
    drawn,
    drawn_from,
    fit_trace,
    lengths_of,
    replayed,
    unit_gaps,
)
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.simulation.trace import RequestTrace, TracedRequest

SEED = 10  # of 10,000 gaps with cv 4, the mean itself is uncertain by 4 %


def trace(num: int, rate: float, cv: float, seed: int = 0) -> RequestTrace:
    times = [0.0, *np.cumsum(unit_gaps(num - 1, cv, seed)) / rate]
    return RequestTrace(
        tuple(
            TracedRequest(100 + 10 * (i % 50), 10 + i % 50, 60, at_s)
            for i, at_s in enumerate(times)
        )
    )


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 4.0])
def test_recovers_what_was_drawn(cv: float) -> None:
    gaps_seen = 10_000
    fit = fit_trace(trace(gaps_seen, 3.0, cv, seed=SEED))
    assert fit.rate == pytest.approx(3.0, rel=0.02) and fit.cv == pytest.approx(
        cv, rel=0.05, abs=1e-9
    )
    assert not fit.warnings
    drawn_again = drawn_from(lengths_of(trace(2000, 3.0, cv)), fit.cv, gaps_seen, seed=SEED + 1)
    requests = (TracedRequest(p, o, o, at_s) for at_s, p, o in drawn_again.at(3.0))
    assert fit_trace(RequestTrace(tuple(requests))).cv == pytest.approx(cv, rel=0.05, abs=1e-9)
    assert np.corrcoef(np.array(drawn_again.lengths).T)[0, 1] == pytest.approx(1.0)


def test_warns_of_short_traces_and_of_those_without_times() -> None:
    fit = fit_trace(RequestTrace((TracedRequest(5, 5, 5), TracedRequest(6, 5, 5))))
    assert fit.rate is None
    assert any("only 2 requests" in warning for warning in fit.warnings)
    assert any("give --rate" in warning for warning in fit.warnings)


def test_the_same_requests_at_every_rate() -> None:
    draw = drawn_from(lengths_of(trace(500, 3.0, 1.0)), 1.0, 300, seed=5)
    slow, fast = draw.at(1.0), draw.at(4.0)
    assert [each[1:] for each in slow] == [each[1:] for each in fast]
    assert [each[0] for each in slow] == pytest.approx([4 * each[0] for each in fast])
    assert draw == drawn_from(lengths_of(trace(500, 3.0, 1.0)), 1.0, 300, seed=5)
    assert draw != drawn_from(lengths_of(trace(500, 3.0, 1.0)), 1.0, 300, seed=6)


def test_replay_keeps_gaps_and_order() -> None:
    original = trace(50, 2.0, 3.0)
    found = replayed(original).at(1 / float(np.diff([r.arrival for r in original.requests]).mean()))
    assert [each[0] for each in found] == pytest.approx([r.arrival for r in original.requests])
    assert [each[1] for each in found] == [r.num_prompt_tokens for r in original.requests]
    with pytest.raises(ConfigError, match="replay: all requests of the trace arrive at once"):
        replayed(RequestTrace((TracedRequest(5, 5, 5),) * 3))


def test_lengths_without_a_trace() -> None:
    draw = drawn(Lengths.parse("prompt_len", "512"), Lengths(200, 0.8), 1.0, 20_000, seed=1)
    assert {prompt for prompt, _ in draw.lengths} == {512}
    outputs = np.array([output for _, output in draw.lengths])
    assert outputs.mean() == pytest.approx(200, rel=0.03) and outputs.min() >= 1
    assert np.log(outputs).std() == pytest.approx(0.8, rel=0.05)
    assert Lengths.parse("output_len", "lognormal:200,0.8") == Lengths(200, 0.8)


@pytest.mark.parametrize(
    "text", ["", "x", "0", "lognormal:5", "normal:5,1", "5,1", "lognormal:5,9"]
)
def test_refuses_lengths(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a length: give tokens like 512"):
        Lengths.parse("prompt_len", text)
