"""Percentiles of the last minute, and the server's own history, on a virtual clock."""

from __future__ import annotations

import pytest

from fastdecode.server.client import OpenRequests
from fastdecode.server.messages import StatusReport
from fastdecode.server.observations import Observations
from fastdecode.server.recent import Lately, SampleHistory


def test_percentiles_are_of_values_that_were_observed() -> None:
    lately = Lately()
    assert lately.quantiles(0.0, 0.5, 0.99) == [None, None]
    for number in range(1, 101):
        lately.observe(0.1 * number, 0.0137 * number)
    assert lately.quantiles(10.0, 0.5, 0.99) == [pytest.approx(0.685), pytest.approx(1.3563)]
    lately.observe(10.0, 0.5)
    assert Lately().quantiles(0.0, 0.0) == [None]


def test_what_is_older_than_a_minute_counts_no_more() -> None:
    lately = Lately()
    lately.observe(0.0, 9.0)
    lately.observe(30.0, 0.25)
    assert lately.quantiles(59.9, 0.5, 0.99) == [0.25, 9.0]
    assert lately.quantiles(60.0, 0.5, 0.99) == [0.25, 0.25]
    assert lately.quantiles(90.0, 0.5) == [None], "nothing was measured in the last minute"


def test_a_minute_of_many_values_keeps_the_latest() -> None:
    lately = Lately(most=3)
    for value in (1.0, 2.0, 3.0, 4.0):
        lately.observe(1.0, value)
    assert lately.num(1.0) == 3 and lately.quantiles(1.0, 0.0, 1.0) == [2.0, 4.0]


def test_a_sample_is_taken_every_so_often_and_says_the_rate_between_two() -> None:
    history = SampleHistory(every_s=2.0, kept=5)
    for half_seconds in range(13):  # as the engine says how it is
        now_s = half_seconds / 2
        history.note(now_s, 100 * now_s, num_running=half_seconds, num_waiting=0, kv_used=0.5)
    columns = history.columns(6.0)
    assert columns["tokens_per_s"] == [0.0, 100.0, 100.0, 100.0]
    assert columns["num_running"] == [0, 4, 8, 12] and columns["kv_used"] == [0.5] * 4
    assert (columns["every_s"], columns["kept"]) == (2.0, 5)


def test_where_the_engine_said_nothing_there_is_a_gap() -> None:
    history = SampleHistory(every_s=2.0, kept=5)
    assert history.columns(100.0)["num_running"] == [], "nothing is known before the first sample"
    history.note(0.0, 0, 1, 0, 0.0)
    history.note(6.0, 60, 2, 0, 0.0)
    assert history.columns(7.0)["num_running"] == [1, None, None, 2]
    assert history.columns(7.0)["tokens_per_s"][-1] == 10.0, "a rate over the gap"
    assert history.columns(10.0)["num_running"] == [1, None, None, 2, None]
    history.note(1000.0, 60, 3, 0, 0.0)
    assert history.columns(1000.0)["num_running"] == [None] * 4 + [3]


def test_two_browsers_see_the_same_and_a_reload_loses_nothing() -> None:
    observed = Observations(64)
    workers = [{"name": "r0", "kv_blocks": 8, "kv_blocks_used": 2}]
    for second in range(20):
        observed.generation_tokens.add(5)
        observed.see(
            float(second),
            StatusReport(state="ready", num_running=3, figures={"r_workers": workers}),
        )
    first, second_ = observed.history.columns(19.5), observed.history.columns(19.5)
    assert first == second_ and first["num_running"] == [3] * 10 and first["kv_used"] == [0.25] * 10
    assert first["tokens_per_s"][1:] == [5.0] * 9


def test_a_finished_request_is_measured_as_it_was() -> None:
    observed = Observations(64)
    opened = OpenRequests([], observed)
    opened.accepted_s, opened.first_s = 100.0, 100.0137
    observed.first_token(opened)
    assert observed.lately_ttft.quantiles(101.0, 0.5) == [pytest.approx(0.0137)]
    assert observed.lately_ttft.quantiles(161.0, 0.5) == [None]
