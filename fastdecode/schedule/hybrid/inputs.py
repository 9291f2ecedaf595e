"""Inputs of the rule: the unfinished sequences, and what steps cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

from fastdecode.core.holders import HolderId
from fastdecode.core.sequence import Sequence
from fastdecode.schedule.hybrid.forecast import Costs, Known, Work
from fastdecode.schedule.lengths import LengthPredictor
from fastdecode.schedule.reserving.ledger import BlockLedger
from fastdecode.schedule.running import Lane, RunningSequence, cached_at_end
from fastdecode.schedule.times import Prompts, StepTime

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


@dataclass(frozen=True)
class GuessedTime(StepTime):
    """Step times, guessed of R-workers until they are measured."""

    measured: StepTime
    guess: Guess
    device: HolderId

    def s_part_s(self, num_decoding: int, prompts: Prompts = ()) -> float:
        return self.measured.s_part_s(num_decoding, prompts)

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        measured_s = self.measured.r_part_s(worker, load_tokens, num_sequences)
        if measured_s or worker == self.device:
            return measured_s
        return load_tokens * self.guess.token_bytes / self.guess.bytes_per_s

    def trip_s(self, num_tokens: int) -> float:
        measured_s = self.measured.trip_s(num_tokens)
        return measured_s if measured_s < math.inf else self.guess.round_trip_s


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
        times: StepTime,
        guess: Guess | None,
        max_num_sequences: int,
    ) -> None:
        self._device = device
        self._ledger = ledger
        self._lengths = lengths
        self._times = times if guess is None else GuessedTime(times, guess, device)
        self._max_num_sequences = max_num_sequences

    def known(self, lanes: Iterable[Lane], waiting: Iterable[Sequence]) -> Known:
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
            away_free=tuple(map(self._ledger.available_blocks, self.r_workers)),
            most_running=self._max_num_sequences,
        )

    def costs(self) -> Costs | None:
        """Of steps; None while too little is known."""
        if math.isnan(self._times.s_part_s(1)) or not self.r_workers:
            return None
        room = {worker: self._ledger.capacity.blocks(worker) for worker in self.r_workers}
        return Costs.of(self._times, self._device, room)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether the device has room for a sequence that waits, now."""
        num_blocks = self._ledger.shape.blocks_for(self._reserved(sequence))
        return num_blocks <= self._ledger.available_blocks(self._device)

    def num_reused(self, sequence: Sequence) -> tuple[int, int]:
        """Tokens with which a sequence that waits could start: at home, and on R-workers."""
        cache = self._ledger.cache
        if not cache.chains.are_on:
            return 0, 0
        at_home = away = 0
        for reuse in cache.reuses(sequence, (self._reserved(sequence),)):
            if reuse.holders[0] == self._device:
                at_home = max(at_home, reuse.num_tokens)
            else:
                away = max(away, reuse.num_tokens)
        return at_home, away

    @property
    def r_workers(self) -> Seq[HolderId]:
        """Those that aren't lost, and have room for anything."""
        return [h for h in self._ledger.holders.open if h != self._device]

    def _running(self, run: RunningSequence) -> Work:
        length = len(run.sequence.token_ids)
        num_blocks = self._ledger.shape.blocks_for(run.residence.num_tokens)
        num_steps = max(1, run.projected.target_length + 1 - length)
        return Work(num_steps, length, num_blocks, run.sequence.num_uncached)

    def _waiting(self, sequence: Sequence) -> Work:
        num_steps = self._lengths.expected(sequence) - sequence.num_generated
        num_blocks = self._ledger.shape.blocks_for(self._reserved(sequence))
        length = sequence.num_tokens
        at_home, away = self.num_reused(sequence)
        return Work(max(1, num_steps), length, num_blocks, length - at_home, max(0, away - at_home))

    def _reserved(self, sequence: Sequence) -> int:
        """Tokens for which it reserves room at first."""
        return cached_at_end(sequence, self._lengths.safe(sequence))
