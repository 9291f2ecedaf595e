"""Step events: the trace file is sound whatever happens to it, and tells what the engine did."""

from __future__ import annotations

import io
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdecode import LLM, SamplingParams
from fastdecode.core.errors import ConfigError
from fastdecode.engine.stats import LatencyHistogram
from fastdecode.measure.chrome_trace import ChromeTrace, open_trace
from fastdecode.measure.summary import render, summarise
from fastdecode.schedule.times import MeasuredTimes

LAYERS = 3


def read(raw: bytes) -> list[dict[str, Any]]:
    """As viewers read it: the closing bracket, or what follows the last whole
    event, may be missing."""
    if not raw.endswith(b"]\n"):
        raw = raw[: raw.rindex(b"\n")].rstrip(b",") + b"]"
    events: list[dict[str, Any]] = json.loads(raw)
    return events


def spans_by_row(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return rows


def assert_apart(spans: list[tuple[float, float]]) -> None:
    ordered = sorted(spans)
    for (_, end), (start, _) in itertools.pairwise(ordered):
        assert start >= end - 0.2  # both are rounded to 0.1


def tell(trace: ChromeTrace, num_steps: int) -> None:
    for step in range(num_steps):
        trace.s_part(0, step, 0, 10 + step, 10.1 + step)
        trace.attended(1, 0, step, 0, 10.1 + step, 10.6 + step, 0.3)
        trace.load(10.7 + step, 1, 2, 30 + step)


def test_a_trace_is_json_and_stays_readable_when_it_is_torn() -> None:
    out = io.BytesIO()
    trace = ChromeTrace(out, start_s=10)
    tell(trace, 2)
    torn = out.getvalue()
    trace.close()
    whole = json.loads(out.getvalue())
    assert [event for event in whole if event["ph"] == "X"][:2] == [
        {"ph": "X", "name": "S 0", "pid": 1, "tid": 1, "ts": 0, "dur": 100000, "args": {"step": 0}},
        {
            "ph": "X", "name": "L0", "pid": 2, "tid": 1, "ts": 100000, "dur": 300000,
            "args": {"step": 0, "lane": 0, "round_trip_us": 500000},
        },
    ]  # fmt: skip
    assert {
        "ph": "C",
        "name": "cached tokens W",
        "pid": 1,
        "ts": 1700000,
        "args": {"W": 31},
    } in whole
    for size in range(40, len(torn)):
        events = read(torn[:size])
        assert events == whole[: len(events)]
        assert len(events) == torn[:size].count(b",\n")


def test_an_r_workers_spans_never_overlap() -> None:
    """Two answers that lay unread are told at the same time; the worker
    computed one after the other."""
    out = io.BytesIO()
    trace = ChromeTrace(out, start_s=0)
    trace.attended(0, 0, 1, 0, sent_s=1.0, arrived_s=5.0, compute_s=2.0)
    trace.attended(0, 1, 2, 0, sent_s=1.5, arrived_s=5.0, compute_s=1.0)
    trace.attended(0, 0, 1, 1, sent_s=6.0, arrived_s=7.0, compute_s=0.5)
    assert list(spans_by_row(read(out.getvalue())).values()) == [
        [(1e6, 3e6), (3e6, 4e6), (6e6, 6.5e6)]
    ]


def test_a_trace_ends_at_its_greatest_size_and_is_whole() -> None:
    out = io.BytesIO()
    trace = ChromeTrace(out, start_s=10, max_bytes=5000)
    tell(trace, 1000)
    trace.close()
    assert json.loads(out.getvalue())[-1]["name"] == "end"
    assert 4000 < len(out.getvalue()) < 5200


def test_a_trace_that_cant_be_written_ends_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell() > 500:
                raise OSError(28, "No space left on device")
            return super().write(data)

    trace = ChromeTrace(Full(), start_s=10)
    tell(trace, 100)
    trace.close()
    assert caplog.text.count("No space left on device") == 1


def test_a_bad_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no/dir"), open_trace(tmp_path / "no" / "dir"):
        pass


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_a_run_tells_every_step_of_every_lane_and_worker(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, num_lanes: int
) -> None:
    model = str(tiny_checkpoint("llama"))
    options = {"r_workers": 2, "r_threads": 1, "kv_memory_gb": 0.01, "lanes": num_lanes}
    prompts = [[5, 6, 7], [8, 9], [10], [11] * 6]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(model, **options) as llm:
        untraced = llm.generate(prompts, params)
    with open_trace(tmp_path / "t.json") as trace, LLM(model, trace=trace, **options) as llm:
        assert llm.generate(prompts, params) == untraced
        num_steps, load_peak = llm.stats.num_steps, llm.stats.load_peak
    events = read((tmp_path / "t.json").read_bytes())
    named = defaultdict(set)
    for event in events:
        if event["ph"] == "X" and event["name"] != "wait":
            named[event["args"]["step"]].add(event["name"])
    assert len(named) == num_steps
    expected = {"logits", "sample"} | {
        f"{part}{layer}" for part in ("S ", "L") for layer in range(LAYERS)
    }
    assert all(names == expected for names in named.values())
    rows = spans_by_row(events)
    assert {row for process, row in rows if process == 1} == {0, *range(1, num_lanes + 1)}
    assert {row for process, row in rows if process == 2} == {0, 1}
    assert_apart([span for (process, _), spans in rows.items() if process == 1 for span in spans])
    for process, row in rows:
        assert_apart(rows[process, row])
    loads = [event["args"]["W"] for event in events if event["name"] == "cached tokens W"]
    assert len(loads) == num_steps
    assert max(loads) == load_peak


@pytest.mark.parametrize(
    ("options", "num", "says"),
    [
        ({"r_workers": 2}, 4, ("waiting for R-workers and other stages", "each with 2 R-worker(s)",
                               "the busiest of 2 R-worker(s)")),
        ({"kv_placement": "gpu"}, 0, ("waiting for other stages", "its device; the times")),
    ],
)  # fmt: skip
def test_the_summary_counts_r_workers_of_all_stages(
    options: dict[str, Any], num: int, says: tuple[str, ...], tiny_checkpoint: Callable[..., Path]
) -> None:
    model = str(tiny_checkpoint("llama"))
    with LLM(model, dtype="float32", kv_memory_gb=0.01, r_threads=1, pp=2, **options) as llm:
        llm.generate([[5, 6]], SamplingParams(max_tokens=3))
        assert llm.snapshot().engine.workers == (num, num)
        summary = summarise(llm, started_s=0.0, num_requests=1, num_failed=0)
    assert summary["r_workers"] == num and 0 <= summary["r_idle"] <= 1
    for words in says:
        assert words in render(summary), render(summary)


def test_load_and_latencies_are_counted(tiny_checkpoint: Callable[..., Path]) -> None:
    with LLM(str(tiny_checkpoint("llama")), dtype="float32", kv_memory_gb=0.01) as llm:
        empty = summarise(llm, started_s=0.0, num_requests=0, num_failed=0)
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        stats, summary = llm.stats, summarise(llm, started_s=0.0, num_requests=1, num_failed=0)
        llm.generate([[5, 6, 7]] * 2, SamplingParams(n=2, max_tokens=1))
    assert empty["ttft_s"] == {"p50": None, "p90": None, "p99": None}
    assert "-" in render(empty)
    # The prompt's three tokens, then one more a step: 3, 4, 5, 6.
    assert (summary["load_mean_tokens"], summary["load_peak_tokens"]) == (4.5, 6)
    assert 0 < summary["r_idle"] < 1
    assert summary["s_idle"] == summary["wait_share"]
    assert 0 < summary["tpot_s"]["p50"] < summary["decode_s"]
    assert (len(stats.ttft), len(stats.tpot)) == (5, 1)  # a sequence of one token has no TPOT


def test_step_times_are_learnt_though_a_prompt_runs_in_every_step(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """With a large batch there is hardly a step without one."""
    num_pure = 0

    class Times(MeasuredTimes):
        def observe(self, num_decoding: int, num_prompt_tokens: int, *rest: Any) -> None:
            nonlocal num_pure
            num_pure += num_prompt_tokens == 0
            super().observe(num_decoding, num_prompt_tokens, *rest)

    times = Times()
    options = {"kv_memory_gb": 0.01, "max_num_sequences": 32, "r_workers": 2, "lanes": 2}
    with LLM(str(tiny_checkpoint("llama")), times=times, **options) as llm:
        prompts = [[5 + i % 7] * (2 + i % 5) for i in range(480)]
        llm.generate(
            prompts, [SamplingParams(max_tokens=2 + i % 4, ignore_eos=True) for i in range(480)]
        )
    assert num_pure < 32  # too few to learn from
    assert times.s_part_s(4) > 0
    assert all(times.r_part_s(worker, 1000) > 0 for worker in range(2))


@given(
    st.lists(st.floats(1e-6, 1e5), min_size=1, max_size=200), st.sampled_from([1, 50, 90, 99, 100])
)
def test_percentiles_are_within_one_percent_of_the_nearest_rank(
    durations: list[float], percent: int
) -> None:
    histogram = LatencyHistogram()
    for duration in durations:
        histogram.add(duration)
    exact = float(np.sort(durations)[math.ceil(len(durations) * percent / 100) - 1])
    shown = histogram.percentile(percent)
    assert shown is not None
    assert shown == pytest.approx(exact, rel=0.0101)


def test_durations_out_of_range_are_clamped() -> None:
    histogram = LatencyHistogram()
    assert histogram.percentile(50) is None
    for duration in (0.0, -1.0, 1e9):
        histogram.add(duration)
    assert len(histogram) == 3
    assert histogram.percentile(50) == pytest.approx(1e-6, rel=0.02)
    assert histogram.percentile(100) == pytest.approx(1e6, rel=0.02)
