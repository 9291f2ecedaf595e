"""One run of one mode, inside the MPI job that ``benchmarks/schedule.py`` starts for it."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastdecode import LLM, SamplingParams
from fastdecode.core.trace import NoTrace
from fastdecode.schedule.times import MeasuredTimes, RPartTime

# With two lanes and S ≈ R a lane has no time to spare for the link: neither
# part would be busy all the time.
NUM_LANES = 3
BLOCK_SIZE = 32
# Much KV cache for little S-part, so that they are in balance at short lengths
# even on one core each.
SHAPE = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8,
    "head_dim": 64, "num_key_value_heads": 8, "vocab_size": 512, "torch_dtype": "float32",
}  # fmt: skip
NUM_BINS = 24


@dataclass(frozen=True)
class Job:
    """One run of one mode."""

    model: str
    mode: str
    batch: int
    """B, over all lanes."""
    length: int
    """S, tokens that a sequence has at its end."""
    num_requests: int
    s_core: int

    @property
    def interval(self) -> int:
        """F: sixteen micro-batches of a lane are spread evenly over S steps."""
        return -(-self.length // min(16, self.batch // NUM_LANES))

    @property
    def limit(self) -> int:
        """W_lim = B·(S + F)/2."""
        return self.batch * (self.length + self.interval) // 2

    @property
    def middle(self) -> tuple[int, int]:
        """The output tokens between which throughput is taken."""
        return self.batch * self.length, (self.num_requests - self.batch) * self.length


# What a step's parts took: decoding sequences, prompt tokens, S-part in s,
# cached tokens attended, R-part in s.
Observation = tuple[int, int, float, int, float]
# A lane's step: lane, time of its end, tokens drawn, load over all lanes.
LaneStep = tuple[int, float, int, int]


class Records(NoTrace):
    """What happened, told as a trace, and by ``Times``."""

    def __init__(self) -> None:
        self.observed: list[Observation] = []
        self.loads: list[int] = []
        self.on_link: list[float] = []
        self.steps: list[LaneStep] = []

    def clear(self) -> None:
        for record in (self.observed, self.loads, self.on_link, self.steps):
            record.clear()

    def sampled(self, lane: int, step: int, num_tokens: int, start_s: float, end_s: float) -> None:
        self.steps.append((lane, end_s, num_tokens, self.loads[-1]))

    def attended(
        self,
        worker: int,
        lane: int,
        step: int,
        layer: int,
        sent_s: float,
        arrived_s: float,
        compute_s: float,
    ) -> None:
        self.on_link.append(arrived_s - sent_s - compute_s)

    def load(self, at_s: float, num_running: int, num_waiting: int, num_cached_tokens: int) -> None:
        self.loads.append(num_cached_tokens)


class Times(MeasuredTimes):
    """Keeps what is measured as it is, too."""

    def __init__(self, records: Records) -> None:
        super().__init__()
        self._records = records

    def observe(
        self,
        num_decoding: int,
        num_prompt_tokens: int,
        s_part_s: float,
        r_parts: Mapping[int, RPartTime],
    ) -> None:
        super().observe(num_decoding, num_prompt_tokens, s_part_s, r_parts)
        for part in r_parts.values():
            seen = (num_decoding, num_prompt_tokens, s_part_s, part.load_tokens, part.compute_s)
            self._records.observed.append(seen)


def run_job(job: Job) -> dict[str, Any]:
    """What the S-worker's rank does."""
    os.sched_setaffinity(0, {job.s_core})
    records = Records()
    options: dict[str, Any] = {
        "dtype": "float32", "lanes": NUM_LANES, "max_num_sequences": job.batch,
        "schedule": job.mode, "load_limit": job.limit, "expected_output_tokens": job.length,
        "block_size": BLOCK_SIZE,
    }  # fmt: skip
    with LLM(job.model, trace=records, times=Times(records), prefix_cache="off", **options) as llm:
        # compiles
        llm.generate([[1]] * 2, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        records.clear()
        params = SamplingParams(temperature=0, max_tokens=job.length, ignore_eos=True)
        began = time.perf_counter()
        outputs = llm.generate([[1 + i % 500] for i in range(job.num_requests)], params)
        total_s = time.perf_counter() - began
    assert all(len(output.completions[0].token_ids) == job.length for output in outputs)
    return {
        "total_s": total_s,
        "tokens_per_s": calm_tokens_per_s(job, records.steps),
        "load_peak_tokens": max(records.loads),
        "load_mean_tokens": statistics.fmean(records.loads),
        # An answer that came at once: the others wait for their turn, here or there.
        "link_s": SHAPE["num_hidden_layers"] * statistics.quantiles(records.on_link, n=10)[0],
        "s_busy": sum(each[2] for each in records.observed) / total_s,
        "r_busy": sum(each[4] for each in records.observed) / total_s,
        "observed": records.observed[num_first(job, records.observed) :],
    }


def num_first(job: Job, observed: Sequence[Observation]) -> int:
    """Steps that the first B·S tokens take. In them the R-worker writes to
    memory for the first time, which costs."""
    tokens = itertools.accumulate(each[0] for each in observed)
    return sum(1 for count in tokens if count < job.batch * job.length)


def in_the_middle(job: Job, counts: Iterable[int]) -> list[bool]:
    """Which steps, of so many tokens each, lie between the first B·S tokens and
    the last; all, if there are no more."""
    low, high = job.middle
    return [low >= high or low < count <= high for count in itertools.accumulate(counts)]


def calm_tokens_per_s(job: Job, steps: Sequence[LaneStep]) -> float:
    """Throughput in the middle of a run. Each step counts with the median time
    of the steps at about its load, so that what other processes take away now
    and then is left out."""
    last: dict[int, float] = {}
    taken: list[tuple[int, float, int]] = []  # load, seconds, tokens
    for (lane, end_s, num_tokens, load), inside in zip(
        steps, in_the_middle(job, (step[2] for step in steps)), strict=True
    ):
        if inside and lane in last:
            taken.append((load, end_s - last[lane], num_tokens))
        last[lane] = end_s
    taken.sort()
    width = max(1, len(taken) // NUM_BINS)
    bins = [taken[first : first + width] for first in range(0, len(taken), width)]
    seconds = sum(len(part) * statistics.median(each[1] for each in part) for part in bins)
    return NUM_LANES * sum(num_tokens for _, _, num_tokens in taken) / seconds
