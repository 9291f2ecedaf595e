"""When a job will be done: within a fifth, from its first tenth on, but for the end
of jobs whose answers differ most."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import pytest

from fastdecode.core.answer_lengths import EndedAnswers, LengthTable, few_limits, spread_evenly
from fastdecode.core.remaining_time import JobCounts, TokenTimes, remaining_s

MARKS = tuple(tenth / 10 for tenth in range(1, 10))
MEAN = 150


@dataclass(frozen=True)
class Shape:
    """A job in virtual time: what its answers get, and what its steps cost."""

    lengths: list[int]
    most: int | None
    """Tokens that an answer may get."""
    width: int = 64
    prompt: int = 200
    prompt_s: float = 0.0003
    step_s: float = 0.15
    """Seconds of a step with a full batch."""
    fixed: float = 0.5
    """The share of it that doesn't depend on how many sequences run."""


def samples(job: Shape) -> Iterator[tuple[float, JobCounts, int]]:
    """Seconds, counts and output tokens, whenever an answer began or ended, and at
    least once in 32 steps."""
    waiting = list(reversed(job.lengths))
    most = job.most or 1 << 30
    running: list[tuple[int, int]] = []  # the rounds at which each ends and began
    now_s, rounds, prompts, outputs, done = 0.0, 0, 0, 0, 0
    ended = EndedAnswers()
    each_s = job.step_s * (1.0 - job.fixed) / job.width
    num = len(job.lengths)
    while waiting or running:
        while waiting and len(running) < job.width:
            running.append((rounds + min(waiting.pop(), most), rounds))
            prompts += job.prompt
            now_s += job.prompt * job.prompt_s
        steps = min(32, min(running)[0] - rounds)
        rounds += steps
        now_s += steps * (job.step_s * job.fixed + each_s * len(running))
        outputs += steps * len(running)
        for end, begin in running:
            if end == rounds:
                ended.add(end - begin, is_cut=end - begin == most)
                done += 1
        running = [each for each in running if each[0] > rounds]
        ages = Counter((rounds - begin, job.most or 0) for _, begin in running)
        limits = {job.most or 0: num}
        yield now_s, JobCounts(num, done, ages, prompts, ended, limits, num), outputs


def judged(job: Shape, marks: tuple[float, ...] = MARKS) -> list[tuple[float, float]]:
    """Return the ETA and the truth, in seconds, at these shares of a job's time."""
    *_, (end_s, _, _) = samples(job)
    left, found, times = list(marks), [], TokenTimes()
    for now_s, counts, outputs in samples(job):
        times.add(now_s, counts.prompt_tokens, outputs, counts.num_running)
        while left and now_s >= left[0] * end_s:
            left.pop(0)
            found.append((remaining_s(counts, times) or 0.0, end_s - now_s))
    return found


def _log_normal(sigma: float) -> Callable[[random.Random], float]:
    return lambda rng: MEAN * math.exp(rng.gauss(-sigma * sigma / 2, sigma))


LENGTHS: Mapping[str, Callable[[random.Random], float]] = {
    "log-normal, sigma 0.25": _log_normal(0.25),
    "log-normal, sigma 0.5": _log_normal(0.5),
    "log-normal, sigma 0.8": _log_normal(0.8),
    "log-normal, sigma 1": _log_normal(1.0),
    "exponential": lambda rng: rng.expovariate(1 / MEAN),
    "100 to 300": lambda rng: rng.uniform(100, 300),
    "short and long": lambda rng: rng.gauss(*((40, 10) if rng.random() < 0.6 else (400, 60))),
}


def drawn_shape(kind: str, seed: int) -> Shape:
    """A job whose answers have such lengths; all else is drawn, too."""
    rng = random.Random(f"{kind} {seed}")
    num = rng.choice([640, 1000, 1500, 3000])
    return Shape(
        [max(1, round(LENGTHS[kind](rng))) for _ in range(num)],
        most=rng.choice([None, 1024, 512, 256]),
        width=rng.choice([32, 64, 128]),
        prompt=rng.randint(50, 400),
        fixed=rng.uniform(0.2, 0.8),
    )


def is_right(estimate: float, true: float) -> bool:
    """Within a fifth."""
    return abs(estimate - true) <= 0.2 * true


