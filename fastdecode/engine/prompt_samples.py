"""Draws tokens, and takes log-probabilities of prompts: in place of ``PendingSamples``
once a request wants them."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.engine.pending_samples import PendingSamples, StepSamples
from fastdecode.engine.prompt_logprobs import AskedRows, PromptQuestions
from fastdecode.engine.step.lane_step import LaneStep
from fastdecode.schedule.life import events
from sworker.sampling.sampler import Drawing, prompt_logprobs


class _NoDrawing:
    """Of a step after which no token is drawn."""

    done = True

    def wait(self) -> None:
        """There is nothing to wait for."""


@dataclass(frozen=True)
class PromptSamples(StepSamples):
    """Of one step that prompts ask of. The lane's next step waits for them."""

    asked: AskedRows
    found: Tensor
    """See ``prompt_logprobs``; on the device."""


class PromptSampler(PendingSamples):
    """See above."""

    @classmethod
    def of(cls, samples: PendingSamples) -> PromptSampler:
        """In its place."""
        if isinstance(samples, PromptSampler):
            return samples
        of = samples
        return cls(of._s_worker, of._lives, of._requests, of._stats, of._trace, of._peer)

    def draw(self, step: LaneStep) -> StepSamples | None:
        """See ``PendingSamples``."""
        asked = None if step.asked_rows is None else self._questions.rows(step.batch)
        if asked is None or step.asked_rows is None:
            return super().draw(step)
        found = self._find(step, asked, step.asked_rows)
        tokens = super().draw(step)
        if tokens is None:
            now, nothing = time.perf_counter(), cast(Drawing, _NoDrawing())
            return PromptSamples(step, (), nothing, now, now, False, asked, found)
        drawn: dict[str, Any] = {f.name: getattr(tokens, f.name) for f in fields(StepSamples)}
        return PromptSamples(**{**drawn, "goes_ahead": False}, asked=asked, found=found)

    def accept(self, tokens: StepSamples) -> tuple[events.Drawn, ...]:
        """See ``PendingSamples``."""
        if isinstance(tokens, PromptSamples):
            asked = tokens.asked
            self._questions.take_in(asked, tokens.found.tolist(), self._lives.wanted(asked.chunks))
        return super().accept(tokens) if tokens.chunks else ()

    def _find(self, step: LaneStep, asked: AskedRows, rows: NDArray[np.int64]) -> Tensor:
        worker = self._s_worker
        return prompt_logprobs(
            step.forward.logits, rows[asked.rows], asked.tokens, asked.count,
            worker.spec.vocab_size, worker.device,
        )  # fmt: skip

    @property
    def _questions(self) -> PromptQuestions:
        assert self._requests.prompt_questions is not None, "a request has asked"
        return self._requests.prompt_questions
