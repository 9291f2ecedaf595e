"""What is chosen about scheduling, with nothing left open. Imports little: the
command line asks for it to draw up its help."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastdecode.core.config.groups import SCHEDULES, Batching
from fastdecode.schedule.admission.load_control import FixedInterval

MODES = tuple(mode for mode in SCHEDULES if mode != "auto")

# By default a fixed interval keeps so many micro-batches running: a peak 6%
# above the mean load, and a crowd that starts within 1/16 of a sequence's
# steps.
_MICRO_BATCHES = 16


@dataclass(frozen=True)
class ScheduleOptions:
    """What a scheduler is made by.

    ``batching`` names a schedule and a number of lanes; ``auto`` is by forecast. Its ``load_limit``
    (W_lim) holds over all lanes and R-workers; None: what step times say, else
    half of what a full batch has if all of it ends together.
    """

    batching: Batching
    split_tokens: int | None = None
    """Sequences that may get longer than this are split into parts of so many
    tokens, on several R-workers; a multiple of the KV block size."""
    max_closed_rows: int = 1 << 19
    """Most queries of a step that go to an R-worker which doesn't store their
    tokens: of prompts, and as many of decoding sequences, over all lanes."""

    whole_prompts: bool = False
    """A prompt begins in a step that has room for all of it, or in one in which
    no other runs."""

    def __post_init__(self) -> None:
        assert self.batching.schedule in SCHEDULES and self.batching.lanes is not None

    @property
    def num_lanes(self) -> int:
        assert self.batching.lanes is not None
        return self.batching.lanes

    @property
    def lane_size(self) -> int:
        """Most sequences of a lane."""
        return -(-self.batching.max_num_sequences // self.num_lanes)

    def stored_tokens(self, block_size: int) -> int:
        """Most tokens that a lane's step stores: its own, and those before them
        in blocks that forks share, of which each sequence gets a copy."""
        return self.batching.step_tokens + self.lane_size * (block_size - 1)

    def with_lanes(self, num_lanes: int) -> ScheduleOptions:
        """The same for another number of lanes."""
        return replace(self, batching=replace(self.batching, lanes=num_lanes))

    def fixed_interval(self) -> FixedInterval:
        """A lane's micro-batches.

        Raises:
            ConfigError: the interval is longer than a sequence.
            CapacityError: the load limit is too low for even one sequence every
                F steps.
        """
        length, limit = self.batching.expected_output_tokens, self.batching.load_limit
        assert length is not None
        interval = -(-length // min(_MICRO_BATCHES, self.lane_size))
        a_lanes = None if limit is None else limit // self.num_lanes
        return FixedInterval.of(self.lane_size, length, interval, a_lanes)