WIDTH, JOBS = 64, 8
LEAST_RIGHT = {"log-normal, sigma 0.8": 0.75, "log-normal, sigma 1": 0.55, "exponential": 0.75}
"""The part of all estimates; the longest of a few answers can't be foreseen."""
CLOSE = tuple(share / 40 for share in range(4, 36))


def shares(num: int, seed: int = 5) -> list[float]:
    """From 0 to 1, ``WIDTH`` in turn all over it: the first lines of a job are like
    the others."""
    rng, drawn = random.Random(seed), []
    while len(drawn) < num:
        block = [(i + rng.random()) / WIDTH for i in range(WIDTH)]
        rng.shuffle(block)
        drawn += block
    return drawn[:num]


def spread_lengths(num: int, sigma: float, most: int = 1024) -> list[int]:
    """Log-normal, 150 on average before they are cut at ``most``."""
    normal = NormalDist(-(sigma**2) / 2, sigma)
    every = (150 * 2.718281828 ** normal.inv_cdf(share) for share in shares(num))
    return [max(1, min(most, round(length))) for length in every]


def jobs() -> dict[str, Shape]:
    rng = random.Random(5)
    even = [rng.randint(100, 300) for _ in range(1200)]
    return {
        "all of the same length": Shape([200] * 1000, 200),
        "long prompts": Shape([40] * 1000, 40, prompt=4000),
        "the same, no limit": Shape([200] * 1000, None),
        "a bit spread, few": Shape(spread_lengths(640, 0.25), None),
        "a bit spread": Shape(spread_lengths(1500, 0.25), 1024),
        "spread": Shape(spread_lengths(1500, 0.5), 1024),
        "widely spread and cut": Shape(spread_lengths(1500, 1.0, 256), 256),
        "between 100 and 300": Shape(even, 300),
    }


@pytest.mark.parametrize("name", jobs())
def test_the_estimate_is_within_a_fifth(name: str) -> None:
    estimate = judged(jobs()[name], CLOSE)
    assert len(estimate) == len(CLOSE)
    assert [(ours, true) for ours, true in estimate if not is_right(ours, true)] == []


@pytest.mark.parametrize("kind", LENGTHS)
def test_most_drawn_jobs_have_a_right_estimate_at_each_tenth(kind: str) -> None:
    found = [judged(drawn_shape(kind, seed)) for seed in range(JOBS)]
    right = [is_right(*each) for job in found for each in job]
    assert len(right) == JOBS * len(MARKS)
    assert sum(right) >= LEAST_RIGHT.get(kind, 0.9) * len(right)


def test_nothing_is_known_before_anything_ran() -> None:
    times = TokenTimes()
    assert remaining_s(JobCounts(10, 0, limits={10: 10}, num_lines=10), times) is None
    times.add(3.0, 0, 30, 5)
    times.add(6.0, 0, 60, 5)
    running = {(6, 0): 5}
    unlimited = JobCounts(10, 0, running, limits={0: 10}, num_lines=10)
    estimate = remaining_s(unlimited, times)
    assert estimate is not None and estimate > 10, "none has ended: answers may be long"
    assert remaining_s(JobCounts(10, 10), times) == 0


def test_limits_are_taken_where_no_answer_has_ended() -> None:
    times = TokenTimes()
    times.add(1.0, 0, 50, 50)
    times.add(10.0, 0, 500, 50)
    counts = JobCounts(100, 0, {(10, 20): 50}, limits={20: 100}, num_lines=100)
    assert remaining_s(counts, times) == pytest.approx(30.0, rel=0.05)


def test_a_line_may_have_several_answers() -> None:
    times = TokenTimes()
    times.add(1.0, 0, 50, 50)
    times.add(10.0, 0, 500, 50)
    counts = JobCounts(50, 0, {(10, 20): 50}, limits={20: 100}, num_lines=50)
    assert counts.num_waiting == 50
    assert remaining_s(counts, times) == pytest.approx(30.0, rel=0.05)


