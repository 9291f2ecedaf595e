"""Percentiles of the last minute, and the server's own history, on a virtual clock."""

from __future__ import annotations

import pytest

from fastdecode.server.client import OpenRequests
from fastdecode.server.link import StatusReport
from fastdecode.server.metrics import MOST_SAMPLES, MOST_VALUES, Lately, Metrics, SampleHistory


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
    lately = Lately()
    for value in range(MOST_VALUES + 1):
        lately.observe(1.0, value)
    assert lately.quantiles(1.0, 0.0, 1.0) == [1, MOST_VALUES]


def seen(num_running: int, kv_used: int = 0) -> StatusReport:
    workers = [{"name": "r0", "kv_blocks": 8, "kv_blocks_used": kv_used}]
    return StatusReport(state="ready", num_running=num_running, figures={"r_workers": workers})


def test_sample_is_taken_every_two_seconds_with_the_rate_since_the_last() -> None:
    history = SampleHistory()
    for half_seconds in range(13):  # as the engine reports
        now_s = half_seconds / 2
        history.note(now_s, 100 * now_s, seen(half_seconds, kv_used=4))
    columns = history.columns(6.0)
    assert columns["tokens_per_s"] == [0.0, 100.0, 100.0, 100.0]
    assert columns["num_running"] == [0, 4, 8, 12] and columns["kv_used"] == [0.5] * 4
    assert (columns["every_s"], columns["kept"]) == (2.0, MOST_SAMPLES)
    assert history.columns(6.5) == columns, "a second browser, or a reload, sees the same"


def test_history_has_gaps_where_the_engine_did_not_report() -> None:
    history = SampleHistory()
    assert history.columns(100.0)["num_running"] == [], "nothing is known before the first sample"
    history.note(0.0, 0, seen(1))
    history.note(6.0, 60, seen(2))
    assert history.columns(7.0)["num_running"] == [1, None, None, 2]
    assert history.columns(7.0)["tokens_per_s"][-1] == 10.0, "a rate over the gap"
    assert history.columns(10.0)["num_running"] == [1, None, None, 2, None]
    history.note(1000.0, 60, seen(3))
    assert history.columns(1000.0)["num_running"] == [None] * (MOST_SAMPLES - 1) + [3]


def test_a_finished_request_is_measured_as_it_was() -> None:
    metrics = Metrics(64)
    opened = OpenRequests([], metrics)
    opened.accepted_s, opened.first_s = 100.0, 100.0137
    metrics.first_token(opened)
    assert metrics.lately_ttft.quantiles(101.0, 0.5) == [pytest.approx(0.0137)]
    assert metrics.lately_ttft.quantiles(161.0, 0.5) == [None]
