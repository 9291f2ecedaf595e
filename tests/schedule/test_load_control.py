"""Load control against brute force over every step, the worked examples, and
the paper's closed form."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from fastdecode.core.errors import CapacityError, ConfigError
from fastdecode.schedule.admission.load_control import FixedInterval, LoadControl, MicroBatch

CASES = {
    case["id"]: case
    for case in json.loads(Path(__file__).with_name("load_control_cases.json").read_text())["cases"]
}


@dataclass(frozen=True)
class Wish:
    """A micro-batch that wants to start."""

    num_sequences: int
    target_length: int
    first_length: int
    arrival: int

    def at(self, start: int) -> MicroBatch:
        return MicroBatch(self.num_sequences, self.target_length, start, self.first_length)


class BruteForce:
    """The load of every step, written out."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.load: Counter[int] = Counter()
        self.latest_start = 0

    def fits(self, batch: MicroBatch) -> bool:
        steps = range(batch.start, batch.end + 1)
        return all(self.load[step] + batch.load_at(step) <= self.limit for step in steps)

    def earliest_start(self, wish: Wish, now: int) -> int:
        start = max(now, self.latest_start)
        while not self.fits(wish.at(start)):
            start += 1
        return start

    def add(self, batch: MicroBatch) -> None:
        for step in range(batch.start, batch.end + 1):
            self.load[step] += batch.load_at(step)
        self.latest_start = max(self.latest_start, batch.start)

    def end(self, batch: MicroBatch, at: int) -> None:
        for step in range(at, batch.end + 1):
            self.load[step] -= batch.load_at(step)


def wishes(
    *, same_length: bool = False, with_prompts: bool = False
) -> st.SearchStrategy[list[Wish]]:
    lengths = st.just(12) if same_length else st.integers(1, 24)
    wish = st.builds(
        lambda m, length, prompt, arrival: Wish(m, length, min(length, prompt), arrival),
        st.integers(1, 6),
        lengths,
        st.integers(1, 24) if with_prompts else st.just(1),
        st.integers(0, 60),
    )
    return st.lists(wish, min_size=1, max_size=14).map(lambda x: sorted(x, key=lambda w: w.arrival))


def ask(control: LoadControl, wish: Wish, now: int) -> int:
    return control.earliest_start(wish.at(now))


def filled(wanted: list[Wish], limit: int) -> tuple[LoadControl, BruteForce]:
    """Start each micro-batch as early as it may."""
    control, brute = LoadControl(limit), BruteForce(limit)
    for wish in wanted:
        start = ask(control, wish, wish.arrival)
        assert start == brute.earliest_start(wish, wish.arrival)
        control.add(wish.at(start))
        brute.add(wish.at(start))
    return control, brute


def most(wanted: list[Wish]) -> int:
    return max(w.num_sequences * w.target_length for w in wanted)


@settings(max_examples=examples(4000, share=8), deadline=None)
@given(wishes(same_length=True) | wishes() | wishes(with_prompts=True), st.integers(0, 150))
def test_micro_batches_start_when_brute_force_says(wanted: list[Wish], slack: int) -> None:
    """Equal lengths, mixed ones, and those of cached prompts."""
    control, brute = filled(wanted, most(wanted) + slack)
    assert control.peak() == max(brute.load.values()) <= control.limit
    for step in range(max(brute.load) + 2):
        assert control.load_at(step) == brute.load[step]


