"""When roles are looked at again, and what sample of it: against requests whose
traffic is known, and simulated days."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.goodput.replanning import (
    HEADROOM,
    InstanceProfile,
    Judge,
    JudgedRoles,
    LinearTimes,
    RoleQuestion,
    Roles,
    TrafficSample,
    TrafficWatch,
    WatchRules,
    from_json,
    main,
    simulation_of,
    to_json,
    traffic,
)
from cost_model.goodput.simulator import (
    DecodeSpec,
    GoodputRun,
    PrefillSpec,
    simulate,
    simulate_colocated,
)
from cost_model.goodput.slo import RequestTimes, Slo
from cost_model.goodput.workload import Lengths, drawn
from examples import examples
from fastdecode.core.config.instances import InstanceRole
from fastdecode.schedule.role_changes import role_changes
from fastdecode.schedule.simulation.instance_time import InstanceTime

SLO = Slo(1.0, 0.05)
RULES = WatchRules()
STAY = JudgedRoles(Roles(1, 1), 1.0, Roles(1, 1), 1.0, 0.0, 2)


def requests(
    num: int, rate: float, cv: float = 1.0, prompt: int = 100, output: int = 50, seed: int = 1
) -> list[tuple[float, int, int]]:
    draw = drawn(Lengths(prompt, 0.5), Lengths(output, 0.5), cv, num, seed)
    return draw.at(rate)


class Day:
    """Requests that a watch is told of as they come and end.

    Args:
        asked: arrivals, prompt and output tokens.
        times: what each saw; by default all keep the SLO.
        judge: answers the watch; by default roles stay.
        change: is told the roles that are to be.
    """

    def __init__(
        self,
        asked: Sequence[tuple[float, int, int]],
        times: Sequence[RequestTimes] | None = None,
        judge: Callable[[object], JudgedRoles | None] = lambda due: STAY,
        rules: WatchRules = RULES,
        every_s: float = 10.0,
        change: Callable[[Roles], None] = lambda best: None,
    ) -> None:
        self._change = change
        self.reasons: list[tuple[float, str]] = []
        self.applied: list[float] = []
        seen = times or [RequestTimes(at_s, 0.1, 0.01) for at_s, _, _ in asked]
        told = []
        for (at_s, prompt, output), each in zip(asked, seen, strict=True):
            over_s = at_s + each.ttft_s + (each.tpot_s or 0.0) * (output - 1)
            told += [(at_s, 0, None), (over_s, 1, (each, prompt, output))]
        told.sort(key=lambda one: one[:2])
        watch, next_s = TrafficWatch(SLO, rules, 0.0), 0.0
        for now_s, _, over in told:
            while next_s <= now_s:
                self._look(watch, next_s, judge)
                next_s += every_s
            if over is None:
                watch.arrived(now_s)
            else:
                watch.finished(now_s, over)

    def _look(
        self, watch: TrafficWatch, now_s: float, judge: Callable[[object], JudgedRoles | None]
    ) -> None:
        due = watch.due(now_s)
        if due is None:
            return
        assert watch.due(now_s + 1e6) is None, "one look at a time"
        self.reasons.append((now_s, due.reason))
        judged = judge(due)
        if watch.decided(now_s, due, judged):
            assert judged is not None
            self.applied.append(now_s)
            self._change(judged.best)


def test_traffic_is_what_was_drawn() -> None:
    asked = requests(10_000, 5.0, cv=2.0, prompt=300, output=40)
    over = [(RequestTimes(at, 0.5, 0.01), p, o) for at, p, o in asked]
    found = traffic([at for at, _, _ in asked], over, SLO, asked[-1][0])
    for name, value in (("rate", 5.0), ("cv", 2.0), ("prompts", 300.0), ("outputs", 40.0)):
        estimate = getattr(found, name)
        assert abs(estimate.value - value) < 3 * estimate.error
        assert 0 < estimate.error < 0.05 * value
    assert found.kept.value == 1.0 and len(found.lengths) == 10_000


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_errors_are_those_of_many_windows(cv: float) -> None:
    """The spread of what 400 windows say is what each says of itself."""
    found = []
    for seed in range(400):
        asked = requests(300, 1.0, cv=cv, seed=seed)
        over = [(RequestTimes(at, 0.5, 0.01), p, o) for at, p, o in asked]
        found.append(traffic([at for at, _, _ in asked], over, SLO, asked[-1][0]))
    for name in ("rate", "prompts", "outputs"):
        values = [getattr(each, name).value for each in found]
        told = float(np.median([getattr(each, name).error for each in found]))
        assert np.std(values) == pytest.approx(told, rel=0.35)


@pytest.mark.parametrize(
    ("more", "word"),
    [({"rate": 2.0}, "rate"), ({"prompt": 200}, "prompts"), ({"output": 100}, "outputs"),
     ({"cv": 4.0}, "cv")],
)  # fmt: skip
def test_a_shift_is_seen_within_a_window(more: dict[str, float], word: str) -> None:
    before = requests(3600, 1.0)
    end_s = before[-1][0] + 1.0
    options = {"rate": 1.0, "seed": 2, **more}
    after = [(at + end_s, p, o) for at, p, o in requests(3600, **options)]  # type: ignore[arg-type]
    rules = WatchRules(period_s=1e6)
    day = Day([*before, *after], rules=rules)
    assert [reason for at, reason in day.reasons if at < end_s] == ["the first window is full"]
    at_s, reason = next(each for each in day.reasons if each[0] >= end_s)
    assert reason.startswith(word)
    assert at_s <= end_s + 2 * rules.window_s


def test_too_few_keep_the_slo() -> None:
    asked = requests(2000, 1.0)
    late = [RequestTimes(at, 2.0 if at > 1000 and i % 4 == 0 else 0.1, 0.01)
            for i, (at, _, _) in enumerate(asked)]  # fmt: skip
    day = Day(asked, late, rules=WatchRules(period_s=1e6))
    (_, first), (at_s, second), *_ = day.reasons
    assert first.startswith("the first window") and 1000 < at_s < 1600
    assert "keep the SLO, not 90%" in second


def test_a_period_and_the_time_after_a_look() -> None:
    rules = WatchRules(period_s=1000.0, cool_down_s=700.0)
    times = [at for at, _ in Day(requests(6000, 1.0, cv=0.5), rules=rules).reasons]
    assert len(times) >= 4
    assert all(1000 <= after - before <= 1060 for before, after in itertools.pairwise(times))
    # What never keeps the SLO is looked at no more often than this.
    asked = requests(4000, 1.0)
    bad = [RequestTimes(at, 9.0, 0.01) for at, _, _ in asked]
    times = [at for at, _ in Day(asked, bad, rules=rules).reasons]
    assert all(after - before >= 700 for before, after in itertools.pairwise(times))
    assert len(times) > 3


def better(best: Roles, gain: float = 1.0) -> JudgedRoles:
    return JudgedRoles(Roles(2, 2), 1.0, best, 2.0, gain, 3)


@pytest.mark.parametrize(
    ("answers", "applied"),
    [
        ([better(Roles(1, 3)), better(Roles(1, 3))], [1]),
        ([better(Roles(1, 3)), STAY, better(Roles(1, 3))], []),
        ([better(Roles(1, 3)), better(Roles(3, 1)), better(Roles(3, 1))], [2]),
        ([better(Roles(1, 3)), better(Roles(1, 3), gain=0.09)], []),
        ([None, better(Roles(1, 3)), None, better(Roles(1, 3)), STAY], [3]),
    ],
    ids=["two alike", "one", "two others", "too little", "nothing known"],
)
def test_two_windows_are_to_want_the_same(
    answers: list[JudgedRoles | None], applied: list[int]
) -> None:
    asked, rules = iter(answers), WatchRules(period_s=100.0, cool_down_s=100.0, window_s=50.0)
    day = Day(requests(6000, 5.0), judge=lambda due: next(asked, STAY), rules=rules)
    assert day.applied == [day.reasons[i][0] for i in applied]
    for one, another in itertools.pairwise(at for at, _ in day.reasons):
        assert another - one >= 50.0
    for at_s in day.applied:
        assert not any(at_s < looked_s < at_s + 100.0 for looked_s, _ in day.reasons)


def test_what_could_not_be_looked_at_is_looked_at_soon() -> None:
    asked, watch = requests(200, 1.0), TrafficWatch(SLO, RULES, 0.0)
    for at_s, prompt, output in asked:
        watch.arrived(at_s)
        watch.finished(at_s, (RequestTimes(at_s, 0.1, 0.01), prompt, output))
    now_s = max(asked[-1][0], RULES.window_s)
    due = watch.due(now_s)
    assert due is not None and watch.due(now_s + RULES.window_s) is None
    watch.put_off()
    assert watch.due(now_s + 1.0) is None
    again = watch.due(now_s + RULES.window_s / 10)
    assert again is not None and again.reason == due.reason
    watch.decided(now_s, again, None)  # it was looked at, in vain
    assert watch.due(now_s + RULES.cool_down_s - 1.0) is None


def test_no_requests_are_nothing_to_judge_by() -> None:
    watch = TrafficWatch(SLO, WatchRules(), 0.0)
    assert [watch.due(at) for at in (0.0, 1e3, 1e6)] == [None] * 3
    watch.arrived(1e6)
    assert watch.due(2e6) is None


TIMES = LinearTimes(0.04, 1.6e-3, 1.6e-6, 2.4e-3, 8e-6)
PROFILE = InstanceProfile(TIMES, 2048, 200_000, 256)
STRICT = Slo(48.0, 0.24)


def run_of(roles: Roles, asked: list[tuple[float, int, int]]) -> GoodputRun:
    return simulation_of(PROFILE, roles)(asked)


def test_roles_are_simulated_as_the_instances_that_they_are() -> None:
    """Against simulators that are told of each instance by hand."""
    asked = [(0.3 * i, 200 + 90 * (i % 4), 12 + i % 3) for i in range(24)]
    decode = DecodeSpec(
        InstanceTime(TIMES), PROFILE.capacity_tokens, PROFILE.max_sequences, opens_at_once=False
    )
    at_once = InstanceTime(replace(TIMES, fetched_s=0.0))
    prefill = PrefillSpec(at_once, PROFILE.batch_tokens, PROFILE.capacity_tokens)
    both = simulate_colocated(asked, [decode] * 3, PROFILE.batch_tokens)
    split = simulate(asked, [prefill] * 2, [decode])
    assert run_of(Roles(0, 0, 3), asked).times == both.times
    assert run_of(Roles(2, 1), asked).times == split.times
    assert both.times != split.times


def test_nothing_is_applied_in_a_stationary_day() -> None:
    """24 hours, in ``make test`` 4, gaps with a coefficient of variation of 4: windows
    differ widely."""
    rate, cv, hours = 0.02, 4.0, examples(24, share=6)
    draw = drawn(Lengths(1024, 0.8), Lengths(128, 0.8), cv, int(rate * hours * 3600), 5)
    asked = draw.at(rate)
    present = (
        Judge(PROFILE, TrafficSample(rate, cv, draw.lengths[:4000]), STRICT)
        .judge(Roles(0, 0, 2))
        .best
    )
    assert present == Roles(1, 1)
    run = run_of(present, asked)
    judged = []

    def judge(due: object) -> JudgedRoles:
        found = due.traffic  # type: ignore[attr-defined]
        sample = TrafficSample(found.rate.value, found.cv.value, found.lengths)
        judged.append(Judge(PROFILE, sample, STRICT).judge(present))
        return judged[-1]

    day = Day(asked, run.times, judge, every_s=30.0)
    assert len(judged) >= hours // 2 and not day.applied


def test_longer_answers_want_other_roles() -> None:
    """The watch, the judge and the simulator together: answers grow to 24 times
    their length, the roles change once, and more keep the SLO then."""
    rate = 0.5
    few = drawn(Lengths(1024, 0.8), Lengths(32, 0.5), 1.0, 400, 1).at(rate)
    many = drawn(Lengths(256, 0.8), Lengths(768, 0.5), 1.0, 1000, 2).at(rate)
    later = [(at + few[-1][0] + 1.0, p, o) for at, p, o in many]
    present, slo = Roles(2, 1), Slo(30.0, 0.2)
    roles = [present]

    def judge(due: object) -> JudgedRoles:
        found = due.traffic  # type: ignore[attr-defined]
        sample = TrafficSample(found.rate.value, found.cv.value, found.lengths)
        return Judge(PROFILE, sample, slo).judge(roles[-1])

    asked = [*few, *later]
    times = run_of(present, asked).times
    day = Day(asked, times, judge, every_s=30.0, change=roles.append)
    assert len(day.applied) == 1 and day.applied[0] > later[0][0]
    best = Judge(PROFILE, TrafficSample(rate, 1.0, tuple(x[1:] for x in many)), slo).judge(present)
    assert best.best == roles[-1] != present and best.gain >= WatchRules().gain
    assert slo.share(run_of(best.best, many).times) > slo.share(run_of(present, many).times) + 0.1


def test_the_best_roles_are_those_of_all() -> None:
    sample = TrafficSample(1.0, 1.0, ((1000, 20), (500, 60), (100, 100)))
    judge = Judge(PROFILE, sample, Slo(20.0, 0.2))
    found = judge.judge(Roles(1, 3))
    every = [Roles(i, 4 - i) for i in range(1, 4)] + [Roles(0, 0, 4)]
    goodputs = {roles: judge.goodput(roles) for roles in every}
    assert goodputs[found.best] == max(goodputs.values()) == found.best_goodput
    assert found.present_goodput == goodputs[Roles(1, 3)]


def test_who_carries_more_than_comes_stays() -> None:
    sample = TrafficSample(0.01, 1.0, ((100, 10),))
    found = Judge(PROFILE, sample, STRICT).judge(Roles(3, 1))
    assert (found.best, found.gain) == (Roles(3, 1), 0.0)
    assert found.present_goodput == HEADROOM * 0.01


def test_questions_and_answers_come_through_json() -> None:
    sample = TrafficSample(2.0, 1.0, ((100, 10), (50, 5)))
    asked = RoleQuestion(PROFILE, sample, STRICT, Roles(1, 1))
    assert from_json(to_json(asked), RoleQuestion) == asked
    told = io.StringIO()
    nice: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.nice", nice.append)
        main(io.StringIO(to_json(asked)), told)
    assert nice == [19]
    assert from_json(told.getvalue(), JudgedRoles) == asked.answer()
    assert json.loads(to_json(STAY))["best"] == {"prefill": 1, "decode": 1, "both": 0}


ROLES = st.sampled_from(list(InstanceRole))


@settings(deadline=None)
@given(st.lists(st.tuples(ROLES, ROLES, st.integers(0, 5)), min_size=1, max_size=12))
def test_as_few_roles_change_as_it_takes(
    each: list[tuple[InstanceRole, InstanceRole, int]],
) -> None:
    roles, wanted = [role for role, _, _ in each], Counter(role for _, role, _ in each)
    busy = [float(number) for _, _, number in each]
    changes = role_changes(roles, wanted, busy)
    after = [changes.get(index, role) for index, role in enumerate(roles)]
    assert Counter(after) == wanted
    assert len(changes) == sum(max(0, wanted[role] - roles.count(role)) for role in InstanceRole)
    assert all(roles[index] is not role for index, role in changes.items())
    for index in changes:
        others = [i for i, role in enumerate(roles) if role is roles[index] and i not in changes]
        assert all(busy[index] <= busy[other] for other in others)
