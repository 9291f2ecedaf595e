"""Functions of the caller that change rows of logits."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor

from fastdecode.core.errors import RequestError
from fastdecode.core.sequence import LogitsProcessor
from sworker.sampling.sampling_state import History, SamplingState


def run_processors(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Let each row's processors change it, in place. What one raises is the
    row's own ``failure``; no other row notices."""
    for row, state in enumerate(states):
        if state.history is None:
            continue
        try:
            logits[row] = _processed(state.params.logits_processors, state.history, logits[row])
        except Exception as error:  # of the caller's function: any
            state.failure = RequestError(
                f"a logits processor failed: {type(error).__name__}: {error}",
                code="logits_processor_failed",
            )


def _processed(processors: Sequence[LogitsProcessor], history: History, logits: Tensor) -> Tensor:
    shape, row = logits.shape, logits.clone()
    for process in processors:
        tokens = [list(history.output)]
        if _takes_prompt(process):
            tokens.insert(0, list(history.prompt))
        row = process(*tokens, row)
        if not isinstance(row, Tensor) or row.shape != shape:
            raise TypeError(f"it must return a tensor of shape {list(shape)}, not {row!r:.80}")
    return row.to(torch.float32)


def _takes_prompt(process: LogitsProcessor) -> bool:
    """Whether it has three parameters without a default: the prompt's tokens first."""
    parameters = inspect.signature(process).parameters.values()
    return sum(x.default is x.empty for x in parameters) == 3
