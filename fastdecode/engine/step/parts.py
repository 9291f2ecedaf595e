"""The rows of a step that several R-workers attend: those of split sequences.

Each R-worker that has a part of a sequence says what its keys give, o and their log-sum-exp. Once all have answered,
the closed parts are merged into what the last part has given, part by part from the first on: so a token depends
neither on who answered first nor on which R-worker has which part.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.engine.step.layout import StepBatch, WorkerSpan
from fastdecode.wire.messages import AttendResult
from sworker.buffers import as_tensor, to_device
from sworker.prefill import merge_attention


class GuestMerge:
    """What R-workers say of one layer of such a step, until it is merged.

    Args:
        batch: a step with guests.
        device: where o is.
    """

    def __init__(self, batch: StepBatch, device: torch.device) -> None:
        self._device = device
        self._num_tokens = len(batch.token_ids)
        rows = np.unique(np.concatenate([guests.rows for span in batch.spans for guests in span.guests]))
        self._rows = self._to_device(rows)  # [M]
        pieces: list[tuple[int, int, slice, Tensor]] = []
        for span in batch.spans:
            first = 0
            for guests in span.guests:
                answer = slice(first, first + len(guests.rows))
                first = answer.stop
                pieces.append((guests.part, span.worker, answer, self._to_device(np.searchsorted(rows, guests.rows))))
        # By part: whose answer, what of it, and where its rows are among the M.
        self._pieces = sorted(pieces, key=lambda piece: piece[:2])
        self._answers: dict[int, tuple[Tensor, Tensor]] = {}
        self.lse = torch.empty(0)
        """float32 [T, Hq] of what o holds by now, in rows that are attended elsewhere too."""

    def arrive(self, span: WorkerSpan, result: AttendResult, dtype: torch.dtype) -> AttendResult:
        """Keep what an R-worker says to its guests. Returns what it says to the rows that are at home there.

        Args:
            dtype: of o.
        """
        if result.lse is None:
            return result
        if not self.lse.numel():
            self.lse = torch.full((self._num_tokens, result.lse.shape[1]), -torch.inf, device=self._device)
        num_home = span.query_rows.stop - span.query_rows.start
        lse = self._to_device(result.lse)
        self.lse[span.query_rows] = lse[:num_home]
        if span.guests:
            o = to_device(as_tensor(result.o[num_home:], dtype), self._device)
            self._answers[span.worker] = o, lse[num_home:]
        return replace(result, o=result.o[:num_home], lse=result.lse[:num_home])

    def merge_into(self, o: Tensor) -> None:
        """Merge what has arrived into o [T, Hq, D]. What is missing is of R-workers that are lost, and those rows come
        to nothing."""
        if not self._answers:
            return
        merged, lse = o[self._rows].float(), self.lse[self._rows]  # [M, Hq, D], [M, Hq]
        for _, worker, answer, places in self._pieces:
            if worker in self._answers:
                theirs, their_lse = self._answers[worker]
                both = merge_attention(merged[places], lse[places], theirs[answer], their_lse[answer])
                merged[places], lse[places] = both
        o[self._rows] = merged.to(o.dtype)
        self._answers.clear()

    def _to_device(self, array: NDArray[np.int64] | NDArray[np.float32]) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(array)), self._device)
