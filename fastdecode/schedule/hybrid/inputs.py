"""Inputs of the rule: the unfinished sequences, and what steps cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import islice

from fastdecode.core.holders import HolderId
from fastdecode.core.sequence import Sequence
from fastdecode.schedule.hybrid.forecast import Costs, Known, Work
from fastdecode.schedule.lengths import LengthPredictor
from fastdecode.schedule.reserving.ledger import BlockLedger
from fastdecode.schedule.running import Lane, RunningSequence, cached_at_end
from fastdecode.schedule.times import StepTimes

_HORIZON = 256
"""Sequences that wait, of which the rule is told: the first ones."""


@dataclass(frozen=True)
class Guess:
    """What is taken for true of R-workers before one has attended anything: of
    slow ones."""

    token_bytes: float
    """That one has to read of a cached token, over all layers."""
    bytes_per_s: float = 50e9
    """That each reads."""
    round_trip_s: float = 0.01
    """For all layers."""


class HybridInputs:
    """Tells what is known and what steps cost.

    Args:
        device: the holder that is the device.
        ledger: counts what is reserved.
        lengths: how long sequences will get.
        times: what steps take.
        guess: of R-workers that ``times`` knows nothing of; None: it knows all.
        max_num_sequences: that run at once.
    """

    def __init__(
        self,
        device: HolderId,
        ledger: BlockLedger,
        lengths: LengthPredictor,
        times: StepTimes,
        guess: Guess | None,
        max_num_sequences: int,
    ) -> None:
        self._device = device
        self._ledger = ledger
        self._lengths = lengths
        self._times = times
        self._guess = guess
        self._max_num_sequences = max_num_sequences

    def known(self, lanes: Iterable[Lane], waiting: Iterable[Sequence]) -> Known:
        """All sequences that aren't over."""
        home: list[Work] = []
        away: list[Work] = []
        for run in (run for lane in lanes for run in lane.running.values()):
            side = home if run.residence.is_on(self._device) else away
            side.append(self._running(run))
        return Known(
            tuple(home),
            tuple(away),
            tuple(self._waiting(sequence) for sequence in islice(waiting, _HORIZON)),
            home_blocks=self._ledger.capacity.blocks(self._device),
            away_blocks=tuple(map(self._ledger.capacity.blocks, self.r_workers)),
            away_free=tuple(map(self._ledger.free_blocks, self.r_workers)),
            most_running=self._max_num_sequences,
        )

    def costs(self) -> Costs | None:
        """Of steps, from what was measured; None while too little is known."""
        if math.isnan(self._times.s_part_s(1)) or not self.r_workers:
            return None
        round_trip_s = self._times.link_s(1)
        if round_trip_s == math.inf:
            round_trip_s = 0.0 if self._guess is None else self._guess.round_trip_s
        workers = self.r_workers
        blocks = [self._ledger.capacity.blocks(worker) for worker in workers]
        r_part = partial(self._r_part_s, workers, blocks)
        return Costs(self._times.s_part_s, self._device_s, r_part, round_trip_s)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether the device has room for a sequence that waits, now."""
        return self._waiting(sequence).num_blocks <= self._ledger.free_blocks(self._device)

    @property
    def r_workers(self) -> Seq[HolderId]:
        """Those that aren't lost, and have room for anything."""
        return [h for h in self._ledger.capacity.present if h != self._device]

    def _device_s(self, load: float) -> float:
        return self._times.r_part_s(self._device, round(load))

    def _r_part_s(
        self, workers: Seq[HolderId], blocks: Seq[int], num_sequences: int, load: float
    ) -> float:
        """They are filled evenly, by their memory, up to a sequence."""
        one, in_all = load / max(1, num_sequences), max(1, sum(blocks))
        shares = [min(load, load * own / in_all + one) for own in blocks]
        return max(
            (self._one_s(w, share) for w, share in zip(workers, shares, strict=True)), default=0.0
        )

    def _one_s(self, worker: HolderId, load: float) -> float:
        measured_s = self._times.r_part_s(worker, round(load))
        if measured_s or self._guess is None:
            return measured_s
        return load * self._guess.token_bytes / self._guess.bytes_per_s

    def _running(self, run: RunningSequence) -> Work:
        length = len(run.sequence.token_ids)
        num_blocks = self._ledger.shape.blocks_for(run.residence.num_tokens)
        num_steps = max(1, run.projected.target_length + 1 - length)
        return Work(num_steps, length, num_blocks, run.sequence.num_uncached)

    def _waiting(self, sequence: Sequence) -> Work:
        num_steps = self._lengths.expected(sequence) - sequence.num_generated
        reserved = cached_at_end(sequence, self._lengths.safe(sequence))
        num_blocks = self._ledger.shape.blocks_for(reserved)
        length = sequence.num_tokens
        return Work(max(1, num_steps), length, num_blocks, length)
