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
            most = min(most, self.num_seats(lane, lanes, num_waiting) + num_ending)
        return max(0, most)

    def num_seats(self, lane: Lane, lanes: Seq[Lane], num_waiting: int) -> int:
        """What is left of a lane's even share of these sequences and those that run.

        Prompts that run apart decode in one of the other lanes later. Some lane always
        has less than its share, so no sequence waits for ever."""
        num_running = sum(len(each.running) for each in lanes)
        share = -(-(num_running + num_waiting) // _num_decoding(lanes))
        return min(self.lane_size(lanes), share) - len(lane.running)

    def lane_size(self, lanes: Seq[Lane]) -> int:
        """Most sequences of each lane that decodes."""
        return -(-self.max_num_sequences // _num_decoding(lanes))


def _num_decoding(lanes: Seq[Lane]) -> int:
    return sum(not each.runs_prompts_only for each in lanes)