@settings(max_examples=examples(1000, share=8), deadline=None)
@given(st.data(), wishes(with_prompts=True), st.integers(0, 100))
def test_what_ends_early_gives_its_load_back(
    data: st.DataObject, wanted: list[Wish], slack: int
) -> None:
    limit = most(wanted) + slack
    control, brute = LoadControl(limit), BruteForce(limit)
    running: list[MicroBatch] = []
    now = 0
    for wish in wanted:
        now = max(now, wish.arrival)
        control.forget_before(now)
        running = [batch for batch in running if batch.end >= now]
        if running and data.draw(st.booleans()):
            whole = running.pop(data.draw(st.integers(0, len(running) - 1)))
            num_ended = data.draw(st.integers(1, whole.num_sequences))
            ended = MicroBatch(num_ended, whole.target_length, whole.start, whole.first_length)
            at = max(now, whole.start)
            control.end(ended, at)
            brute.end(ended, at)
            if num_ended < whole.num_sequences:
                left = whole.num_sequences - num_ended
                running.append(
                    MicroBatch(left, whole.target_length, whole.start, whole.first_length)
                )
        start = ask(control, wish, now)
        assert start == brute.earliest_start(wish, now)
        control.add(wish.at(start))
        brute.add(wish.at(start))
        running.append(wish.at(start))
        now = start
        assert control.peak() >= max(brute.load[step] for step in range(now, now + 60))
    control.forget_before(now)
    later = range(now, max(brute.load) + 2)
    assert [control.load_at(step) for step in later] == [brute.load[step] for step in later]
    assert control.peak() == max(
        control.load_at(step) for step in (*later, *(b.end for b in running))
    )


@settings(max_examples=examples(500), deadline=None)
@given(wishes(with_prompts=True), st.integers(0, 150), st.integers(1, 100))
def test_a_lowered_limit_holds_for_what_starts_from_then_on(
    wanted: list[Wish], slack: int, percent: int
) -> None:
    *before, last = wanted
    high = most(wanted) + slack
    control, brute = filled(before, high)
    control.limit = brute.limit = max(
        high * percent // 100, last.num_sequences * last.target_length
    )
    assert ask(control, last, last.arrival) == brute.earliest_start(last, last.arrival)


@pytest.mark.parametrize("case_id", ["burst at cold start", "mixed lengths"])
def test_worked_starts(case_id: str) -> None:
    given_, expected = CASES[case_id]["inputs"], CASES[case_id]["expected"]
    lengths = given_["S"] if isinstance(given_["S"], list) else [given_["S"]] * len(given_["m"])
    control = LoadControl(given_["W_lim"])
    starts = []
    for m, length, arrival in zip(given_["m"], lengths, given_["arrival_step"], strict=True):
        starts.append(control.earliest_start(MicroBatch(m, length, arrival)))
        control.add(MicroBatch(m, length, starts[-1]))
    assert starts == expected["start_steps"]
    assert control.peak() == expected["max_load"]
    if "last_end_step" in expected:
        assert (
            control.load_at(expected["last_end_step"])
            > 0
            == control.load_at(expected["last_end_step"] + 1)
        )


def test_a_micro_batch_above_the_limit_is_refused_by_name() -> None:
    given_ = CASES["limit below one micro-batch"]["inputs"]
    control = LoadControl(given_["W_lim"])
    with pytest.raises(CapacityError, match=r"40 tokens.*limit of 39") as caught:
        control.earliest_start(MicroBatch(given_["m"][0], given_["S"], 0))
    assert caught.value.code == "exceeds_load_limit"
    assert not control


def test_worked_closed_form() -> None:
    given_, expected = CASES["closed form"]["inputs"], CASES["closed form"]["expected"]
    interval = FixedInterval.of(given_["B"], given_["S"], given_["F"])
    assert interval.num_sequences == expected["M"]
    assert interval.num_micro_batches == expected["n_micro"]
    assert interval.peak == expected["W_stabilised"] == expected["closed_form"]
    assert interval.peak / (given_["B"] * given_["S"]) == pytest.approx(expected["ratio"], rel=1e-9)
    assert interval.interval == expected["first_wait_steps"]


def test_worked_interval_that_does_not_divide() -> None:
    given_ = CASES["interval does not divide length"]["inputs"]
    expected = CASES["interval does not divide length"]["expected"]
    interval = FixedInterval.of(given_["B"], given_["S"], given_["F"])
    assert interval.num_sequences == given_["M"]
    assert interval.peak == expected["W_peak"] != expected["closed_form_invalid"]


def played(interval: FixedInterval, num_micro_batches: int) -> LoadControl:
    control = LoadControl(1)
    for k in range(num_micro_batches):
        control.add(
            MicroBatch(interval.num_sequences, interval.target_length, k * interval.interval)
        )
    return control


