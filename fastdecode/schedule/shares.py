"""How many sequences may run at once, in each lane and in all."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from fastdecode.schedule.running import Lane


@dataclass(frozen=True)
class LaneShares:
    """Of the lanes' places for sequences.

    Args:
        max_num_sequences: most sequences that run at once.
        are_even: every lane gets its share of them; else whoever finds room first.
    """

    max_num_sequences: int
    are_even: bool

    def num_free(self, lane: Lane, lanes: Seq[Lane], num_waiting: int, num_ending: int) -> int:
        """Sequences for which there will be a place in a lane of these.

        Args:
            num_waiting: for a place in any of them.
            num_ending: that make place for others.
        """
        num_running = sum(len(each.running) for each in lanes)
        most = min(num_waiting, self.max_num_sequences - num_running + num_ending)
        if self.are_even and not lane.runs_prompts_only:
            # Prompts that run apart decode in one of these lanes later. Some lane
            # always has less than its share, so nobody waits for ever.
            num_lanes = sum(not each.runs_prompts_only for each in lanes)
            lane_size = -(-self.max_num_sequences // num_lanes)
            share = -(-(num_running + num_waiting) // num_lanes)
            most = min(most, min(lane_size, share) - len(lane.running) + num_ending)
        return max(0, most)
