"""Running sequences that outgrow what was forecast for them.

A sequence reserves blocks for the length that is forecast for it. If it gets longer, it reserves
more. If no room is left, the latest arrivals of its lane are suspended: their blocks are freed,
and they return to their places in the queue, to be recomputed. Where forecasts are upper bounds,
no sequence is suspended.
"""

from __future__ import annotations

from fastdecode.core.holders import Part, Residence
from fastdecode.core.sequence import Sequence
from fastdecode.schedule.admission.load_control import MicroBatch
from fastdecode.schedule.lengths import LengthPredictor
from fastdecode.schedule.plan import Lane, RunningSequence, arrival, cached_at_end
from fastdecode.schedule.reserving.ledger import BlockLedger


class Outgrown:
    """Makes room for one more token of every sequence of a lane."""

    def __init__(self, ledger: BlockLedger, lengths: LengthPredictor) -> None:
        self._ledger = ledger
        self._lengths = lengths

    def make_room(
        self, lane: Lane
    ) -> tuple[list[tuple[Sequence, Residence]], list[RunningSequence]]:
        """Serve sequences in order of arrival. Return which grow, and which are suspended."""
        grows: list[tuple[Sequence, Residence]] = []
        suspended: list[RunningSequence] = []
        for run in sorted(lane.outgrown, key=arrival):
            if run.sequence.sequence_id not in lane.running:
                continue  # suspended just now
            length = run.sequence.num_cached + 1
            if length > run.projected.target_length:
                expected = cached_at_end(run.sequence, self._lengths.expected(run.sequence))
                lane.prolong(run, MicroBatch(1, expected, lane.step, length))
            room = run.residence.num_tokens
            if length > room:
                room, given_way = self._enlarge(lane, run)
                suspended += given_way
                if room:
                    grows.append((run.sequence, run.residence.grown_to(room)))
                    run.is_open = False
            run.until = min(run.projected.target_length, room)
        return grows, suspended

    def _enlarge(self, lane: Lane, run: RunningSequence) -> tuple[int, list[RunningSequence]]:
        """Reserve more for a whole sequence: what is forecast, or just the next block.

        Returns:
            Tokens that it has room for then, 0 if it is suspended itself, and those suspended.
        """
        (part,) = run.residence.parts
        suspended: list[RunningSequence] = []
        while run.sequence.sequence_id in lane.running:
            num_tokens = self._grow(run, part)
            if num_tokens:
                lane.reserved_tokens[part.holder] += num_tokens - part.end
                return num_tokens, suspended
            # Only this lane is at rest; the others' sequences may be in the middle of a step.
            here = (
                r for r in lane.running.values() if r.is_open and r.residence.is_on(part.holder)
            )
            last = max(here, key=arrival)
            suspended.append(last)
            lane.leave(last, at=lane.step)
            self._ledger.release(last.residence, last.sequence)
        return 0, suspended

    def _grow(self, run: RunningSequence, part: Part) -> int:
        """Return the tokens that it has room for then, 0 if no room is left."""
        sequence = run.sequence
        shape = self._ledger.shape
        next_block = shape.block_size * shape.blocks_for(sequence.num_cached + 1)
        safe = cached_at_end(sequence, self._lengths.safe(sequence))
        for num_tokens in (safe, min(next_block, sequence.max_cached_tokens)):
            if self._ledger.grow(part, num_tokens - part.first_token):
                return num_tokens
        return 0
