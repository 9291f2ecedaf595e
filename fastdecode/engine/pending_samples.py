"""The tokens of lanes' steps: drawn on the S-worker's device, on their way to the
host, and taken in there."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from fastdecode.core.holders import HolderId
from fastdecode.core.sequence import COMING
from fastdecode.core.trace import Trace
from fastdecode.engine.requests import Requests
from fastdecode.engine.stats import EngineStats
from fastdecode.engine.step.batch import StepBatch
from fastdecode.engine.step.lane_step import LaneStep
from fastdecode.schedule.life import events
from fastdecode.schedule.life.sequences import SequenceTable
from fastdecode.schedule.plan import Chunk
from sworker.buffers import Feed
from sworker.sampling.sampler import Drawing
from sworker.worker import SWorker


@dataclass(frozen=True)
class StepSamples:
    """Of one step."""

    step: LaneStep
    chunks: Seq[Chunk]
    """Whose, one each."""
    drawing: Drawing
    started_s: float
    ended_s: float | None
    """None: they are on their way to the host."""
    goes_ahead: bool
    """The lane's next step begins without waiting for them."""

    @property
    def done(self) -> bool:
        """Whether the step is over."""
        return self.goes_ahead or self.drawing.done

    def wait(self) -> None:
        self.drawing.wait()

    def feed(self, batch: StepBatch) -> Feed | None:
        """What the lane's next step is fed of them."""
        rows = np.flatnonzero(batch.token_ids == COMING)
        if not rows.size:
            return None
        drawn_at = {chunk.sequence.sequence_id: i for i, chunk in enumerate(self.chunks)}
        of_rows = np.searchsorted(batch.last_rows, rows).tolist()
        sources = [drawn_at[batch.chunks[i].sequence.sequence_id] for i in of_rows]
        return Feed(self.drawing.tokens, np.array(sources, np.int64), rows)


class PendingSamples:
    """Starts to draw, and takes in what was drawn.

    Args:
        s_worker: draws.
        lives: who is still wanted.
        requests: what is drawn with, and taken in by.
        stats: kept up to date.
        trace: is told when tokens were drawn.
        peer: names a holder's R-worker.
    """

    def __init__(
        self,
        s_worker: SWorker,
        lives: SequenceTable,
        requests: Requests,
        stats: EngineStats,
        trace: Trace | None,
        peer: Callable[[HolderId], str],
    ) -> None:
        self._s_worker = s_worker
        self._lives = lives
        self._requests = requests
        self._stats = stats
        self._trace = trace
        self._peer = peer

    def draw(self, step: LaneStep) -> StepSamples | None:
        """Start drawing the tokens that follow, of all whose text is complete
        so far. None: nobody wants any."""
        assert step.logits is not None
        draws = step.batch.draws.tolist()
        chunks = [chunk for chunk, is_last in zip(step.batch.chunks, draws, strict=True) if is_last]
        rows = _rows_of(chunks, self._lives.wanted(chunks))
        if not rows:
            return None
        logits = step.logits if len(rows) == len(chunks) else step.logits[list(rows)]
        started_s, chunks = time.perf_counter(), [chunks[row] for row in rows]
        states = [one.sampling for one in self._requests.generations_of(chunks)]
        drawing = self._s_worker.draw(logits, states, step.lane)
        is_done = drawing.done
        # Where nobody's token can be another one than the device believes, and
        # somebody steps on for all that is known.
        goes_ahead = (
            not is_done and self._s_worker.feeds and drawing.is_sure and any(map(_steps_on, chunks))
        )
        ended_s = time.perf_counter() if is_done else None
        return StepSamples(step, chunks, drawing, started_s, ended_s, goes_ahead)

    def accept(self, tokens: StepSamples) -> tuple[events.Drawn, ...]:
        """Take in what was drawn, of those whose sequences are still wanted;
        waits until it is here."""
        sampled = self._s_worker.drawn(tokens.drawing)
        now = time.perf_counter()
        step, ended_s = tokens.step, tokens.ended_s or now
        if self._trace is not None:
            self._trace.sampled(step.lane, step.step, len(sampled), tokens.started_s, ended_s)
        lives = self._lives
        wanted = (lives.awaiting if tokens.goes_ahead else lives.wanted)(tokens.chunks)
        rows = _rows_of(tokens.chunks, wanted)
        generations = self._requests.generations_of([tokens.chunks[row] for row in rows])
        found = [sampled[row] for row in rows]
        peers = map(self._peer, (span.holder for span in step.batch.spans))
        return self._requests.accept(generations, found, self._stats, now, peers)


def _rows_of(chunks: Seq[Chunk], wanted: Seq[Chunk]) -> Seq[int]:
    """Where those that are wanted are among the chunks."""
    if len(wanted) == len(chunks):
        return range(len(chunks))
    ids = {chunk.sequence.sequence_id for chunk in wanted}
    return [row for row, chunk in enumerate(chunks) if chunk.sequence.sequence_id in ids]


def _steps_on(chunk: Chunk) -> bool:
    """Whether its sequence will step with the token that is drawn, unless that
    ends its text."""
    sequence = chunk.sequence
    return sequence.num_generated + 1 < sequence.request.max_tokens
