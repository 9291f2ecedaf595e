"""Pipelines on a virtual clock: worked makespans, and what must hold for any."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.pipeline_events import Events

from cost_model.arrivals import arrivals
from cost_model.disaggregate.compare import KINDS, Comparison, Kind, grouped
from cost_model.disaggregate.profile import read_machine_profile
from cost_model.simulate.pipelines import (
    Failures,
    MachineTimes,
    Microbatch,
    run_colocated,
    run_data_parallel,
    run_disaggregated,
)
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.simulation.trace import RequestTrace, TracedRequest

CASES = json.loads(Path(__file__).with_name("pipeline_cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_worked_makespans(case: dict[str, object]) -> None:
    tokens, machines = case["tokens"], case["machines"]
    makespans, expected = case["disaggregated_s"], case["one_pipeline_s"]
    assert isinstance(tokens, list) and isinstance(machines, int) and isinstance(makespans, dict)
    microbatches = [Microbatch(each) for each in tokens]
    prompt_s, token_s = case["prompt_s"], case["token_s"]
    assert isinstance(prompt_s, float) and isinstance(token_s, float)
    times = MachineTimes(prompt_s, token_s)
    assert run_colocated(microbatches, machines, times).makespan_s == pytest.approx(
        expected, rel=1e-6
    )
    found = {}
    for split, makespan_s in makespans.items():
        stages = (int(part) for part in split.split("+"))
        found[split] = run_disaggregated(microbatches, *stages, times).makespan_s
        assert found[split] == pytest.approx(makespan_s, rel=0.001), split
    assert min(found, key=found.__getitem__) == case["best"]
    wins = min(found.values()) < case["one_pipeline_s"]  # type: ignore[operator]
    assert wins == case["wins"]


def test_by_hand() -> None:
    times = MachineTimes(2.0, 1.0, transfer_s=0.25)
    # Two stages, two slots: prompts 1 s a stage, tokens 0.5 s.
    #   stage 0: p0 0-1, p1 1-2, t0 2-2.5, t1 3-3.5; stage 1: p0 1-2, p1 2-3, t0 3-3.5, t1 3.5-4
    run = run_colocated([Microbatch(1), Microbatch(1)], 2, times)
    assert run.finished_s == [3.5, 4.0] and run.busy_s == [3.0, 3.0]
    # One prompt stage: ready at 2.25 and 4.25; a token takes the only token stage 1 s.
    apart = run_disaggregated([Microbatch(1), Microbatch(3)], 1, 1, times)
    assert apart.finished_s == [3.25, 7.25] and apart.busy_s == [4.0, 4.0]


def test_arrivals_hold_prompts_back() -> None:
    times = MachineTimes(1.0, 1.0)
    late = [Microbatch(1), Microbatch(1, arrived_s=10.5)]
    assert run_colocated(late, 1, times).finished_s == [2.0, 12.5]
    assert run_disaggregated(late, 1, 1, times).finished_s == [2.0, 12.5]


microbatches_ = st.lists(
    st.builds(Microbatch, st.integers(1, 6), st.integers(0, 8).map(lambda n: n / 4)),
    min_size=1, max_size=8,
).map(lambda found: sorted(found, key=lambda each: each.arrived_s))  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(microbatches_, st.integers(1, 4), st.integers(1, 4))
def test_passes_end_as_stage_by_stage(
    microbatches: list[Microbatch], prompt_stages: int, token_stages: int
) -> None:
    times = MachineTimes(0.7, 0.3, 0.1)
    tokens = [each.num_tokens for each in microbatches]
    arrived = [Fraction(each.arrived_s) for each in microbatches]
    one = Events(
        tokens, token_stages, Fraction(7, 10) / token_stages, Fraction(3, 10) / token_stages
    )
    one.run(zip(arrived, itertools.count(), strict=False), first_pass=0)
    prompts = Events([0] * len(tokens), prompt_stages, Fraction(7, 10) / prompt_stages, Fraction(0))
    prompts.run(zip(arrived, itertools.count(), strict=False), first_pass=0)
    left = (
        prompts.finished[index] + prompt_stages * Fraction(1, 10) for index in range(len(tokens))
    )
    apart = Events(tokens, token_stages, Fraction(0), Fraction(3, 10) / token_stages)
    apart.run(zip(left, itertools.count(), strict=False), first_pass=1)
    for events, run in (
        (one, run_colocated(microbatches, token_stages, times)),
        (apart, run_disaggregated(microbatches, prompt_stages, token_stages, times)),
    ):
        assert run.finished_s == [float(events.finished[i]) for i in range(len(tokens))]
        for stage in range(token_stages):
            mine = [span for span in events.spans if span.stage == stage]
            busy = sum((span.ended - span.began for span in mine), Fraction(0))
            assert run.busy_s[stage - token_stages] == float(busy)
            assert all(b.began >= a.ended for a, b in itertools.pairwise(mine)), "two at a time"
    assert sum(run.busy_s[:prompt_stages]) == pytest.approx(0.7 * len(tokens))


def test_failures_by_hand() -> None:
    times, one = MachineTimes(2.0, 1.0), [Microbatch(3)]
    # Its prompt until 2, tokens until 3, 4 and 5. The second token is under way at 3.5.
    for restart_s in (0.0, 1.0):
        lost = Failures((3.5,), restart_s)
        assert run_colocated(one, 1, times, lost).finished_s == [8.5 + restart_s]
        kept = replace(lost, has_replicas=True)
        run = run_colocated(one, 1, times, kept)
        assert run.finished_s == [5.5 + restart_s] and run.busy_s == [5.0]
    # Two stages, two slots; the third starts when the first is over: at 3.5, and not before.
    three = [Microbatch(1)] * 3
    assert run_colocated(three, 2, times).finished_s == [3.5, 4.0, 6.5]
    at_once = run_colocated(three, 2, times, Failures((3.25,)))
    assert at_once.finished_s == [6.75, 7.25, 9.75], "the first two begin anew, then the third"
    twice = run_colocated(one, 1, times, Failures((1.0, 1.5), 4.0))
    assert twice.finished_s == [10.5], "stages that restart stop again"


@settings(max_examples=40, deadline=None)
@given(
    microbatches_,
    st.integers(1, 4),
    st.lists(st.integers(1, 60).map(lambda n: n / 4), max_size=3),
    st.sampled_from([0.0, 0.5]),
)
def test_replicas_never_take_longer_than_computing_again(
    microbatches: list[Microbatch], num_stages: int, at_s: list[float], restart_s: float
) -> None:
    times, failures = MachineTimes(0.7, 0.3), Failures(tuple(sorted(at_s)), restart_s)
    bare = run_colocated(microbatches, num_stages, times)
    lost = run_colocated(microbatches, num_stages, times, failures)
    kept = run_colocated(microbatches, num_stages, times, replace(failures, has_replicas=True))
    assert all(each > 0 for each in (*lost.finished_s, *kept.finished_s))
    assert kept.makespan_s <= bare.makespan_s + sum(restart_s + 1.0 for _ in at_s)
    assert kept.busy_s == pytest.approx(bare.busy_s), "nothing is done twice but what failed"
    assert kept.makespan_s <= lost.makespan_s + 1.0, "a pass, if another is first now"
    if all(at > bare.makespan_s for at in at_s):
        assert bare == lost == kept


def test_data_parallel_loses_no_microbatch() -> None:
    runs = run_data_parallel([Microbatch(2)] * 7, 3, 2, MachineTimes(1.0, 0.1))
    assert [len(run.finished_s) for run in runs] == [3, 2, 2]
    assert len(run_data_parallel([Microbatch(2)], 3, 2, MachineTimes(1.0, 0.1))) == 1


PROFILE = {
    "prompt_tokens": 100,
    "model_gb": 100,
    "kv_gb_per_token": 0.01,
    "microbatches": [
        {"sequences": 4, "prompt_s": 3.0, "token_s": 0.2},
        {"sequences": 8, "prompt_s": 6.0, "token_s": 0.25},
    ],
}


def profile_file(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(PROFILE | changes))
    return path


def trace(num: int = 48) -> RequestTrace:
    return RequestTrace(tuple(TracedRequest(100, 1 + index * 7 % 40, 40) for index in range(num)))


def test_best_layouts_are_those_of_all(tmp_path: Path) -> None:
    comparison = Comparison(trace(), read_machine_profile(profile_file(tmp_path)), Fraction(80))
    for machines in (1, 2, 3, 6):
        for kind in KINDS:
            all_s = [
                comparison.simulate(layout).makespan_s
                for layout in comparison.layouts(kind, machines)
            ]
            best = comparison.best(kind, machines)
            assert (None if best is None else best.makespan_s) == min(all_s, default=None)


def test_memory_excludes_layouts(tmp_path: Path) -> None:
    profile = read_machine_profile(profile_file(tmp_path))

    def sizes(kind: Kind, machines: int, gb: int) -> set[int]:
        comparison = Comparison(trace(), profile, Fraction(gb))
        return {layout.microbatch for layout in comparison.layouts(kind, machines)}

    # 140 tokens at the end: 100/2 + 0.01·140·8 = 61.2 GB; prompts alone: 58 GB.
    assert sizes("one pipeline", 2, 61) == {4} and sizes("one pipeline", 2, 62) == {4, 8}
    assert sizes("disaggregated", 4, 61) == {4}
    assert sizes("one pipeline", 1, 61) == set()


def test_microbatches_are_there_with_their_last_request() -> None:
    requests = tuple(TracedRequest(9, 1 + i, 9, arrival=float(i)) for i in range(5))
    assert list(grouped(RequestTrace(requests), 2)) == [
        Microbatch(2, 1.0), Microbatch(4, 3.0), Microbatch(5, 4.0)
    ]  # fmt: skip


def test_drawn_arrivals_scale_with_the_rate() -> None:
    slow, fast = (arrivals(2000, rate, 1.0, seed=3) for rate in (2.0, 4.0))
    assert slow[0] == fast[0] == 0 and slow == pytest.approx([2 * each for each in fast])
    assert 1999 / slow[-1] == pytest.approx(2.0, rel=0.1)
    assert arrivals(4, 2.0, 0.0, seed=0) == [0, 0.5, 1, 1.5]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"more": 1}, "more"),
        ({"model_gb": "big"}, "model_gb"),
        ({"origin": 7}, "origin"),
        ({"microbatches": []}, "microbatches"),
        ({"microbatches": [{"sequences": 4, "prompt_s": 1e16, "token_s": 1.0}]}, "prompt_s=1e"),
        ({"microbatches": [{"sequences": 4, "prompt_s": 1.0}]}, r"\[0\]: token_s is missing"),
        ({"microbatches": [PROFILE["microbatches"][0]] * 2}, "twice"),  # type: ignore[index]
    ],
)
def test_refuses_profiles_that_make_no_sense(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        read_machine_profile(profile_file(tmp_path, **changes))


def test_refuses_prompts_longer_than_measured(tmp_path: Path) -> None:
    profile = read_machine_profile(profile_file(tmp_path, prompt_tokens=99))
    with pytest.raises(ConfigError, match=r"a prompt of 100 tokens.*measured with 99"):
        Comparison(trace(), profile)
