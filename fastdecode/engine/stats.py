"""What an engine has done since it started, and how it is: values only, which other threads and
processes may read."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.failovers import ReplicaFigures
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.schedule.cache.rates import TierCounts
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.hybrid.control import HybridCounts
from fastdecode.schedule.life.adoption import AdoptionCounts
from fastdecode.schedule.life.sequences import SequenceCounts
from fastdecode.wire.transport import loss

if TYPE_CHECKING:
    from sworker.swap.figures import SwapFigures  # would bring torch to who controls instances

LOWEST_S = 1e-6
HIGHEST_S = 1e6
GROWTH = 1.02


class LatencyHistogram:
    """Counts durations in buckets, each 2% wider than the one before: a
    percentile is off by 1% at most.

    Durations below a microsecond count as one, those above 11 days as 11 days.
    """

    def __init__(self) -> None:
        self._counts = [0] * (_bucket(HIGHEST_S) + 1)
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, duration_s: float) -> None:
        self._counts[_bucket(duration_s)] += 1
        self._num += 1

    def add_all(self, other: LatencyHistogram) -> None:
        """Add what another has counted."""
        for bucket, count in enumerate(other._counts):
            self._counts[bucket] += count
        self._num += other._num

    @property
    def counts(self) -> dict[int, int]:
        return {bucket: count for bucket, count in enumerate(self._counts) if count}

    def add_count(self, bucket: int, count: int) -> None:
        """Add ``count`` durations to a bucket. Raise IndexError if it does not exist."""
        if bucket < 0 or count < 0:
            raise IndexError(f"{count} durations in bucket {bucket}")
        self._counts[bucket] += count
        self._num += count

    def percentile(self, percent: float) -> float | None:
        """Seconds that ``percent`` of the durations don't exceed (nearest
        rank); None if there are none."""
        assert 0 < percent <= 100
        rank = math.ceil(self._num * percent / 100)
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if count and seen >= rank:
                return LOWEST_S * math.exp((bucket + 0.5) * math.log(GROWTH))
        return None


def _bucket(duration_s: float) -> int:
    return int(math.log(min(max(duration_s, LOWEST_S), HIGHEST_S) / LOWEST_S) / math.log(GROWTH))


@dataclass(frozen=True)
class AttachedCounts:
    """What R-workers had kept of a run that was cut off."""

    num_sequences: int = 0  # unfinished sequences of the run
    num_tokens: int = 0  # their tokens, of prompts and answers
    num_held_sequences: int = 0  # sequences with kept tokens
    num_held_tokens: int = 0


@dataclass
class EngineStats(SequenceCounts):
    """Totals since the engine started. Wall time while any lane runs part of a
    prompt counts as prefill, the rest as decode."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens run; those of a shared prompt count once, its last token once a sequence."""
    num_output_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    """The S-worker had nothing to do but wait for R-workers."""
    r_compute_s: float = 0.0
    """The busiest R-worker's compute of every step, summed."""
    r_busy_s: float = 0.0  # every R-worker's compute, summed
    r_busy_each_s: dict[HolderId, float] = field(default_factory=lambda: defaultdict(float))
    """The same of each holder."""
    load_sum: int = 0
    """The load W, cached tokens of all running sequences, summed over the ends of all steps."""
    load_peak: int = 0
    ttft: LatencyHistogram = field(default_factory=LatencyHistogram)
    """From a request's submission to the first token, of every sequence that has one."""
    tpot: LatencyHistogram = field(default_factory=LatencyHistogram)
    """(end to end - TTFT) / (n - 1) of every sequence that ended with n > 1 tokens."""
    num_rejoined: int = 0  # R-workers that took the place of lost ones
    replicas: ReplicaFigures | None = None
    """Events of replicas. None if there are none."""
    resumed: AdoptionCounts = field(default_factory=AdoptionCounts)
    """Sequences that continued from them."""
    attached: AttachedCounts | None = None
    """What R-workers had kept of the run that is continued. None if none is."""
    hybrid: HybridCounts | None = None  # with KV on both sides: what was done where
    num_ahead: int = 0
    """Steps that began with tokens that were still on their way to the host."""
    tiers: TierCounts = field(default_factory=TierCounts)
    """Kept blocks that were moved between tiers."""
    swap: SwapFigures | None = None
    """Copies of lanes' KV in the first stage. None without swapping."""
    num_handed_over: int = 0
    """With several instances: requests whose prompts were fetched by another one."""
    num_failed_fetches: int = 0  # those whose prompts couldn't be, and were run again
    num_moved: int = 0  # those that another one continued after a failure
    num_role_changes: int = 0  # instances that were given another role
    fetched_bytes: int = 0
    """K and V of prompts that R-workers have fetched from other instances'."""
    fetch_s: float = 0.0
    """From when each was asked for to when it was there, summed."""
    fetching_s: float = 0.0
    """In which any of them was under way, as the engine hears of it: between two steps."""

    def begin_anew(self) -> None:
        """Reset numbers and times, for another peer."""
        fresh = EngineStats()
        for each in fields(self):
            value = getattr(fresh, each.name)
            if isinstance(value, (int, float, LatencyHistogram)):
                setattr(self, each.name, value)
        self.r_busy_each_s.clear()

    @property
    def step_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def s_compute_s(self) -> float:
        """Time that wasn't spent waiting for R-workers."""
        return self.step_s - self.wait_s

    @property
    def load_mean(self) -> float:
        return self.load_sum / max(self.num_steps, 1)


@dataclass(frozen=True)
class HolderFigures:
    """A holder, which is an R-worker wherever there are R-workers."""

    name: str
    lost: str | None  # why it is lost, without its name, or None
    kv_blocks: int
    kv_blocks_used: int
    """Reserved, or in use: not those that are only kept for requests to come."""
    load_tokens: int  # cached for sequences that run
    busy_s: float  # its compute, summed over all steps


@dataclass(frozen=True)
class EngineFigures:
    lanes: int
    r_workers: tuple[HolderFigures, ...]

    def lost_with(self, why: str) -> EngineFigures:
        """Return the figures of an engine that is gone: its holders are, and unused."""
        gone = (
            replace(each, lost=each.lost or why, kv_blocks_used=0, load_tokens=0)
            for each in self.r_workers
        )
        return replace(self, r_workers=tuple(gone))


def figures_of(
    stats: EngineStats, scheduler: ContinuousScheduler, fleet: HolderPool
) -> EngineFigures:
    """Return the figures as they are between two steps."""
    loads: Counter[HolderId] = Counter()  # tokens cached for sequences that run
    for lane in scheduler.lanes:
        for run in lane.running.values():
            for part in run.residence.parts:
                cached = run.sequence.num_present - part.first_token
                loads[part.holder] += max(0, min(part.num_tokens, cached))
    holders, lost = [], fleet.lost
    for holder in map(HolderId, range(len(fleet))):
        num_blocks, name = scheduler.ledger.capacity.blocks(holder), fleet.peer(holder)
        used, why = num_blocks - scheduler.ledger.available_blocks(holder), None
        if holder in lost:
            used, why = 0, loss(name, lost[holder]).removeprefix(f"{name} is lost: ")
        busy_s = stats.r_busy_each_s[holder]
        holders.append(HolderFigures(name, why, num_blocks, used, loads[holder], busy_s))
    return EngineFigures(len(scheduler.lanes), tuple(holders))