def test_worked_fixed_interval_from_a_cold_start() -> None:
    given_ = CASES["fixed interval from a cold start"]["inputs"]
    expected = CASES["fixed interval from a cold start"]["expected"]
    interval = FixedInterval(given_["m"], given_["F"], given_["S"])
    assert [k * interval.interval for k in range(given_["n"])] == expected["start_steps"]
    assert played(interval, given_["n"]).peak() == interval.peak == expected["max_load"]


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(1, 200), st.integers(1, 60), st.integers(1, 60))
def test_fixed_intervals_peak_where_they_say(batch_size: int, length: int, interval: int) -> None:
    interval = min(interval, length)
    fixed = FixedInterval.of(batch_size, length, interval)
    assert played(fixed, fixed.num_micro_batches + 3).peak() == fixed.peak
    if length % interval == 0 and batch_size * interval % length == 0:
        assert 2 * fixed.peak == batch_size * (length + interval)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(1, 200), st.integers(1, 60), st.integers(1, 60), st.integers(1, 4000))
def test_rounding_never_lifts_a_fixed_interval_above_its_limit(
    batch: int, length: int, interval: int, limit: int
) -> None:
    interval = min(interval, length)
    free = FixedInterval.of(batch, length, interval)
    if FixedInterval(1, interval, length).peak > limit:
        with pytest.raises(CapacityError):
            FixedInterval.of(batch, length, interval, limit)
        return
    held = FixedInterval.of(batch, length, interval, limit)
    assert held.peak <= limit
    one_more = FixedInterval(held.num_sequences + 1, interval, length)
    assert held == free or one_more.peak > limit


@pytest.mark.parametrize("interval", [0, 17])
def test_an_interval_beyond_the_length_is_refused(interval: int) -> None:
    with pytest.raises(ConfigError, match=r"1\.\.16"):
        FixedInterval.of(8, 16, interval)


@settings(max_examples=examples(500, share=8), deadline=None)
@given(
    wishes(with_prompts=True),
    st.integers(0, 150),
    st.lists(st.integers(0, 12), min_size=80, max_size=80),
)
def test_what_fits_under_a_falling_limit(wanted: list[Wish], slack: int, falls: list[int]) -> None:
    *before, last = wanted
    limit = most(wanted) + slack
    control, brute = filled(before, limit)
    batch = last.at(brute.latest_start)
    falling = [limit - fallen for fallen in itertools.accumulate(falls)]

    def limit_at(step: int) -> int:
        return falling[min(step - batch.start, len(falling) - 1)]

    steps = range(batch.start, batch.end + 1)
    assert control.fits(batch, limit_at) == all(
        brute.load[step] + batch.load_at(step) <= limit_at(step) for step in steps
    )


@settings(max_examples=examples(1000, share=8), deadline=None)
@given(
    wishes(with_prompts=True),
    st.lists(st.integers(0, 2), min_size=14, max_size=14),
    st.integers(0, 60),
)
def test_parts_of_split_sequences_never_exceed_the_limit(
    wanted: list[Wish], parts: list[int], slack: int
) -> None:
    """Part 0 of a wish is all of it."""
    batches = [
        wish.at(wish.arrival) if part == 0 else wish.at(wish.arrival).part(8 * part - 8, 8)
        for wish, part in zip(wanted, parts, strict=False)
    ]
    limit = max(1, *(batch.peak for batch in batches)) + slack
    control, brute = LoadControl(limit), BruteForce(limit)
    for batch in batches:
        started = replace(batch, start=control.earliest_start(batch))
        assert started.start >= max(batch.start, brute.latest_start)
        assert brute.fits(started) and control.fits(started, lambda step: limit)
        control.add(started)
        brute.add(started)
    assert control.peak() == max(brute.load.values())
    for step in range(max(brute.load) + 2):
        assert control.load_at(step) == brute.load[step]


def test_parts_add_up_to_their_sequence() -> None:
    batch = MicroBatch(2, 30, 5, 7)
    parts = [batch.part(first, 8) for first in range(0, 32, 8)]
    for step in range(40):
        assert sum(part.load_at(step) for part in parts) == batch.load_at(step)
    assert [part.peak for part in parts] == [16, 16, 16, 12]
