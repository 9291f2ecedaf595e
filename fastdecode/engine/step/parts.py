"""The rows of a step that several holders attend: those of sequences with
closed parts.

Each holder of a part says what its keys give, o and their log-sum-exp. Once all
have answered, the closed parts are merged into what the growing part has given,
part by part from the first on: so a token depends neither on who answered first
nor on which holder has which part.
"""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.engine.step.layout import HolderSpan, StepBatch
from fastdecode.wire.messages import AttendResult
from sworker.buffers import as_tensor, to_device
from sworker.device import Gpu
from sworker.prefill import merge_attention


class ClosedPartMerge:
    """What holders say of one layer of such a step, until it is merged.

    Args:
        batch: a step with closed parts.
        device: where o is.
        gpu: its driver, in place of the one that torch has.
    """

    def __init__(self, batch: StepBatch, device: torch.device, gpu: Gpu | None = None) -> None:
        self._device, self._gpu = device, gpu
        self._num_tokens = len(batch.token_ids)
        rows = np.unique(
            np.concatenate([closed.rows for span in batch.spans for closed in span.closed])
        )
        self._rows = self._to_device(rows)  # [M]
        pieces: list[tuple[int, int, slice, Tensor]] = []
        for span in batch.spans:
            first = 0
            for closed in span.closed:
                answer = slice(first, first + len(closed.rows))
                first = answer.stop
                places = self._to_device(np.searchsorted(rows, closed.rows))
                pieces.append((closed.part, span.holder, answer, places))
        # By part: whose answer, what of it, and where its rows are among the M.
        self._pieces = sorted(pieces, key=lambda piece: piece[:2])
        self._answers: dict[int, tuple[Tensor, Tensor]] = {}
        self.lse = torch.empty(0)
        """float32 [T, Hq] of what o holds by now, in rows that are attended elsewhere too."""

    def arrive(self, span: HolderSpan, result: AttendResult, dtype: torch.dtype) -> AttendResult:
        """Keep what a holder's closed parts give. Returns what it says to the
        rows whose sequences grow there.

        Args:
            dtype: of o.
        """
        if result.lse is None:
            return result
        if not self.lse.numel():
            self.lse = torch.full(
                (self._num_tokens, result.lse.shape[1]), -torch.inf, device=self._device
            )
        num_own = span.query_rows.stop - span.query_rows.start
        lse = self._to_device(result.lse)
        self.lse[span.query_rows] = lse[:num_own]
        if span.closed:
            o = to_device(as_tensor(result.o[num_own:], dtype), self._device, self._gpu)
            self._answers[span.holder] = o, lse[num_own:]
        return replace(result, o=result.o[:num_own], lse=result.lse[:num_own])

    def merge_into(self, o: Tensor, all_lse: Tensor | None = None) -> None:
        """Merge what has arrived into o [T, Hq, D]. What is missing is of
        holders that are lost, and those rows come to nothing. ``all_lse``:
        float32 [T, Hq] of what o holds then, written in these rows."""
        if not self._answers:
            return
        merged, lse = o[self._rows].float(), self.lse[self._rows]  # [M, Hq, D], [M, Hq]
        for _, holder, answer, places in self._pieces:
            if holder in self._answers:
                theirs, their_lse = self._answers[holder]
                both = merge_attention(
                    merged[places], lse[places], theirs[answer], their_lse[answer]
                )
                merged[places], lse[places] = both
        o[self._rows] = merged.to(o.dtype)
        if all_lse is not None:
            all_lse[self._rows] = lse
        self._answers.clear()

    def _to_device(self, array: NDArray[np.int64] | NDArray[np.float32]) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        return to_device(host, self._device, self._gpu)
