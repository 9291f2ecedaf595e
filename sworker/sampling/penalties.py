"""Changes of logits before a token is drawn: processors, bias, masks, penalties."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import RequestError
from fastdecode.core.sequence import LogitsProcessor
from sworker.buffers import to_device as upload
from sworker.sampling.sampling_state import History, SamplingState
from sworker.sampling.token_masks import mask_logits


def adjust(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Apply processors, masks, logit_bias, min_tokens and penalties in place. Rows without a mask
    are touched only at the tokens concerned.

    Masks add -inf, so they may as well come first: no penalty moves -inf, and a NaN stays a NaN.
    """
    device = logits.device
    # Lists: a generator would be entered once a row.
    if [True for state in states if state.history is not None]:
        run_processors(logits, states)
    if [True for state in states if state.grammar is not None or state.allowed is not None]:
        mask_logits(logits, [state.mask() for state in states])
    additive = _entries([(row, entry) for row, s in enumerate(states) if (entry := s.additive)])
    if additive is not None:
        rows, ids, values = (to_device(x, device) for x in additive)
        logits[rows, ids] += values
    penalised = [(row, entry) for row, s in enumerate(states) if (entry := s.penalised)]
    entries = _entries(penalised)
    if entries is None:
        return
    rows, ids, counts = (to_device(x, device) for x in entries)
    lengths = [len(entry[0]) for _, entry in penalised]
    of_rows = [states[row].params for row, _ in penalised]
    factors = np.array(
        [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in of_rows],
        np.float32,
    )
    repetition, frequency, presence = to_device(
        np.repeat(factors, lengths, axis=0).T.copy(), device
    )
    picked = logits[rows, ids]
    picked = torch.where(picked > 0, picked / repetition, picked * repetition)
    logits[rows, ids] = picked - frequency * counts - presence * (counts > 0)


def run_processors(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Let each row's processors change it, in place. An error of one becomes the
    row's ``failure``, and changes no other row."""
    for row, state in enumerate(states):
        if state.history is None:
            continue
        try:
            logits[row] = _processed(state.params.logits_processors, state.history, logits[row])
        except Exception as error:  # the caller's function may raise anything
            state.failure = RequestError(
                f"a logits processor failed: {type(error).__name__}: {error}",
                code="logits_processor_failed",
            )


def _processed(processors: Sequence[LogitsProcessor], history: History, logits: Tensor) -> Tensor:
    shape, row = logits.shape, logits.clone()
    for process in processors:
        tokens = [list(history.output)]
        parameters = inspect.signature(process).parameters.values()
        if sum(x.default is x.empty for x in parameters) == 3:
            tokens.insert(0, list(history.prompt))
        row = process(*tokens, row)
        if not isinstance(row, Tensor) or row.shape != shape:
            raise TypeError(f"it must return a tensor of shape {list(shape)}, not {row!r:.80}")
    return row.to(torch.float32)


def _entries(
    of_rows: list[tuple[int, tuple[NDArray[np.int64], NDArray[np.float32]]]],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]] | None:
    """Per-row (ids, values) as flat (rows, ids, values); no (row, id) occurs twice."""
    if not of_rows:
        return None
    lengths = [len(ids) for _, (ids, _) in of_rows]
    rows = np.repeat(np.array([row for row, _ in of_rows]), lengths)
    ids = np.concatenate([ids for _, (ids, _) in of_rows])
    return rows, ids, np.concatenate([values for _, (_, values) in of_rows])


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy on the device, by way of pinned memory where it is large: CUDA waits
    for the stream before it copies megabytes of plain memory."""
    return upload(torch.from_numpy(array), device)
