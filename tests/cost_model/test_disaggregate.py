"""Machines for prompts and for tokens, and swapping: worked cases, and the
closed forms against brute force."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.dejavu import TABLE_6, TABLES, compared, table_6_row, table_text

from cost_model.disaggregate.memory import StageMemory
from cost_model.disaggregate.split import Disaggregation, Split
from cost_model.disaggregate.swap import Swapping
from cost_model.numbers import as_typed
from fastdecode.core.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "design" / "disaggregation.md"
times = st.integers(1, 10_000).map(lambda thousandths: thousandths / 1000)


def shown(splits: list[Split]) -> list[tuple[int, int]]:
    return [(split.prompt_machines, split.token_machines) for split in splits]


def asked(
    machines: int, prompt: float, token: float, tokens: int, overhead: float = 1.0
) -> Disaggregation:
    return Disaggregation(machines, prompt, token, tokens, overhead)


def test_a_split_wins_that_parts_of_machines_name_too() -> None:
    question = asked(8, 100.0, 5.0, 200)
    (best,) = question.best()
    assert shown([best]) == [(1, 7)]
    assert float(best.interval_s) == pytest.approx(1142.857142857143)
    assert question.colocated_s == Fraction("1183.125")
    assert (question.continuous_s, question.break_even_ratio) == (1100, 1)
    assert float(question.continuous_token_machines) == pytest.approx(7.2727272727)
    assert question.wins(best) and question.continuous_wins


def test_whole_machines_may_lose_where_parts_of_them_win() -> None:
    question = asked(2, 100.0, 1.0, 10)
    (best,) = question.best()
    assert (best.interval_s, question.continuous_s) == (200, 110)
    assert question.colocated_s == Fraction("159.5")
    assert question.continuous_wins and not question.wins(best)


def test_streaming_that_takes_too_long_never_pays() -> None:
    question = asked(4, 100.0, 5.0, 50, overhead=1.75)  # 2 - 1/D exactly
    assert question.break_even_ratio is None and not question.continuous_wins
    assert question.colocated_s == Fraction("421.25")
    assert shown(question.best()) == [(2, 2)] and question.best()[0].interval_s == 500


def test_all_ties_are_shown() -> None:
    # 0.3/1 = 3·0.1/1, whatever binary fractions make of it.
    question = asked(3, 0.3, 0.1, 3)
    assert shown(question.best()) == [(1, 2), (2, 1)]
    enough = [each for each in asked(12, 1200, 8, 100).splits() if 4 <= each.prompt_machines <= 6]
    assert shown([min(enough, key=lambda each: each.interval_s)]) == [(6, 6)]
    assert asked(1, 1, 1, 1).best() == []


@given(
    machines=st.integers(1, 24), prompt=times, token=times, tokens=st.integers(1, 200),
    overhead=st.integers(100, 300).map(lambda hundredths: hundredths / 100),
)  # fmt: skip
def test_best_splits_are_those_of_all(
    machines: int, prompt: float, token: float, tokens: int, overhead: float
) -> None:
    y, t, m = as_typed(prompt), as_typed(token), as_typed(overhead)
    intervals = {
        (p, machines - p): max(m * machines * y / p, tokens * machines * t / (machines - p))
        for p in range(1, machines)
    }
    least = min(intervals.values(), default=None)
    question = asked(machines, prompt, token, tokens, overhead)
    assert shown(question.best()) == [split for split, s in intervals.items() if s == least]
    assert least is None or question.continuous_s <= least
    ratio = question.break_even_ratio
    assert question.continuous_wins == (ratio is not None and y / t > ratio)


def memory(machine_gb: float) -> StageMemory:
    return StageMemory(70, 4.932501504, 0.917504, 0.917504, machine_gb)


def test_bounds_of_memory() -> None:
    bounds = memory(160)
    assert (bounds.min_prompt_machines, bounds.min_token_machines) == (3, 14)
    assert (bounds.equation_2, bounds.equation_3) == (3, 11)
    assert bounds.tokens_fit(14) and not bounds.tokens_fit(15)
    assert (memory(5).min_prompt_machines, memory(5).min_token_machines) == (None, None)
    assert memory(100).equation_3 is None


@given(
    layers=st.integers(1, 40), weights=times, prompt=times, token=times,
    machine=st.integers(1, 400), more=st.integers(0, 400), machines=st.integers(2, 20),
)  # fmt: skip
def test_memory_by_brute_force_and_monotone(
    layers: int, weights: float, prompt: float, token: float, machine: int, more: int, machines: int
) -> None:
    small, large = (
        StageMemory(layers, weights, prompt, token, gb) for gb in (machine, machine + more)
    )
    w, c, k = map(as_typed, (weights, prompt, token))
    for kind, least in (
        ("prompts", small.min_prompt_machines),
        ("tokens", small.min_token_machines),
    ):
        needed = [
            -(-layers // d) * (w + c if kind == "prompts" else w + (c + k) * d)
            for d in range(1, layers + 1)
        ]
        fitting = [d for d, gb in enumerate(needed, 1) if gb <= machine]
        assert least == min(fitting, default=None)
    question = asked(machines, 2.0, 0.1, 30)
    here, there = question.best(small), question.best(large)
    assert set(shown(question.splits(small))) <= set(shown(question.splits(large)))
    assert not here or there[0].interval_s <= here[0].interval_s


def test_swapping_by_every_reading() -> None:
    question = Swapping(500, 500, 0.04, 8, 458.752, 12)
    assert question.unswapped_s == 40
    assert [float(each.swapped_s) for each in question.readings()] == pytest.approx(
        [114.917376, 114.76445866666667, 229.834752, 229.52891733333335], rel=1e-9
    )
    assert not any(each.pays for each in question.readings())
    assert float(question.crossover()) == pytest.approx(130.78962053571428, rel=1e-9)


@given(
    prompt=st.integers(0, 60), tokens=st.integers(1, 60), token_time=times,
    batch=st.integers(1, 16), kv_kb=st.integers(1, 10**8), bandwidth=st.integers(1, 50),
)  # fmt: skip
def test_swapping_by_brute_force(
    prompt: int, tokens: int, token_time: float, batch: int, kv_kb: int, bandwidth: int
) -> None:
    question = Swapping(prompt, tokens, token_time, batch, kv_kb, bandwidth)
    t = as_typed(token_time)
    for (factor, first), each in zip(
        itertools.product((1, 2), (prompt, prompt + 1)), question.readings(), strict=True
    ):
        per_token = Fraction(factor * batch * kv_kb * 1000, bandwidth * 10**9)
        expected = sum(max(t, i * per_token) for i in range(first, prompt + tokens + 1))
        assert each.swapped_s == expected
        assert each.pays == (2 * tokens * t >= expected)


@pytest.mark.parametrize(("bandwidth", "transfer", "extra"), TABLE_6)
def test_table_6(bandwidth: int, transfer: float, extra: float) -> None:
    took_s, extra_s, factor = table_6_row(bandwidth)
    assert float(took_s) == pytest.approx(transfer, rel=5e-3)
    assert float(extra_s) == pytest.approx(extra, abs=0.011)
    assert factor == max(1, took_s / as_typed(3.1))


def test_microbatches_that_fit() -> None:
    assert [TABLES[0].largest_microbatch(stages) for stages in (1, 2, 4, 8, 16)] == [
        4,
        16,
        16,
        16,
        16,
    ]
    assert [TABLES[2].largest_microbatch(stages) for stages in (1, 2)] == [None, 8]
    assert [TABLES[3].largest_microbatch(stages) for stages in (1, 2)] == [None, 16]


def test_what_has_published_inputs_is_reproduced() -> None:
    assert all(each.reproduced == "yes" for each in compared() if each.has_input)
    inferred = [each.what for each in compared() if each.reproduced.startswith("inferred")]
    assert [what[:7] for what in inferred] == ["Table 2", "Table 3", "Table 4"]


def test_the_docs_have_this_table() -> None:
    """To mend it: PYTHONPATH=tests python -m oracles.dejavu"""
    assert DOCS.read_text("utf-8").endswith("\n\n" + table_text() + "\n")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: asked(0, 1, 1, 1), "machines=0 is not a whole number from 1"),
        (
            lambda: asked(2, float("nan"), 1, 1),
            "prompt_time=nan is not a number above 0 and below 1e",
        ),
        (lambda: asked(2, 1, 0, 1), "token_time=0 is not"),
        (lambda: asked(2, 1, 1, 1, overhead=0.5), "overhead=0.5 is not a number of at least 1"),
        (lambda: StageMemory(0, 1, 1, 1, 1), "layers=0"),
        (lambda: Swapping(1, 1, 1, 1, 1, 0), "bandwidth_gb=0"),
    ],
)
def test_refuses_what_makes_no_sense(make: object, says: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=says):
        make()


def test_everything_is_json() -> None:
    from cost_model.disaggregate.report import split_as_json, swap_as_json
    from cost_model.printing import json_text

    question = asked(8, 100.0, 5.0, 200)
    tree = json.loads(json_text(split_as_json(question, question.best(), memory(640))))
    assert tree["splits"] == [[1, 7]] and tree["wins"] and tree["memory"]["min_token_machines"] == 1
    swapped = json.loads(json_text(swap_as_json(Swapping(500, 500, 0.04, 8, 458.752, 12))))
    assert [each["pays"] for each in swapped["readings"]] == [False] * 4
