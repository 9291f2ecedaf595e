"""The rows of a step that several attend: o is merged by log-sum-exp.

Each holder of a closed part answers with o and the log-sum-exp of its keys. Once all have answered,
the closed parts are merged into the growing part's o, in the order of parts: so a token depends
neither on which holder answered first nor on which holder has which part.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.engine.step.batch import HolderSpan, LocalSpan, StepBatch
from fastdecode.wire.messages import AttendResult
from sworker.buffers import as_tensor, to_device
from sworker.device import Gpu
from sworker.prefill import add_sinks, merge_attention


class Merge:
    """Merges what R-workers and the S-worker attend of the same rows, and attention sinks.

    Args:
        batch: A step with closed parts, later chunks or sinks.
        gpu: Its driver, in place of the one that torch has.
        sinks: See ``AttentionPlan``.
    """

    def __init__(
        self,
        batch: StepBatch,
        device: torch.device,
        gpu: Gpu | None,
        sinks: Seq[Tensor] | None,
    ) -> None:
        self._device, self._gpu, self._sinks = device, gpu, sinks
        self.has_sinks = sinks is not None  # the log-sum-exp of every row is wanted
        self._later = {
            span.holder: local
            for span in batch.spans
            for local in batch.local
            if local.merge and span.query_rows.start <= local.rows.start < span.query_rows.stop
        }
        """Later prompt chunks among the rows whose queries a holder attends."""
        spans = [span for span in batch.spans if span.closed]
        self.has_closed = bool(spans)
        closed = [closed.rows for span in spans for closed in span.closed]
        rows = np.unique(np.concatenate(closed)) if closed else np.zeros(0, np.int64)
        self._rows = self._to_device(rows)  # [M]
        pieces: list[tuple[int, int, slice, Tensor]] = []
        for span in spans:
            first = 0
            for one in span.closed:
                answer = slice(first, first + len(one.rows))
                first = answer.stop
                places = self._to_device(np.searchsorted(rows, one.rows))
                pieces.append((one.part, span.holder, answer, places))
        # By part: whose answer, what of it, and where its rows are among the M.
        self._pieces = sorted(pieces, key=lambda piece: piece[:2])
        self._answers: dict[int, tuple[Tensor, Tensor]] = {}
        self._local_lse: dict[int, Tensor] = {}
        """What the S-worker has attended of later chunks, by their first row."""
        self._lse: Tensor | None = None
        """float32 [T, Hq] of what o holds by now, where closed parts or sinks are merged."""
        self._layer = 0

    def answered_rows(self, span: HolderSpan) -> slice:
        """Return the rows whose o the holder answers, before closed parts are merged."""
        later = self._later.get(span.holder)
        return slice(
            span.query_rows.start, span.query_rows.stop if later is None else later.rows.start
        )

    def scatter(self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None) -> None:
        """Begin a layer. See ``AttentionPart``."""
        self._layer = layer
        if self._sinks is not None:
            # Rows that the device's own cache attends have had their sinks.
            self._lse = torch.full(q.shape[:2], torch.inf, device=q.device)
            self._lse[self._rows] = -torch.inf
        elif self.has_closed and self._lse is None:
            self._lse = torch.full(q.shape[:2], -torch.inf, device=q.device)

    def ready(self) -> bool:
        """Return True: R-workers are waited for by their own part."""
        return True

    def attended(self, local: LocalSpan, lse: Tensor) -> None:
        """Note the log-sum-exp of rows that the S-worker has attended."""
        if local.merge:
            self._local_lse[local.rows.start] = lse
        elif self._lse is not None:
            self._lse[local.rows] = lse

    def arrive(self, span: HolderSpan, result: AttendResult, o: Tensor) -> None:
        """Keep what a holder says of closed parts, and merge what it says of later chunks
        into o [T, Hq, D]."""
        assert result.lse is not None
        own, num_own = self.answered_rows(span), span.query_rows.stop - span.query_rows.start
        lse, split = self._to_device(result.lse), own.stop - own.start
        if self._lse is not None:
            self._lse[own] = lse[:split]
        if span.closed:
            theirs = to_device(as_tensor(result.o[num_own:], o.dtype), self._device, self._gpu)
            self._answers[span.holder] = theirs, lse[num_own:]
        if (later := self._later.get(span.holder)) is not None:
            remote = as_tensor(result.o[split:num_own], o.dtype)
            remote = to_device(remote, self._device, self._gpu)
            local_lse = self._local_lse[later.rows.start]
            merged = merge_attention(o[later.rows], local_lse, remote, lse[split:num_own])
            o[later.rows] = merged[0]
            if self._lse is not None:
                self._lse[later.rows] = merged[1]

    def take(self, o: Tensor | None) -> Tensor:
        """Merge closed parts and sinks into o. What is missing is of holders that are lost,
        and those rows come to nothing."""
        assert o is not None
        if self._answers and self._lse is not None:
            merged, lse = o[self._rows].float(), self._lse[self._rows]  # [M, Hq, D], [M, Hq]
            for _, holder, answer, places in self._pieces:
                if holder in self._answers:
                    theirs, their_lse = self._answers[holder]
                    both = merge_attention(
                        merged[places], lse[places], theirs[answer], their_lse[answer]
                    )
                    merged[places], lse[places] = both
            o[self._rows] = merged.to(o.dtype)
            self._lse[self._rows] = lse
            self._answers.clear()
        if self._sinks is not None and self._lse is not None:
            add_sinks(o, self._lse, self._sinks[self._layer])
        return o

    def _to_device(self, array: NDArray[np.int64] | NDArray[np.float32]) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        return to_device(host, self._device, self._gpu)
