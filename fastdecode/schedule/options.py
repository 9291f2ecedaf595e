"""Options of scheduling. Imports little: the command line needs it for its help."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastdecode.core.config.groups import SCHEDULES, Batching
from fastdecode.schedule.admission.load_control import FixedInterval

MODES = tuple(mode for mode in SCHEDULES if mode != "auto")

# Micro-batches that a fixed interval keeps running: a peak 6% above the mean load, and a crowd that
# starts within 1/16 of a sequence's steps.
_MICRO_BATCHES = 16


@dataclass(frozen=True)
class ScheduleOptions:
    """Options of a scheduler. The load limit (W_lim) of ``batching`` holds over all lanes and
    R-workers. None follows step times, or else is half of what a full batch has if all of it ends
    together."""

    batching: Batching
    split_tokens: int | None = None
    """Tokens of the parts, on several R-workers, into which longer sequences are split. A multiple
    of the KV block size."""
    max_closed_rows: int = 1 << 19
    """Most queries of prompts in a step that go to an R-worker which does not store their tokens,
    and as many of decoding sequences, over all lanes."""
    whole_prompts: bool = False
    """A prompt begins in a step that has room for all of it, or in which no other runs."""

    def __post_init__(self) -> None:
        assert self.batching.schedule in SCHEDULES and self.batching.lanes is not None

    @property
    def num_lanes(self) -> int:
        assert self.batching.lanes is not None
        return self.batching.lanes

    @property
    def lane_size(self) -> int:
        """Return the most sequences of a lane."""
        return -(-self.batching.max_num_sequences // self.num_lanes)

    def stored_tokens(self, block_size: int) -> int:
        """Return the most tokens that a lane's step stores: its own, and those before them in
        blocks that forks share, of which each sequence gets a copy."""
        return self.batching.step_tokens + self.lane_size * (block_size - 1)

    def with_lanes(self, num_lanes: int) -> ScheduleOptions:
        return replace(self, batching=replace(self.batching, lanes=num_lanes))

    def fixed_interval(self) -> FixedInterval:
        """Return a lane's micro-batches.

        Raises:
            ConfigError: If the interval is longer than a sequence.
            CapacityError: If the load limit is too low for one sequence every F steps.
        """
        length, limit = self.batching.expected_output_tokens, self.batching.load_limit
        assert length is not None
        interval = -(-length // min(_MICRO_BATCHES, self.lane_size))
        a_lanes = None if limit is None else limit // self.num_lanes
        return FixedInterval.of(self.lane_size, length, interval, a_lanes)
