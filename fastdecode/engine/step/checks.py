"""Whose fault are logits that aren't finite? The model's, whose weights are
damaged or overflow their dtype, or a holder's.

A sequence that comes to such logits is recomputed once, from its first token
on, and from then on looked at: what is sent for it, and what is answered. Who
was sent nothing but sane numbers, and answers NaN or Inf, is given up. Of a
sequence for which anything else was sent, nothing that is answered says
anything: it is the model's fault, or that of somebody who has been found
before. Nobody else's steps pay for this.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.dtype import DType
from fastdecode.core.sequence import Sequence
from fastdecode.engine.step.layout import HolderSpan, StepBatch
from fastdecode.wire.messages import AttendResult
from sworker.buffers import Shipment, as_tensor
from sworker.prefill import as_cached

_GREATEST = 1e15
"""Beyond it, products of finite q and k may overflow."""


class Checks:
    """What is known of the sequences that are looked at; for all steps."""

    def __init__(self) -> None:
        self._spoilt: WeakSet[Sequence] = WeakSet()

    def begin(self, batch: StepBatch) -> StepChecks:
        """For a step with somebody who is looked at."""
        checked: list[tuple[Sequence, slice]] = []
        for chunk, last in zip(batch.chunks, batch.last_rows, strict=True):
            if chunk.sequence.is_checked:
                checked.append((chunk.sequence, slice(last + 1 - chunk.num_tokens, last + 1)))
                if chunk.first == 0:  # it starts again
                    self._spoilt.discard(chunk.sequence)
        return StepChecks(self, checked)

    def is_spoilt(self, sequence: Sequence) -> bool:
        """Whether anything was sent for it that isn't sane."""
        return sequence in self._spoilt

    def sent(self, sequence: Sequence, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Some of its rows, in one layer; k and v as holders keep them."""
        if not all(bool((x.abs() < _GREATEST).all()) for x in (q, k, v)):  # nor is NaN
            self._spoilt.add(sequence)


class StepChecks:
    """See ``Checks``; of one step.

    Args:
        checks: of all.
        rows: of the sequences that are looked at.
    """

    def __init__(self, checks: Checks, rows: Iterable[tuple[Sequence, slice]]) -> None:
        self._checks = checks
        self._rows = tuple(rows)

    def sent(
        self,
        spans: Iterable[HolderSpan],
        shipments: Iterable[Shipment],
        dtype: torch.dtype,
        kv_dtype: DType,
    ) -> None:
        """A layer's q, k and v, of ``dtype``, are about to be sent: one
        shipment a span. Kept as ``kv_dtype``, k and v may overflow."""
        for span, shipment in zip(spans, shipments, strict=True):
            q, k, v = (as_tensor(x, dtype) for x in shipment)
            asked, stored = _asked_rows(span), np.arange(span.rows.start, span.rows.stop)
            for sequence, rows in self._rows:
                of_q, of_kv = (torch.from_numpy(_within(x, rows)) for x in (asked, stored))
                cached = (as_cached(x[of_kv], kv_dtype) for x in (k, v))
                self._checks.sent(sequence, q[of_q], *cached)

    def bad_heads(
        self, span: HolderSpan, result: AttendResult, dtype: torch.dtype
    ) -> NDArray[np.bool_] | None:
        """Query heads [Hq] in which a holder has answered what can't be; None:
        it hasn't."""
        answered = _asked_rows(span)
        suspect = np.zeros(len(answered), np.bool_)
        for sequence, rows in self._rows:
            if not self._checks.is_spoilt(sequence):
                suspect |= _within(answered, rows)
        o = as_tensor(result.o, dtype)[torch.from_numpy(suspect)]
        bad = ~torch.isfinite(o).all(-1).numpy()  # [S, Hq]
        if result.lse is not None:
            lse = result.lse[suspect]
            bad = np.where(np.isneginf(lse), False, bad | ~np.isfinite(lse))  # -inf: it saw nothing
        heads: NDArray[np.bool_] = bad.any(0)
        return heads if heads.any() else None


def _asked_rows(span: HolderSpan) -> NDArray[np.int64]:
    """Of whose q a holder gives o, in the order in which it is sent."""
    own = np.arange(span.query_rows.start, span.query_rows.stop)
    return np.concatenate((own, *(closed.rows for closed in span.closed)))


def _within(rows: NDArray[np.int64], some: slice) -> NDArray[np.bool_]:
    return (rows >= some.start) & (rows < some.stop)
