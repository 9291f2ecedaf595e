"""What an engine has done since it started, in numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.replicas import ReplicaFigures
from fastdecode.engine.latency import LatencyHistogram
from fastdecode.schedule.cache.rates import TierCounts
from fastdecode.schedule.hybrid.control import HybridCounts
from fastdecode.schedule.life.adoption import AdoptionCounts
from fastdecode.schedule.life.sequences import SequenceCounts

if TYPE_CHECKING:
    from sworker.swap.figures import SwapFigures  # would bring torch to who controls instances


@dataclass(frozen=True)
class AttachedCounts:
    """What R-workers had kept of a run that was cut off."""

    num_sequences: int = 0
    """Unfinished sequences of the run."""
    num_tokens: int = 0
    """Their tokens, of prompts and answers."""
    num_held_sequences: int = 0
    """Sequences with kept tokens."""
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
    r_busy_s: float = 0.0
    """Every R-worker's compute, summed."""
    r_busy_each_s: dict[HolderId, float] = field(default_factory=lambda: defaultdict(float))
    """The same of each holder."""
    load_sum: int = 0
    """The load W, cached tokens of all running sequences, summed over the ends of all steps."""
    load_peak: int = 0
    ttft: LatencyHistogram = field(default_factory=LatencyHistogram)
    """From a request's submission to the first token, of every sequence that has one."""
    tpot: LatencyHistogram = field(default_factory=LatencyHistogram)
    """(end to end - TTFT) / (n - 1) of every sequence that ended with n > 1 tokens."""
    num_rejoined: int = 0
    """R-workers that took the place of lost ones."""
    replicas: ReplicaFigures | None = None
    """What has become of replicas; None: there are none."""
    resumed: AdoptionCounts = field(default_factory=AdoptionCounts)
    """What went on from them."""
    attached: AttachedCounts | None = None
    """What R-workers had kept of the run that was gone on with; None: none was."""
    hybrid: HybridCounts | None = None
    """With KV on both sides: what was done where."""
    num_ahead: int = 0
    """Steps that began with tokens that were still on their way to the host."""
    tiers: TierCounts = field(default_factory=TierCounts)
    """Kept blocks that were moved between tiers."""
    swap: SwapFigures | None = None
    """What was copied of lanes' KV, in the first stage; None: nothing is
    swapped."""
    num_handed_over: int = 0
    """With several instances: requests whose prompts were fetched by another one."""
    num_failed_fetches: int = 0
    """Those whose prompts couldn't be, and were run again."""
    num_moved: int = 0
    """And those that another one went on with after a failure."""
    num_role_changes: int = 0
    """Instances that were given another role."""
    fetched_bytes: int = 0
    """K and V of prompts that R-workers have fetched from other instances'."""
    fetch_s: float = 0.0
    """From when each was asked for to when it was there, summed."""
    fetching_s: float = 0.0
    """In which any of them was under way, as the engine hears of it: between two steps."""

    def begin_anew(self) -> None:
        """Numbers and times are told from now on: of what runs for somebody else."""
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

    def count_step(self, each_s: Mapping[HolderId, float]) -> None:
        """A step is over, for which each holder computed so long."""
        self.num_steps += 1
        self.r_compute_s += max(each_s.values(), default=0.0)
        self.r_busy_s += sum(each_s.values())
        for holder, busy_s in each_s.items():
            self.r_busy_each_s[holder] += busy_s

    def count_time(self, elapsed_s: float, wait_s: float, *, is_prefill: bool) -> None:
        """So much time has passed, of which the S-worker waited so long;
        ``is_prefill``: part of a prompt ran in it."""
        self.wait_s += wait_s
        if is_prefill:
            self.prefill_s += elapsed_s
        else:
            self.decode_s += elapsed_s

    def count_load(self, load: int, num_prompt_tokens: int) -> None:
        """A step is over, with so many tokens cached; so many of prompts have run in it."""
        self.load_sum += load
        self.load_peak = max(self.load_peak, load)
        self.num_prompt_tokens += num_prompt_tokens
