"""The paper's formulas, against examples worked by hand, to 1e-9."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oracles.sizing_forms import required_cpus

from cost_model.workload import Workload

CASES: dict[str, list[dict[str, Any]]] = json.loads(
    Path(__file__).with_name("cases.json").read_text()
)


def case_ids(kind: str) -> Any:
    return pytest.mark.parametrize("case", CASES[kind], ids=[case["id"] for case in CASES[kind]])


@case_ids("required_cpus")
def test_required_cpus(case: dict[str, Any]) -> None:
    given_, expected = case["inputs"], case["expected"]
    answer = required_cpus(
        batch=given_["B"],
        seq_len=given_["S"],
        r_per_token=given_["R_ms_per_token_per_cpu"],
        t_of_b=given_["T_B_ms"],
        capacity_tokens=given_["C_tokens_per_cpu"],
    )
    assert answer.compute_bound == pytest.approx(expected["P_compute"], rel=1e-9)
    assert answer.memory_bound == pytest.approx(expected["P_memory"], rel=1e-9)
    assert answer.needed == expected["P_needed"]
    efficiency = given_["B"] / given_["T_B_ms"]
    assert efficiency == pytest.approx(expected["E_B"], rel=1e-9)
    assert answer.compute_bound == pytest.approx(
        given_["S"] * given_["R_ms_per_token_per_cpu"] * efficiency / 2, rel=1e-9
    )


def test_load_is_the_sum_over_micro_batches() -> None:
    case = CASES["load"][0]
    batch, length, interval = (case["inputs"][name] for name in "BSF")
    load = batch * Workload(0, length, interval).mean_context_tokens
    summed = sum(case["expected"]["M"] * k * interval for k in range(1, length // interval + 1))
    assert (
        load
        == pytest.approx(summed, rel=1e-9)
        == pytest.approx(case["expected"]["W_stabilised"], rel=1e-9)
    )
    assert load / case["expected"]["W_max"] == pytest.approx(case["expected"]["ratio"], rel=1e-9)


def test_load_of_an_uneven_interval_is_within_the_headroom() -> None:
    """The closed form is exact only if F divides S; otherwise the peak is
    higher, which the default headroom covers."""
    case = CASES["load"][1]
    batch, length, interval = (case["inputs"][name] for name in "BSF")
    load = batch * Workload(0, length, interval).mean_context_tokens
    assert load == case["expected"]["closed_form"]
    peak = case["inputs"]["M"] * sum(case["expected"]["lengths_at_peak"])
    assert peak == case["expected"]["W_peak"]
    assert load < peak < 1.1 * load
