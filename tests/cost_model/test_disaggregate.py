"""Machines for prompts and for tokens, and swapping: worked cases, the papers' tables, and the
closed forms against brute force."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.dejavu import TABLE_6, TABLES, PaperTable, table_6_row

from cost_model.disaggregate import Disaggregation, StageMemory, Swapping, as_json, as_text
from cost_model.printing import json_text

times = st.integers(1, 10_000).map(lambda thousandths: thousandths / 1000)


def shown(asked: Disaggregation) -> list[tuple[int, int]]:
    return [(split.prompt_machines, split.token_machines) for split in asked.best]


@pytest.mark.parametrize(
    ("asked", "splits", "interval_s", "colocated_s", "ratio", "wins"),
    [
        (Disaggregation(8, 100.0, 5.0, 200), [(1, 7)], 1142.857142857143, 1183.125, 1, True),
        # Parts of machines win from the ratio on, whole ones lose.
        (Disaggregation(2, 100.0, 1.0, 10), [(1, 1)], 200, 159.5, 1, False),
        # Streaming that takes 2 - 1/D times as long never pays.
        (Disaggregation(4, 100.0, 5.0, 50, 1.75), [(2, 2)], 500, 421.25, None, False),
    ],
)
def test_worked_splits(
    asked: Disaggregation, splits: list[tuple[int, int]], interval_s: float, colocated_s: float,
    ratio: float | None, wins: bool,
) -> None:  # fmt: skip
    assert (shown(asked), asked.wins) == (splits, wins)
    assert asked.best[0].interval_s == pytest.approx(interval_s)
    assert (asked.colocated_s, asked.break_even_ratio) == (colocated_s, ratio)


def test_ties_are_all_shown() -> None:
    # 0.3/1 = 3 x 0.1/1, whatever binary fractions make of it.
    assert shown(Disaggregation(3, 0.3, 0.1, 3)) == [(1, 2), (2, 1)]
    assert Disaggregation(1, 1, 1, 1).best == ()


@given(
    machines=st.integers(1, 24), prompt=times, token=times, tokens=st.integers(1, 200),
    overhead=st.integers(100, 300).map(lambda hundredths: hundredths / 100),
)  # fmt: skip
def test_best_splits_are_those_of_all(
    machines: int, prompt: float, token: float, tokens: int, overhead: float
) -> None:
    intervals = {
        (p, machines - p): max(
            overhead * machines * prompt / p, tokens * machines * token / (machines - p)
        )
        for p in range(1, machines)
    }
    least = min(intervals.values(), default=0.0)
    asked = Disaggregation(machines, prompt, token, tokens, overhead)
    assert shown(asked) == [
        split for split, s in intervals.items() if s == pytest.approx(least, rel=1e-12)
    ]
    assert asked.wins == (0 < least < asked.colocated_s * (1 - 1e-12))


def memory(machine_gb: float) -> StageMemory:
    return StageMemory(70, 4.932501504, 0.917504, 0.917504, machine_gb)


def test_bounds_of_memory() -> None:
    bounds = memory(160)
    assert (bounds.fewest(tokens=False), bounds.fewest(tokens=True)) == (3, 14)
    assert bounds.fits(14, tokens=True) and not bounds.fits(15, tokens=True), "a microbatch more"
    assert memory(5).fewest(tokens=False) is None is memory(5).fewest(tokens=True)


@given(
    layers=st.integers(1, 40), weights=times, prompt=times, token=times,
    machine=st.integers(1, 400), more=st.integers(0, 400), machines=st.integers(2, 20),
)  # fmt: skip
def test_more_memory_allows_no_fewer_splits(
    layers: int, weights: float, prompt: float, token: float, machine: int, more: int, machines: int
) -> None:
    small, large = (
        Disaggregation(
            machines, 2.0, 0.1, 30, memory=StageMemory(layers, weights, prompt, token, gb)
        )
        for gb in (machine, machine + more)
    )
    assert set(small.splits()) <= set(large.splits())
    assert not small.best or large.best[0].interval_s <= small.best[0].interval_s


@given(
    prompt=st.integers(0, 60), tokens=st.integers(1, 60), token_time=times,
    batch=st.integers(1, 16), kv_kb=st.integers(1, 10**8), bandwidth=st.integers(1, 50),
)  # fmt: skip
def test_swapping_by_brute_force(
    prompt: int, tokens: int, token_time: float, batch: int, kv_kb: int, bandwidth: int
) -> None:
    swap = Swapping(prompt, tokens, token_time, batch, kv_kb, bandwidth)
    per_token = 2 * batch * kv_kb * 1000 / (bandwidth * 10**9)
    expected = sum(max(token_time, i * per_token) for i in range(prompt + 1, prompt + tokens + 1))
    assert swap.swapped_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("bandwidth", "transfer", "extra"), TABLE_6)
def test_table_6(bandwidth: int, transfer: float, extra: float) -> None:
    took_s, extra_s, factor = table_6_row(bandwidth)
    assert took_s == pytest.approx(transfer, rel=5e-3)
    assert extra_s == pytest.approx(extra, abs=0.011)
    assert factor == max(1, took_s / 3.1)


def test_microbatches_that_fit() -> None:
    assert [TABLES[0].largest_microbatch(stages) for stages in (1, 2, 4, 8)] == [4, 16, 16, 16]
    assert [TABLES[2].largest_microbatch(stages) for stages in (1, 2)] == [None, 8]
    assert [TABLES[3].largest_microbatch(stages) for stages in (1, 2)] == [None, 16]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"table {table.number}")
def test_published_configurations_fit(table: PaperTable) -> None:
    assert all(table.fits(*each) for each in table.configurations())
    assert table.begins_where_something_fits
    assert (table.prompt_share(6) is not None) == (table.number < 5), "one share gives all splits"


def test_everything_is_json() -> None:
    asked = Disaggregation(8, 100.0, 5.0, 200, memory=memory(640))
    swap = Swapping(500, 500, 0.04, 8, 458.752, 12)
    tree = json.loads(json_text(as_json(asked, swap)))
    assert tree["wins"] and tree["min_token_machines"] == 1 and not tree["swap"]["pays"]
    assert swap.unswapped_s == 40 and swap.crossover_tokens == pytest.approx(65.39481026785714)
    assert tree["splits"][0]["prompt_machines"] == 1
    text = as_text(asked, swap)
    assert "disaggregate: 1.04 times" in text and "don't swap" in text
