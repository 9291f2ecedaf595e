"""Traces of every form, and what is broken in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cost_model.traces import read_any_trace
from fastdecode.core.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46.6805900,20000,5000
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,"API log, failed"
"""
BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type
5.5,a,0.1,ChatGPT,472,18,Conversation log
"""
SPLITWISE = """request_id,request_type,arrival_timestamp,batch_size,prompt_size,token_size
0,2,0.25,1,1024,64
1,2,0.75,1,2048,32
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46]}
"""
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
    [
        (AZURE, "azure", [(0, 374, 44), (4.314579, 396, 109), (60, 20000, 5000)], 0),
        (AZURE_2024, "azure", [(0, 2162, 5), (0.99007, 2399, 6)], 0),
        (BURSTGPT, "burstgpt", [(0, 472, 18), (40, 1087, 230)], 1),
        (BURSTGPT_3, "burstgpt", [(0, 472, 18)], 0),
        (SPLITWISE, "splitwise", [(0, 1024, 64), (0.5, 2048, 32)], 0),
        (MOONCAKE, "mooncake", [(0, 6955, 52), (3.053, 6472, 26)], 0),
        (SERVER, "server", [(0, 9, 3), (1.5, 7, 5)], 1),
        (OWN, "own", [(0, 5, 3), (1.5, 4, 2)], 0),
    ],
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
        ("a,b\n1,2\n", r"line 1: a trace of no known form \(own, server, mooncake"),
        ('{"x": 1}\n', "line 1: a trace of no known form"),
        (AZURE + "yesterday,5,5\n", "line 5: TIMESTAMP='yesterday' is no time"),
        (AZURE + "2023-11-16 18:17:00,5\n", "line 5: 2 columns, but the first line names 3"),
        (SPLITWISE + "2,2,1.0,1,-4,3\n", "line 4: prompt_size='-4' is not a whole number"),
        (MOONCAKE + '{"timestamp": 1, "input_length"', "line 3 isn't JSON"),
        (MOONCAKE + "[1]\n", "line 3 isn't a JSON object"),
        (BURSTGPT.replace("18,490", "x,490"), "line 2: Response tokens='x'"),
        (OWN.replace("arrival_s", "arrival_step"), "arrivals are steps; a plan needs arrival_s"),
        (OWN.replace('"num_prompt_tokens": 5', '"num_prompt_tokens": 0'), "line 3: num_prompt"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,7\n", "with a prompt"),
    ],
)
def test_refuses(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_any_trace(path)


def test_a_line_without_end(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(
        json.dumps({"timestamp": 1, "input_length": 2, "output_length": 3}) + " " * (2 << 20)
    )
    with pytest.raises(ConfigError, match="line 1: a trace has at most"):
        read_any_trace(path)
