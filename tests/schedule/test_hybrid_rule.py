"""KV on both sides: which sequences go to R-workers, and that it never costs anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from drawn_hybrid import DrawnCase, draw, judge, simulate

from examples import examples
from fastdecode.core.config.groups import Batching
from fastdecode.schedule.hybrid import forecast
from fastdecode.schedule.hybrid.control import HybridCounts, HybridGuard, HybridOptions
from fastdecode.schedule.hybrid.forecast import (
    Costs,
    Course,
    Guess,
    Known,
    Layout,
    Work,
    choose,
    coarse,
    finish_s,
    num_leaving,
    paces,
)
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.options import ScheduleOptions
from fastdecode.schedule.simulation.trace import RequestTrace, TracedRequest

NOW = Course(Layout.SPLIT)


def costs(*, r_s: float = 1e-7, round_trip_s: float = 1e-3) -> Costs:
    """Weights are read in 10 ms; a cached token takes the device 10 ns."""
    return Costs(
        lambda n: 0.010 + 2e-5 * n,
        lambda load: 1e-8 * load,
        lambda n, load: r_s * load,
        round_trip_s,
    )


def known(num_home: int, num_waiting: int, *, num_away: int = 0, num_blocks: int = 16) -> Known:
    works = [Work(400, 600, num_blocks)] * (num_home + num_away + num_waiting)
    return Known(
        tuple(works[:num_home]),
        tuple(works[:num_away]),
        tuple(works[:num_waiting]),
        home_blocks=num_blocks * max(1, num_home),
        away_blocks=(num_blocks * 500, num_blocks * 500),
        away_free=(num_blocks * 500, num_blocks * 500),
        most_running=1000,
    )


def test_a_queue_goes_where_weights_are_shared_by_many() -> None:
    assert choose(known(64, 256), NOW, costs(), 0.0).num_away > 0


@pytest.mark.parametrize(("num_reused", "goes"), [(0, False), (50, False), (600, True)])
def test_who_has_been_kept_away_goes_there_if_that_spares_enough(
    num_reused: int, goes: bool
) -> None:
    """The device has room; a token of a prompt costs as much as one that decodes."""
    waits = Work(40, 700, 16, num_uncached=700, num_reused_away=num_reused)
    idle = replace(known(1, 0), home_blocks=100, waiting=(waits,))
    dear = replace(costs(r_s=1e-9, round_trip_s=1e-5), s_part=lambda n: 0.010 + 1e-3 * n)
    course = choose(idle, NOW, dear, 0.0)
    assert (course.num_away == 1) is goes
    assert num_leaving(idle, 1) == (num_reused > 0)


def test_another_layout_has_to_save_something_while_somebody_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forecast, "LEAST_GAIN", 10.0)
    # At balance of both layouts, nothing changes.
    same = known(64, 0, num_away=64)
    for layout in Layout:
        found = choose(same, Course(layout), costs(), 0.0)
        assert found.layout is layout


def test_a_forecast_of_those_at_home_is_the_sum_of_their_steps() -> None:
    works = tuple(Work(steps, 100, 1) for steps in (1, 3, 3, 10))
    alone = replace(known(1, 0), home=works)
    expected = sum(
        costs().home_s(sum(w.num_steps > i for w in works), sum(
            w.num_cached + i for w in works if w.num_steps > i
        ))
        for i in range(10)
    )  # fmt: skip
    assert finish_s(alone, NOW, costs()) == pytest.approx(expected, rel=1e-6)


def test_who_has_leave_to_go_stays_where_the_device_has_room() -> None:
    sizes = (8, 8, 4, 8)
    waits = replace(known(1, 0), home_blocks=20, waiting=tuple(Work(9, 5, n) for n in sizes))
    assert num_leaving(waits, 1) == 1
    assert num_leaving(waits, 4) == 2


def test_coarse_forecasts_are_near() -> None:
    random = Random(1)
    works = tuple(Work(random.randint(50, 500), 100, 8) for _ in range(300))
    one = replace(known(1, 0), home=works[:50], waiting=works[50:], home_blocks=400)
    fine, near = (finish_s(k, NOW, costs()) for k in (one, coarse(one, 64)))
    assert near == pytest.approx(fine, rel=0.06)
    assert coarse(one, 1000) is one


def test_paces() -> None:
    c = costs(r_s=1e-6, round_trip_s=0.001)
    assert paces(c, Layout.SPLIT, (10, 1000), (0, 0)).home_s == c.home_s(10, 1000)
    split = paces(c, Layout.SPLIT, (10, 1000), (10, 1000))
    # What away steps take of the device, the others don't have.
    assert split.home_s == pytest.approx(
        c.home_s(10, 1000) / (1 - c.s_part(10) / split.away_s), rel=1e-9
    )
    mixed = paces(c, Layout.MIXED, (10, 1000), (10, 1000))
    assert mixed.home_s == mixed.away_s == pytest.approx(c.s_part(20) + 0.002)
    assert paces(c, Layout.SPLIT, (0, 0), (10, 1000)).home_s == math.inf


def test_never_slower_than_the_device_alone() -> None:
    """With the scheduler, the lifecycle and the rule as they are. The first ten were slower once:
    forecasts took all R-workers' blocks for one room, knew nothing of prompts, and thought that
    two would share an away lane of which one found room at home."""
    modes: Counter[str] = Counter()
    ratios = []
    for seed in (428, 824, 2643, 3316, 3376, 4223, 7125, 7152, 8306, 8746, *range(examples(60))):
        verdict = judge(draw(Random(seed)))
        ratios.append(verdict.ratio)
        modes.update(verdict.modes.keys())
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) > 1.5
    assert {"gpu-only", "mixed", "split-1", "R-only"} <= set(modes)


def test_never_much_slower_when_costs_are_misjudged() -> None:
    ratios = []
    for seed in range(examples(40)):
        random = Random(seed)
        ratios.append(judge(draw(random), error=0.2, random=random).ratio)
    assert min(ratios) >= 0.97
    assert max(ratios) > 1.2


def test_the_rule_is_asked_at_admission_and_every_64_steps() -> None:
    """Also while nobody comes or goes: costs may turn out otherwise."""
    asked_at: list[int] = []
    case = draw(Random(3))
    request = TracedRequest(8, 300, 300)
    slow = replace(case.times, token_s=(1.0, 1e-9), way_s=1.0)
    case = replace(
        case, trace=RequestTrace((request,) * 4), times=slow, blocks=(100, 40), most_running=8
    )

    def asked(known: Known, now: Course, costs: Costs, error: float) -> Course:
        assert control is not None
        asked_at.append(sum(control.counts.steps.values()))
        return choose(known, now, costs, error)

    options = HybridOptions(case.device, Guess(0), rule=asked, measured_steps=0, clock=lambda: 0.0)
    batching = Batching(max_num_sequences=8, schedule="greedy", lanes=1)
    scheduler = make_scheduler(ScheduleOptions(batching), case.blocks, 16, slow, hybrid=options)
    control = scheduler.hybrid
    simulate(case, scheduler)
    # When two of four have started and the others wait; then for the whole.
    assert asked_at[:5] == [1, 1, 65, 129, 193]


def most_away(case: DrawnCase, load_limit: int | None) -> int:
    """Most cached tokens that R-workers attend in the last steps of all lanes."""
    schedule = "greedy" if load_limit is None else "stabilized"
    batching = Batching(
        max_num_sequences=case.most_running, schedule=schedule, load_limit=load_limit, lanes=1
    )
    options = HybridOptions(case.device, Guess(0), measured_steps=0, error=0.0, clock=lambda: 0.0)
    scheduler = make_scheduler(
        ScheduleOptions(batching), case.blocks, 16, case.times, hybrid=options
    )
    control, most, loads = scheduler.hybrid, [0], dict[int, int]()
    assert control is not None
    observe = control.observe

    def noted(lane: int, num_decoding: int, of_holders: Mapping[int, int]) -> None:
        observe(lane, num_decoding, of_holders)
        loads[lane] = sum(x for holder, x in of_holders.items() if holder != case.device)
        most[0] = max(most[0], sum(loads.values()))

    control.observe = noted  # type: ignore[method-assign]
    simulate(case, scheduler)
    return most[0]


def longest(case: DrawnCase) -> int:
    requests = case.trace.requests
    return max(one.num_prompt_tokens + one.num_output_tokens for one in requests)


def is_much_away(case: DrawnCase) -> bool:
    return most_away(case, None) > 6 * longest(case)


def test_a_load_limit_holds_for_what_is_on_r_workers() -> None:
    """Over all lanes. The device has a load of its own."""
    case = next(x for x in map(draw, map(Random, range(40))) if is_much_away(x))
    limit = 3 * longest(case)
    assert 0 < most_away(case, limit) <= limit < most_away(case, None)


def test_where_all_fits_on_the_device_nothing_changes() -> None:
    for seed in range(10):
        case = draw(Random(seed), most_requests=12)
        case = replace(case, blocks=(*case.blocks[:-1], 10_000), most_running=64)
        verdict = judge(case)
        assert verdict.ratio == 1.0 and set(verdict.modes) == {"gpu-only"}


class Watched:
    """A watch, by windows of steps of 10 sequences, expected to take 10 ms each."""

    def __init__(self) -> None:
        self.counts = HybridCounts()
        self.watch = HybridGuard(self.counts)
        self._now_s = 0.0

    def window(self, step_s: float, *, num_away: int = 0, is_full: bool = True) -> bool:
        """Return True if the way is closed after it."""
        for _ in range(65):
            if num_away:
                self.watch.away_step(num_away)
            self._now_s += step_s
            self.watch.home_step(10, 0.010, self._now_s, is_alone=not num_away, is_full=is_full)
        return self.watch.closed_for > 0


def test_the_watch_closes_the_way_where_all_get_slower() -> None:
    watched = Watched()
    assert not watched.window(0.010)
    assert not watched.window(0.015, num_away=6)  # 16 in 15 ms: more than 10 in 10
    assert watched.window(0.015, num_away=3)  # 13 in 15 ms
    assert watched.counts.num_closed == 1
    for _ in range(5):
        watched.window(0.010)
    assert not watched.watch.closed_for


def test_the_watch_trusts_predictions_as_far_as_they_were_right() -> None:
    watched = Watched()
    watched.window(0.020)  # alone, it takes twice what was expected
    assert not watched.window(0.020, num_away=1)
    assert watched.window(0.030, num_away=1)


def test_the_watch_judges_nobody_who_has_nothing_to_do() -> None:
    watched = Watched()
    watched.window(0.010)
    assert not watched.window(1.0, num_away=1, is_full=False)
    fresh = Watched()
    assert not fresh.window(1.0, num_away=1)  # nor whom it has nothing to hold against
