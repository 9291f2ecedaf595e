"""Traces and time tables: what is read, and what is refused by name."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.simulate import Table, TabledTimes
from cost_model.traces import read_any_trace, read_trace
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.simulation.trace import TracedRequest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_reads_requests_in_order_of_arrival(path: Path) -> None:
    path.write_text(
        '{"num_prompt_tokens": 5, "num_output_tokens": 7, "arrival_s": 2.5}\n'
        "\n"
        '{"num_prompt_tokens": 1, "num_output_tokens": 2, "max_tokens": 9, "arrival_s": 0.5}\n'
        '{"num_prompt_tokens": 3, "num_output_tokens": 4}\n'
    )
    trace = read_trace(path)
    assert trace.unit == "s"
    assert trace.requests == (
        TracedRequest(3, 4, 4, 0),
        TracedRequest(1, 2, 9, 0.5),
        TracedRequest(5, 7, 7, 2.5),
    )
    assert trace.mean_output_tokens == pytest.approx(13 / 3)


def test_arrivals_may_be_steps(path: Path) -> None:
    path.write_text('{"num_prompt_tokens": 5, "num_output_tokens": 7, "arrival_step": 3}')
    trace = read_trace(path)
    assert trace.unit == "step" and trace.requests[0].arrival == 3


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "line 1: Input data was truncated"),
        ("[1]", "line 1: Expected `object`, got `array`"),
        ('{"num_prompt_tokens": 5}', "missing required field `num_output_tokens`"),
        ('{"num_prompt_tokens": 0, "num_output_tokens": 1}', r"`int` >= 1 - at `\$.num_prompt"),
        ('{"num_prompt_tokens": true, "num_output_tokens": 1}', r"`\$.num_prompt_tokens`"),
        ('{"num_prompt_tokens": 1, "num_output_tokens": 1e9}', r"`\$.num_output_tokens`"),
        ('{"num_prompt_tokens": 1, "num_output_tokens": 5, "max_tokens": 4}', "max_tokens=4 of"),
        ('{"num_prompt_tokens": 1, "num_output_tokens": 5, "arrival_s": -1}', r"`\$.arrival_s`"),
        ('{"num_prompt_tokens": 1, "num_output_tokens": 5, "arrival_s": NaN}', "line 1: .*JSON"),
        ('{"num_prompt_tokens": 1, "num_output_tokens": 5, "prompt": 1}', "unknown field `prompt`"),
        ('{"num_prompt_tokens": 1, "num_output_tokens": 5' + " " * 70000 + "}", "65536 bytes"),
        ("", "holds no requests"),
        (
            '{"num_prompt_tokens": 1, "num_output_tokens": 1, "arrival_s": 1}\n'
            '{"num_prompt_tokens": 1, "num_output_tokens": 1, "arrival_step": 1}',
            "choose one",
        ),
    ],
)
def test_a_bad_line_is_named(path: Path, line: str, text: str) -> None:
    path.write_text(line)
    with pytest.raises(ConfigError, match=text):
        read_trace(path)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.jsonl"):
        read_trace(tmp_path / "nope.jsonl")


SERVER = """
{"time": 1700000000.5, "status": 429, "route": "/v1/completions"}
{"time": 1700000003.5, "status": 200, "prompt_tokens": 7, "output_tokens": 5, "ttft_s": 0.1}
{"time": 1700000002.0, "status": 200, "prompt_tokens": 9, "output_tokens": 3, "ttft_s": 0.1}
"""
OWN = """
{"num_prompt_tokens": 4, "num_output_tokens": 2, "arrival_s": 3.5}
{"num_prompt_tokens": 5, "num_output_tokens": 3, "max_tokens": 9, "arrival_s": 2}
"""


@pytest.mark.parametrize(
    ("text", "form", "requests", "num_left_out"),
    [(SERVER, "server", [(0, 9, 3), (1.5, 7, 5)], 1), (OWN, "own", [(0, 5, 3), (1.5, 4, 2)], 0)],
    ids=lambda each: each if isinstance(each, str) and each.isalpha() else "",
)
def test_reads_logs_and_own_lines(
    path: Path, text: str, form: str, requests: list[tuple[float, int, int]], num_left_out: int
) -> None:
    path.write_text(text)
    read = read_any_trace(path)
    assert (read.form, read.num_left_out) == (form, num_left_out)
    found = [(r.arrival, r.num_prompt_tokens, r.num_output_tokens) for r in read.trace.requests]
    assert [each[1:] for each in found] == [each[1:] for each in requests]
    assert [each[0] for each in found] == pytest.approx([each[0] for each in requests], abs=1e-5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no requests"),
        ("a,b\n1,2\n", "line 1: .*malformed"),
        ('{"x": 1}\n', "line 1: neither a server's log nor a trace"),
        (
            SERVER + '{"time": "now", "prompt_tokens": 1, "output_tokens": 1}',
            r"line 5: .*`\$.time`",
        ),
        (SERVER + '{"time": 1, "prompt_tokens": -4, "output_tokens": 3}', r"`\$.prompt_tokens`"),
        (SERVER + '{"time": 1, "prompt_tokens": "x"}', r"got `str` - at `\$.prompt_tokens`"),
        (SERVER + '{"time": 1, "prompt', "line 5: Input data was truncated"),
        (SERVER + "[1]\n", "line 5: Expected `object`"),
        (OWN.replace("arrival_s", "arrival_step"), "arrivals are steps; a plan needs arrival_s"),
        ('{"time": 1, "status": 429}', "with a prompt"),
    ],
)
def test_a_bad_log_is_named(path: Path, text: str, says: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_any_trace(path)


def test_tables_interpolate_and_go_on() -> None:
    table = Table.parse("10:1,20:2,40:3", option="--s-time")
    assert [table(size) for size in (0, 10, 15, 20, 30, 40, 60)] == [1, 1, 1.5, 2, 2.5, 3, 4]
    assert Table.parse("0.5", option="--s-time")(123) == 0.5
    assert Table.parse("0.5", option="--r-time", rate=True)(10) == 5


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.floats(0, 10)),
        min_size=1,
        max_size=8,
        unique_by=lambda p: p[0],
    )
)
def test_tables_never_fall(points: list[tuple[int, float]]) -> None:
    sizes, seconds = sorted(p[0] for p in points), sorted(p[1] for p in points)
    table = Table(tuple(zip(map(float, sizes), seconds, strict=True)))
    values = [table(size) for size in range(150)]
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(values))
    assert all(
        table(size) == pytest.approx(value) for size, value in zip(sizes, seconds, strict=True)
    )


@pytest.mark.parametrize(
    "text", ["", "x", "1:2,1:3", "2:1,1:1", "1:2,2:1", "1:-1", "1:nan", "1:2:3", "inf"]
)
def test_a_bad_table_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"table"):
        Table.parse(text, option="--s-time")


def test_r_workers_may_differ() -> None:
    slow, fast = (Table.parse(rate, option="--r-time", rate=True) for rate in ("2e-3", "1e-3"))
    times = TabledTimes(Table(((0, 0.1),)), (slow, fast))
    assert (times.s_part_s(7), times.r_part_s(0, 10), times.r_part_s(1, 10)) == (0.1, 0.02, 0.01)
