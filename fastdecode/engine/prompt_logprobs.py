"""Requests that want the log-probabilities of their prompts' tokens: which rows
of a step they ask for, and what has come so far."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.sequence import Request, TokenLogprob
from fastdecode.engine.step.batch import StepBatch
from fastdecode.schedule.plan import Chunk
from sworker.sampling.sampler import token_logprob


@dataclass(eq=False)
class PromptLogprobs:
    """Of one request, as far as they are known."""

    request: Request
    steps: dict[int, TokenLogprob] = field(default_factory=dict)
    """By the token's place in the prompt, from 1: nothing comes before the first."""
    is_reported: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.steps) == len(self.request.prompt_token_ids) - 1

    def take(self) -> tuple[TokenLogprob | None, ...] | None:
        """All of them, the first of which is None; they are reported once."""
        if self.is_reported or not self.is_complete:
            return None
        self.is_reported = True
        return (None, *(self.steps[place] for place in sorted(self.steps)))


@dataclass(frozen=True)
class AskedRows:
    """Rows of one step whose next tokens are a prompt's."""

    rows: NDArray[np.int64]
    """[P], among the step's rows that were asked for."""
    tokens: NDArray[np.int64]
    """[P], what follows."""
    owners: tuple[tuple[PromptLogprobs, int], ...]
    """[P], whose, and the place in its prompt."""
    chunks: tuple[Chunk, ...]
    """[P], whose rows they are."""

    @property
    def count(self) -> int:
        """Of the likeliest tokens, as many as any of them wants."""
        return max(owner.request.params.prompt_logprobs or 0 for owner, _ in self.owners)


class PromptQuestions:
    """What requests that aren't over want to know of their prompts."""

    def __init__(self) -> None:
        self._open: dict[str, PromptLogprobs] = {}

    def add(self, request: Request) -> PromptLogprobs:
        """One that wants some has been submitted."""
        asked = PromptLogprobs(request)
        if not asked.is_complete:
            self._open[request.request_id] = asked
        return asked

    def forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def asks(self, batch: StepBatch) -> NDArray[np.bool_] | None:
        """[N] the chunks of a step whose rows are asked for; None: none are."""
        if not self._open:
            return None
        return np.array(
            [
                chunk.sequence.request.request_id in self._open
                and chunk.first < chunk.sequence.num_prompt_tokens - 1
                for chunk in batch.chunks
            ]
        )

    def rows(self, batch: StepBatch) -> AskedRows | None:
        """Of a step that was asked; None: no request wants them any more."""
        assert batch.asks is not None
        owners: list[tuple[PromptLogprobs, int]] = []
        rows: list[int] = []
        chunks: list[Chunk] = []
        row = 0
        for chunk, is_asked in zip(batch.chunks, batch.asks.tolist(), strict=True):
            if not is_asked:
                continue
            asked = self._open.get(chunk.sequence.request.request_id)
            for place in range(chunk.first + 1, chunk.first + 1 + chunk.num_tokens):
                is_new = asked is not None and place not in asked.steps
                if asked is not None and is_new and place < len(asked.request.prompt_token_ids):
                    owners.append((asked, place))
                    rows.append(row)
                    chunks.append(chunk)
                row += 1
        if not rows:
            return None
        tokens = [owner.request.prompt_token_ids[place] for owner, place in owners]
        return AskedRows(
            np.array(rows, np.int64), np.array(tokens, np.int64), tuple(owners), tuple(chunks)
        )

    def take_in(self, rows: AskedRows, found: Seq[Seq[float]], wanted: Seq[Chunk]) -> None:
        """Nothing more is asked of prompts that are known whole then.

        Args:
            found: what ``prompt_logprobs`` gave, on the host.
            wanted: chunks whose rows mean something: they lost no R-worker.
        """
        ids = {chunk.sequence.sequence_id for chunk in wanted}
        for (owner, place), chunk, token, numbers in zip(
            rows.owners, rows.chunks, rows.tokens.tolist(), found, strict=True
        ):
            if chunk.sequence.sequence_id in ids:
                count = owner.request.params.prompt_logprobs or 0
                owner.steps[place] = token_logprob(token, numbers, count)
                if owner.is_complete:
                    self.forget(owner.request.request_id)
