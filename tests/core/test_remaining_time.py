"""When a job will be done: within a fifth, from its first tenth on, but for the end
of jobs whose answers differ most."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest

from fastdecode.core.answer_lengths import EndedAnswers, few_limits
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


def judged(job: Shape) -> list[tuple[float, float]]:
    """Return the ETA and the truth, in seconds, at each tenth of a job's time."""
    *_, (end_s, _, _) = samples(job)
    left, found, times = list(MARKS), [], TokenTimes()
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
    "all of the same length": lambda rng: 200,
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


JOBS = 6
LEAST_RIGHT = {"log-normal, sigma 0.8": 0.75, "log-normal, sigma 1": 0.55, "exponential": 0.75}
"""The part of all estimates; the longest of a few answers can't be foreseen."""


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


@pytest.mark.parametrize("compiling_s", [0.5, 3600])
@pytest.mark.parametrize("prompt_tokens", [0, 400])
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


def test_many_limits_are_counted_by_bucket() -> None:
    limits = dict.fromkeys(range(1, 3000), 2)
    few = few_limits(limits)
    assert sum(few.values()) == sum(limits.values()) and len(few) < 150
    mean = sum(length * num for length, num in few.items()) / sum(few.values())
    assert mean == pytest.approx(1500, rel=0.05)
    assert few_limits({7: 3}) == {7: 3}
