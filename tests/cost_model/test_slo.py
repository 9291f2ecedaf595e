"""Limits as typed, and the two attainments."""

from __future__ import annotations

import pytest

from cost_model.goodput.slo import RequestTimes, Slo
from fastdecode.core.errors import ConfigError


def times(*pairs: tuple[float, float | None]) -> list[RequestTimes]:
    return [RequestTimes(0.0, ttft_s, tpot_s) for ttft_s, tpot_s in pairs]


def test_units() -> None:
    assert Slo.parse("ttft=400ms, tpot=0.04s", 0.9) == Slo(0.4, 0.04, 0.9)
    assert Slo.parse("tpot=500us,ttft=1.5s", 0.5) == Slo(1.5, 0.0005, 0.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft=400,tpot=40ms", "units are s, ms and us"),
        ("ttft=400ms", "give both"),
        ("ttft=1s,ttft=2s", "'ttft=2s' is not like"),
        ("ttft=0ms,tpot=1s", "ttft must be a time above 0"),
        ("ttft=-1s,tpot=1s", "'ttft=-1s' is not like"),
    ],
)
def test_refusals(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Slo.parse(text, 0.9)


def test_one_limit_alone() -> None:
    slo = Slo.parse("tpot=40ms", needs_both=False)
    assert slo.is_met_by(RequestTimes(0.0, 1e9, 0.04))
    assert not slo.is_met_by(RequestTimes(0.0, 0.0, 0.05))


def test_both_limits_together_or_each_by_itself() -> None:
    # Each limit is broken by one request of ten, not by the same.
    requests = times(*[(0.1, 0.01)] * 8, (0.9, 0.01), (0.1, 0.09))
    slo = Slo(0.4, 0.04, 0.9)
    assert slo.share(requests) == 0.8 and not slo.is_attained(requests, "both")
    assert slo.is_attained(requests, "each")
    assert slo.quantiles(requests) == pytest.approx((0.18, 0.018)), "interpolated"


def test_at_the_limit() -> None:
    requests = times((0.4, 0.04), (0.4, None))
    slo = Slo(0.4, 0.04, 1.0)
    assert slo.share(requests) == 1.0 and slo.is_attained(requests, "both")
    assert not slo.is_attained(requests, "each"), "strictly below"


def test_one_token_keeps_any_tpot_and_nobody_any_limit() -> None:
    assert Slo(1.0, 1e-9, 1.0).is_attained(times((0.5, None)), "both")
    assert Slo(1.0, 1e-9, 1.0).share([]) == 1.0


def test_three_tenths_of_ten_are_three() -> None:
    requests = times(*[(0.1, 0.01)] * 3, *[(9.0, 0.01)] * 7)
    assert Slo(1.0, 1.0, 0.1 + 0.2).is_attained(requests, "both"), "0.30000000000000004 is 0.3"


def test_what_distserve_asks() -> None:
    assert Slo.parse("chatbot", 0.9) == Slo(0.25, 0.1, 0.9)
    assert Slo.parse("code-completion", 0.9) == Slo(0.125, 0.2, 0.9)
    assert Slo.parse("summarisation", 0.9) == Slo(15.0, 0.15, 0.9)
    with pytest.raises(ConfigError, match="Or name one of chatbot, chatbot-66b"):
        Slo.parse("chat", 0.9)
