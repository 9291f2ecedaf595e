"""What a summary says of a run with KV on both sides, or swapped, and of lower tiers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from fastdecode.measure.summary import render
from fastdecode.schedule.cache.rates import TierCounts
from sworker.swap.figures import SwapFigures

NUMBERS = """requests failed prompt_tokens output_tokens steps output_tokens_per_s load_s prefill_s
decode_s peak_rss_bytes load_mean_tokens load_peak_tokens r_workers r_workers_lost
r_workers_rejoined cached_prompt_tokens"""
PARTS = "stage_layers hybrid_steps hybrid_closed replicas swap tiers"


def rendered(**parts: Any) -> list[str]:
    """Return the lines that a part of a summary adds to those of every run."""
    whole = {**dict.fromkeys(NUMBERS.split(), 0), **dict.fromkeys(PARTS.split(), ())}
    return render({**whole, "ttft_s": {}, "tpot_s": {}, **parts}).splitlines()[4:]


@pytest.mark.parametrize(
    ("steps", "closed", "says", "says_not"),
    [
        ({"gpu-only": 9}, 0, ["gpu-only 100%", "R-workers were not needed"], ["stayed"]),
        ({"split-1": 3, "gpu-only": 1}, 0, ["split-1 75%, gpu-only 25%"], ["stayed", "needed"]),
        (
            {"gpu-only": 3, "split-1": 1},
            2,
            ["2 time(s) new sequences stayed on the device"],
            ["needed"],
        ),
        ({"R-only": 3, "mixed": 1}, 0, ["R-only 75%", "R-only: R-workers alone"], ["stayed"]),
    ],
    ids=["all fits", "both", "device alone", "R-workers alone"],
)
def test_a_run_that_falls_back_to_one_side_says_so(
    steps: dict[str, int], closed: int, says: list[str], says_not: list[str]
) -> None:
    (line,) = rendered(hybrid_steps=steps, hybrid_closed=closed)
    assert all(text in line for text in says) and not any(text in line for text in says_not)


def test_a_run_on_one_side_says_nothing_of_both() -> None:
    assert rendered(hybrid_steps=None, hybrid_closed=None) == []


def test_what_went_wrong_with_lower_tiers_is_told_by_what_it_was() -> None:
    counts = TierCounts(num_slots=9, num_stored=5, num_failed=3, num_unread=1, num_damaged=2)
    (line,) = rendered(tiers=asdict(counts))
    assert line.endswith("; 3 could not be moved (1 could not be read, 2 were damaged)")
    (line,) = rendered(tiers=asdict(TierCounts(num_slots=9)))
    assert line.endswith("0 evicted"), "nothing did"
    assert rendered(tiers=None) == []


def test_a_run_whose_lanes_were_swapped_says_what_was_copied() -> None:
    figures = SwapFigures(4, 40, num_late_blocks=3, num_unused_blocks=5, num_tokens_out=28)
    (line,) = rendered(swap=asdict(figures))
    assert "10 KV blocks in, 7 tokens out" in line
    assert "3 blocks came late, 5 were not needed" in line
    assert rendered(swap=None) == rendered(swap=asdict(SwapFigures())) == []
