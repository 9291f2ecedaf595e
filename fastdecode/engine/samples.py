"""Tokens of lanes' steps: drawn on the S-worker's device, on their way to the host, and taken in
there. With them the log-probabilities of prompts' tokens, where requests want these."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fastdecode.core.holders import HolderId
from fastdecode.core.sequence import COMING
from fastdecode.core.trace import Trace
from fastdecode.engine.requests import AskedRows, Requests
from fastdecode.engine.stats import EngineStats
from fastdecode.engine.step.batch import StepBatch
from fastdecode.engine.step.lane_step import LaneStep
from fastdecode.schedule.life import events
from fastdecode.schedule.life.sequences import SequenceTable
from fastdecode.schedule.plan import Chunk
from sworker.buffers import Feed
from sworker.sampling.sampler import Drawing, prompt_logprobs
from sworker.worker import SWorker


@dataclass(frozen=True)
class StepSamples:
    """Tokens, and log-probabilities of prompts, of one step."""

    step: LaneStep
    chunks: Seq[Chunk]  # chunks that a token is drawn for
    drawing: Drawing | None  # None if there are none
    started_s: float
    ended_s: float | None  # None while the tokens are on their way to the host
    goes_ahead: bool
    """The lane's next step begins without waiting for them."""
    asked: AskedRows | None = None  # rows whose next tokens are a prompt's
    found: Tensor | None = None
    """Their log-probabilities, on the device (``prompt_logprobs``)."""

    @property
    def done(self) -> bool:
        return self.goes_ahead or self.drawing is None or self.drawing.done

    def wait(self) -> None:
        if self.drawing is not None:
            self.drawing.wait()

    def feed(self, batch: StepBatch) -> Feed | None:
        """Return what the lane's next step is fed of the tokens."""
        rows = np.flatnonzero(batch.token_ids == COMING)
        if not rows.size or self.drawing is None:
            return None
        drawn_at = {chunk.sequence.sequence_id: i for i, chunk in enumerate(self.chunks)}
        of_rows = np.searchsorted(batch.last_rows, rows).tolist()
        sources = [drawn_at[batch.chunks[i].sequence.sequence_id] for i in of_rows]
        return Feed(self.drawing.tokens, np.array(sources, np.int64), rows)


class Samples:
    """Starts to draw, and takes in what was drawn.

    Args:
        lives: Tells which sequences are still wanted.
        requests: What is drawn with, and what takes tokens in.
        peer: Names a holder's R-worker.
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
        """Start to draw the next tokens of sequences whose text is complete so far.

        Returns: None if no sequence wants one, and no prompt its log-probabilities.
        """
        assert step.logits is not None
        asked, found = (None, None) if step.asked_rows is None else self._ask(step)
        draws = step.batch.draws.tolist()
        chunks = [chunk for chunk, is_last in zip(step.batch.chunks, draws, strict=True) if is_last]
        rows = _rows_of(chunks, self._lives.wanted(chunks))
        started_s = time.perf_counter()
        if not rows:
            if asked is None:
                return None
            return StepSamples(step, (), None, started_s, started_s, False, asked, found)
        logits = step.logits if len(rows) == len(chunks) else step.logits[list(rows)]
        chunks = [chunks[row] for row in rows]
        states = [one.sampling for one in self._requests.generations_of(chunks)]
        drawing = self._s_worker.draw(logits, states, step.lane)
        is_done = drawing.done
        # Where no token can be another one than the device believes, and
        # some sequence steps on for all that is known.
        goes_ahead = (
            not is_done
            and asked is None
            and self._s_worker.feeds
            and drawing.is_sure
            and any(x.sequence.num_generated + 1 < x.sequence.request.max_tokens for x in chunks)
        )
        ended_s = time.perf_counter() if is_done else None
        return StepSamples(step, chunks, drawing, started_s, ended_s, goes_ahead, asked, found)

    def _ask(self, step: LaneStep) -> tuple[AskedRows | None, Tensor | None]:
        questions, worker = self._requests.prompt_questions, self._s_worker
        assert questions is not None and step.asked_rows is not None, "a request has asked"
        asked = questions.rows(step.batch)
        if asked is None:
            return None, None
        return asked, prompt_logprobs(
            step.forward.logits, step.asked_rows[asked.rows], asked.tokens, asked.count,
            worker.spec.vocab_size, worker.device,
        )  # fmt: skip

    def accept(self, tokens: StepSamples) -> tuple[events.Drawn, ...]:
        """Take in what was drawn for sequences that are still wanted. Wait until it is here."""
        lives = self._lives
        if tokens.asked is not None and tokens.found is not None:
            assert self._requests.prompt_questions is not None
            wanted = lives.wanted(tokens.asked.chunks)
            self._requests.prompt_questions.take_in(tokens.asked, tokens.found.tolist(), wanted)
        if tokens.drawing is None:
            return ()
        sampled = self._s_worker.drawn(tokens.drawing)
        now = time.perf_counter()
        step, ended_s = tokens.step, tokens.ended_s or now
        if self._trace is not None:
            self._trace.sampled(step.lane, step.step, len(sampled), tokens.started_s, ended_s)
        wanted = (lives.awaiting if tokens.goes_ahead else lives.wanted)(tokens.chunks)
        rows = _rows_of(tokens.chunks, wanted)
        generations = self._requests.generations_of([tokens.chunks[row] for row in rows])
        found = [sampled[row] for row in rows]
        peers = map(self._peer, (span.holder for span in step.batch.spans))
        return self._requests.accept(generations, found, self._stats, now, peers)


def _rows_of(chunks: Seq[Chunk], wanted: Seq[Chunk]) -> Seq[int]:
    """Return the places of wanted chunks among all."""
    if len(wanted) == len(chunks):
        return range(len(chunks))
    ids = {chunk.sequence.sequence_id for chunk in wanted}
    return [row for row, chunk in enumerate(chunks) if chunk.sequence.sequence_id in ids]
