"""Twelve questions that planners ask, beside a roofline by hand: docs/guides/sizing.md has the
figures."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastdecode.cli.main import main

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "sizing.md"
ROW = re.compile(r"^\| (\d+) \| (.+) \| `(.+)` \| ([\d,.]+) \| ([\d,.]+) \| (.*) \|$", re.M)
ROWS = ROW.findall(GUIDE.read_text("utf-8"))

# Datasheets and the efficiencies that the guide states; bytes and parameters by hand.
SEVEN, EIGHT, SEVENTY = 6.74e9, 8.03e9, 70.6e9
KV_7, KV_8, KV_70 = 32 * 2 * 32 * 128 * 2, 32 * 2 * 8 * 128 * 2, 80 * 2 * 8 * 128 * 2
A10_FLOPS, A10_BYTES = 0.55 * 125e12, 0.80 * 600e9
A10_ROOM, H100_ROOM, H200_ROOM = (0.95 * mib * 2**20 for mib in (23028, 81559, 143771))
EPYC = 0.80 * 0.85 * 8 * 8 * 3200e6
MOST_7 = A10_FLOPS / (2 * SEVEN)
ALONE = (A10_ROOM - 2 * SEVEN) / (512 * KV_7)
ALONE_RATE = ALONE / ((2 * SEVEN + ALONE * 512 * KV_7) / A10_BYTES)
H100_ALONE = (H100_ROOM - 2 * EIGHT) / (512 * KV_8)
SOCKETS = math.ceil(MOST_7 * 512 * KV_7 / EPYC)
H100_STEP = H100_ALONE * (2 * EIGHT / (0.7 * 989e12) + 512 * KV_8 / (0.8 * 3350e9))
INT8 = 32 * 2 * 32 * (128 + 4)
BY_HAND: list[tuple[float, Callable[[dict[str, Any]], float]]] = [
    (MOST_7, lambda plan: plan["most_tokens_per_s"]),
    (SOCKETS, lambda plan: plan["plan"]["sockets"]),
    (ALONE, lambda plan: plan["gpu_only"]["batch"]),
    (ALONE_RATE, lambda plan: plan["gpu_only"]["tokens_per_s"]),
    (8 * EPYC / (512 * KV_7), lambda plan: plan["headline"]["tokens_per_s"]),
    (math.ceil(MOST_7 * 512 * INT8 / EPYC), lambda plan: plan["what_ifs"][0]["sockets"]),
    (H100_ALONE / H100_STEP, lambda plan: plan["gpu_only"]["tokens_per_s"]),
    ((2 * H200_ROOM - 2 * SEVENTY) / (1536 * KV_70), lambda plan: plan["gpu_only"]["batch"]),
    (0.9 * 10e9 / 8 / (32 * 3 * 4096 * 2), lambda plan: plan["most_tokens_per_s"]),
    (1.9e9 / 655_360, lambda plan: plan["most_tokens_per_s"]),
    (1000 * 2 * EIGHT / A10_BYTES, lambda plan: 1000 * plan["plan"]["expected"]["step_s"]),
    (1e6 * 640 * 2 * EIGHT / (0.6 * 362.05e12) / 3600, lambda plan: plan["job"]["hours"]),
]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_classic_question(row: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    number, asked, command, by_hand, answer, why = row
    hand, answer_of = BY_HAND[int(number) - 1]
    words = shlex.split(command)
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "--json" in words or re.search(rf"(?<![\d,.]){answer}(?![\d,.]*\d)", printed)
    assert ("most tokens/s" in asked) == ("--json" in words), "only --json has the most"
    assert main([*words, "--json"]) == 0
    found = answer_of(json.loads(capsys.readouterr().out))
    assert _number(by_hand) == pytest.approx(hand, rel=5e-3)
    assert _number(answer) == pytest.approx(found, rel=5e-3)
    assert abs(found / hand - 1) <= 0.10 or len(why) > 20, f"{found / hand - 1:+.0%}, and no reason"


def test_there_are_twelve() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, len(BY_HAND) + 1)) and len(ROWS) == 12
