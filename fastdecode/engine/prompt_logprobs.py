"""Log-probabilities of prompts' tokens, for requests that want them."""

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
    """A prompt's log-probabilities, as far as they are known."""

    request: Request
    steps: dict[int, TokenLogprob] = field(default_factory=dict)
    """By place in the prompt, from 1 on, since the first token lacks one."""
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

    rows: NDArray[np.int64]  # [P], among the step's rows that were asked for
    tokens: NDArray[np.int64]  # [P], what follows
    owners: tuple[tuple[PromptLogprobs, int], ...]
    """[P], whose, and the place in its prompt."""
    chunks: tuple[Chunk, ...]  # [P], whose rows they are

    @property
    def count(self) -> int:
        """The most likeliest tokens that any of them wants."""
        return max(owner.request.params.prompt_logprobs or 0 for owner, _ in self.owners)


class PromptQuestions:
    """The prompts' log-probabilities that requests still want."""

    def __init__(self) -> None:
        self.open: dict[str, PromptLogprobs] = {}
        """Incomplete log-probabilities, by their requests' ids."""

    def add(self, request: Request) -> PromptLogprobs:
        """Add a submitted request that wants some."""
        asked = PromptLogprobs(request)
        if not asked.is_complete:
            self.open[request.request_id] = asked
        return asked

    def asks(self, batch: StepBatch) -> NDArray[np.bool_]:
        """Return [N] which chunks' rows of a step are asked for."""
        return np.array(
            [
                chunk.sequence.request.request_id in self.open
                and chunk.first < chunk.sequence.num_prompt_tokens - 1
                for chunk in batch.chunks
            ]
        )

    def rows(self, batch: StepBatch) -> AskedRows | None:
        """Return the asked rows of a step. None if all requests that wanted them are over."""
        assert batch.asks is not None
        owners: list[tuple[PromptLogprobs, int]] = []
        rows: list[int] = []
        chunks: list[Chunk] = []
        row = 0
        for chunk, is_asked in zip(batch.chunks, batch.asks.tolist(), strict=True):
            if not is_asked:
                continue
            asked = self.open.get(chunk.sequence.request.request_id)
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
        """Take in log-probabilities. No more is asked of prompts that are complete then.

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
                    self.open.pop(owner.request.request_id, None)
