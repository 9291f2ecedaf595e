"""Traces of every form, and what is broken in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cost_model.traces import read_any_trace
from fastdecode.core.errors import ConfigError

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
def test_reads(
    tmp_path: Path, text: str, form: str, requests: list[tuple[float, int, int]], num_left_out: int
) -> None:
    path = tmp_path / "trace"
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
        ("a,b\n1,2\n", "line 1 isn't JSON"),
        ('{"x": 1}\n', "line 1: neither a server's log nor a trace"),
        (SERVER + '{"time": "now", "prompt_tokens": 1, "output_tokens": 1}', "time='now' is not"),
        (
            SERVER + '{"time": 1, "prompt_tokens": -4, "output_tokens": 3}',
            "prompt_tokens=-4 is not",
        ),
        (SERVER + '{"time": 1, "prompt_tokens": "x"}', "prompt_tokens='x' is not a whole number"),
        (SERVER + '{"time": 1, "prompt', "line 5 isn't JSON"),
        (SERVER + "[1]\n", "line 5 isn't a JSON object"),
        (OWN.replace("arrival_s", "arrival_step"), "arrivals are steps; a plan needs arrival_s"),
        (OWN.replace('"num_prompt_tokens": 5', '"num_prompt_tokens": 0'), "line 3: num_prompt"),
        ('{"time": 1, "status": 429}', "with a prompt"),
    ],
)
def test_refuses(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_any_trace(path)


def test_a_line_without_end(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(json.dumps({"time": 1, "status": 200}) + " " * (2 << 20))
    with pytest.raises(ConfigError, match="line 1: a trace has at most"):
        read_any_trace(path)
