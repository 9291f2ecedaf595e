"""When a job will be done: within a fifth, from its first tenth on."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

import pytest

from fastdecode.core.remaining_time import (
    NO_LENGTHS,
    JobCounts,
    TokenTimes,
    remaining_s,
)

WIDTH = 64


class SimulatedJob:
    """Continuous batching in virtual time: a prompt token takes ``prompt_s``, a
    step ``base_s`` and ``each_s`` for each sequence."""

    def __init__(
        self, lengths: list[int], prompt: int, prompt_s: float, base_s: float, each_s: float
    ) -> None:
        self.lengths, self.prompt = lengths, prompt
        self.prompt_s, self.base_s, self.each_s = prompt_s, base_s, each_s

    def counts(self, most: int | None) -> list[JobCounts]:
        """After every step."""
        waiting = list(reversed(self.lengths))
        running: list[list[int]] = []
        now_s, prompts, outputs, done = 0.0, 0, 0, NO_LENGTHS
        seen: list[JobCounts] = []
        while waiting or running:
            if waiting and len(running) < WIDTH:
                length = waiting.pop()
                running.append([length, length])
                prompts += self.prompt
                now_s += self.prompt * self.prompt_s
            now_s += self.base_s + len(running) * self.each_s
            outputs += len(running)
            running = [[left - 1, length] for left, length in running]
            ended = [length for left, length in running if not left]
            for length in ended:
                done = done.plus(length)
            running = [each for each in running if each[0]]
            num = len(self.lengths)
            limit = 0 if most is None else most * num
            seen.append(
                JobCounts(now_s, num, done.num, len(running), prompts, outputs, done, limit)
            )
        return seen


def shares(num: int, seed: int = 5) -> list[float]:
    """From 0 to 1, ``WIDTH`` in turn all over it: the first lines of a job are as
    the others, since nobody knows better of them."""
    rng, drawn = random.Random(seed), []
    while len(drawn) < num:
        block = [(i + rng.random()) / WIDTH for i in range(WIDTH)]
        rng.shuffle(block)
        drawn += block
    return drawn[:num]


def spread_lengths(num: int, sigma: float, most: int = 1024) -> list[int]:
    """Log-normal, 150 on average before they are cut at ``most``."""
    normal = NormalDist(-(sigma**2) / 2, sigma)
    every = (150 * math.exp(normal.inv_cdf(share)) for share in shares(num))
    return [max(1, min(most, round(length))) for length in every]


def jobs() -> dict[str, tuple[SimulatedJob, int | None]]:
    rng = random.Random(5)
    ending = [min(400, 1 - int(150 * math.log(1 - share))) for share in shares(1500)]
    even = [rng.randint(100, 300) for _ in range(1200)]
    costs = 200, 0.0005, 0.1, 0.002
    return {
        "all of the same length": (SimulatedJob([200] * 1000, 500, 0.0005, 0.1, 0.001), 200),
        "long prompts": (SimulatedJob([40] * 1000, 4000, 0.0002, 0.1, 0.001), 40),
        "most end before the limit": (SimulatedJob(ending, 200, 0.0005, 0.1, 0.002), 400),
        "no limit is known": (SimulatedJob(ending, 200, 0.0005, 0.1, 0.002), None),
        "the same, no limit": (SimulatedJob([200] * 1000, 500, 0.0005, 0.1, 0.001), None),
        "a bit spread, few": (SimulatedJob(spread_lengths(640, 0.25), *costs), None),
        "a bit spread": (SimulatedJob(spread_lengths(1500, 0.25), *costs), 1024),
        "spread": (SimulatedJob(spread_lengths(1500, 0.5), *costs), 1024),
        "spread, no limit": (SimulatedJob(spread_lengths(4000, 0.5), *costs), None),
        "widely spread": (SimulatedJob(spread_lengths(4000, 0.8), *costs), None),
        "widely spread and cut": (SimulatedJob(spread_lengths(1500, 1.0, 256), *costs), 256),
        "between 100 and 300": (SimulatedJob(even, 300, 0.0005, 0.1, 0.002), 300),
    }


@pytest.mark.parametrize("name", jobs())
def test_the_estimate_is_within_a_fifth(name: str) -> None:
    job, most = jobs()[name]
    seen = job.counts(most)
    costs, end_s, wrong = TokenTimes(), seen[-1].elapsed_s, []
    assert end_s > 300
    for counts in seen:
        costs.add(counts.elapsed_s, counts.prompt_tokens, counts.output_tokens)
        if not 0.1 * end_s <= counts.elapsed_s <= 0.88 * end_s:
            continue  # in the last tenth the longest answer alone decides
        told = remaining_s(counts, costs)
        true_s = end_s - counts.elapsed_s
        if told is None or abs(told - true_s) > 0.2 * true_s:
            wrong.append((counts.elapsed_s, told, true_s))
    assert not wrong, wrong[:: max(1, len(wrong) // 8)]


def test_nothing_is_known_before_anything_ran() -> None:
    costs = TokenTimes()
    assert remaining_s(JobCounts(3.0, 10, 0, most_output_tokens=100), costs) is None
    costs.add(3.0, 0, 30)
    assert remaining_s(JobCounts(3.0, 10, 0, 5, 0, 30), costs) is None, "no limit, none has ended"
    told = remaining_s(JobCounts(3.0, 10, 0, 5, 0, 30, most_output_tokens=100), costs)
    assert told == pytest.approx(7.0)
    assert remaining_s(JobCounts(3.0, 10, 10, 0, 0, 30), costs) == 0


def test_time_in_which_nothing_ran_counts_too() -> None:
    costs = TokenTimes()
    costs.add(10.0, 0, 100)
    costs.add(20.0, 0, 100)
    assert costs.of()[1] > 0.15