def test_the_cost_of_a_round_shows_when_the_batch_empties() -> None:
    times, now_s, outputs = TokenTimes(), 0.0, 0
    for num_running in [64] * 40 + [48, 32, 16, 8, 4]:
        now_s += 20 * (0.08 + 0.0005 * num_running)
        outputs += 20 * num_running
        times.add(now_s, 0, outputs, num_running)
    costs = times.of()
    assert costs.round == pytest.approx(0.08, rel=0.15)
    assert costs.output_token == pytest.approx(0.0005, rel=0.4)


def test_time_in_which_nothing_ran_counts_too() -> None:
    times = TokenTimes()
    times.add(0.1, 0, 1, 1)
    times.add(10.0, 0, 100, 1)
    times.add(20.0, 0, 100, 1)
    costs = times.of()
    assert costs.output_token + costs.round > 0.15


@pytest.mark.parametrize("limit", [0, 50])
def test_prompts_alone_are_no_basis_of_an_estimate(limit: int) -> None:
    times = TokenTimes()
    for seconds in range(4, 40, 4):
        times.add(seconds, 1000 * seconds, 0, 2)
        counts = JobCounts(10, 0, {(0, limit): 2}, 1000, limits={limit: 10}, num_lines=10)
        assert remaining_s(counts, times) is None


@pytest.mark.parametrize("compiling_s", [0.5, 36, 177, 3600])
@pytest.mark.parametrize("prompt_tokens", [0, 10, 400])
def test_time_until_the_first_tokens_is_no_cost_of_theirs(
    compiling_s: float, prompt_tokens: int
) -> None:
    times, estimates = TokenTimes(), []
    for step in range(60):
        now_s = step * 0.5 if step < 2 else compiling_s + step * 0.5
        tokens = 0 if step < 2 else 8 * (step - 1)
        times.add(now_s, prompt_tokens * (step > 1), tokens, 8)
        running = {(tokens // 8, 80): 8}
        counts = JobCounts(8, 0, running, prompt_tokens, limits={80: 8}, num_lines=8)
        estimates.append(((80 - tokens / 8) * 0.5, remaining_s(counts, times)))
    assert all(estimate is None for _, estimate in estimates[:6]), "nothing was measured"
    for left_s, estimate in estimates[6:]:
        assert estimate == pytest.approx(left_s, rel=0.25, abs=2)


def test_running_answers_count_up_to_the_length_they_have() -> None:
    rng, ended = random.Random(1), EndedAnswers()
    running: dict[tuple[int, int], int] = {}
    for _ in range(4000):
        length, seen = round(rng.expovariate(1 / 200)), rng.randint(0, 400)
        if length <= seen:
            ended.add(length, is_cut=False)
        else:
            running[seen, 0] = running.get((seen, 0), 0) + 1
    table = LengthTable.of(ended, running)
    assert table.area(float("inf")) == pytest.approx(200, rel=0.07)
    assert table.left(300, 1 << 20) == pytest.approx(200, rel=0.15)
    assert table.share(table.length(0.3)) == pytest.approx(0.3)


def test_cut_answers_say_nothing_of_longer_ones() -> None:
    rng, ended = random.Random(1), EndedAnswers()
    for _ in range(4000):
        length = round(rng.expovariate(1 / 200))
        ended.add(min(length, 256), is_cut=length > 256)
    table = LengthTable.of(ended, {})
    assert table.area(float("inf")) == pytest.approx(200, rel=0.1)


def test_many_limits_are_counted_by_bucket() -> None:
    limits = dict.fromkeys(range(1, 3000), 2)
    few = few_limits(limits)
    assert sum(few.values()) == sum(limits.values()) and len(few) < 150
    mean = sum(length * num for length, num in few.items()) / sum(few.values())
    assert mean == pytest.approx(1500, rel=0.05)
    assert few_limits({7: 3}) == {7: 3}


def test_a_sum_of_tokens_is_spread_over_running_answers() -> None:
    spread = spread_evenly(10, 1000, {300: 4, 400: 6})
    assert sum(spread.values()) == 10 and {most for _, most in spread} == {400}
    assert sum(length * num for (length, _), num in spread.items()) == 1000
    assert not spread_evenly(0, 0, {})
    assert spread_evenly(2, -9, {}) == {(0, 0): 2}
    assert spread_evenly(1, 7, {0: 1, 20: 1}) == {(7, 0): 1}
