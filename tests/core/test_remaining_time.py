"""When a job will be done: within a fifth, from the first minute on."""

from __future__ import annotations

import random

import pytest

from fastdecode.core.remaining_time import JobCounts, TokenTimes, remaining_s

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
        now_s, prompts, outputs, done, done_tokens = 0.0, 0, 0, 0, 0
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
            done, done_tokens = done + len(ended), done_tokens + sum(ended)
            running = [each for each in running if each[0]]
            num = len(self.lengths)
            limit = 0 if most is None else most * num
            seen.append(
                JobCounts(now_s, num, done, len(running), prompts, outputs, done_tokens, limit)
            )
        return seen


def jobs() -> dict[str, tuple[SimulatedJob, int | None]]:
    rng = random.Random(5)
    ending = [min(400, 1 + int(rng.expovariate(1 / 150))) for _ in range(1500)]
    even = [rng.randint(100, 300) for _ in range(1200)]
    return {
        "all of the same length": (SimulatedJob([200] * 1000, 500, 0.0005, 0.1, 0.001), 200),
        "long prompts": (SimulatedJob([40] * 1000, 4000, 0.0002, 0.1, 0.001), 40),
        "most end before the limit": (SimulatedJob(ending, 200, 0.0005, 0.1, 0.002), 400),
        "no limit is known": (SimulatedJob(ending, 200, 0.0005, 0.1, 0.002), None),
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
        if not 60 <= counts.elapsed_s <= 0.85 * end_s:
            continue  # at the end the batch is no longer full
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
