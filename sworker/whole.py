"""Decode steps that need nobody else, as KV is on the same device: from the
embedding to the last layer one CUDA graph, and no Python a layer.

A graph is right for every later step of so many rows, since all that differs
lies in fixed memory: a lane's token ids and positions, and here the slots,
block tables and lengths of its rows. Rows that fill up a bucket store nothing,
and see one token of the first row's sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sworker.feed import Feed
from sworker.graphs import StepGraphs
from sworker.paged import NOWHERE, PagedKV, PagedStep

_WHOLE = -1
"""A step, in place of a unit."""
_WHAT = "a whole decode step"


@dataclass(frozen=True)
class DecodeRoom:
    """Where the rows of one lane's decode step go, and what they see."""

    slots: Tensor  # int64 [M]
    tables: Tensor  # int32 [M, W]
    context_lens: Tensor  # int32 [M]

    @classmethod
    def allocate(cls, num_rows: int, width: int, device: torch.device) -> DecodeRoom:
        return cls(
            torch.zeros(num_rows, dtype=torch.int64, device=device),
            torch.zeros((num_rows, width), dtype=torch.int32, device=device),
            torch.ones(num_rows, dtype=torch.int32, device=device),
        )

    def fill(self, step: PagedStep, bucket: int) -> None:
        """With a decode step, filled up to the bucket."""
        num_rows, width = step.tables.shape
        self.slots[:num_rows].copy_(step.slots)
        self.tables[:num_rows, :width].copy_(step.tables)
        self.context_lens[:num_rows].copy_(step.context_lens)
        if num_rows < bucket:
            self.slots[num_rows:bucket].fill_(NOWHERE)
            self.tables[num_rows:bucket, :1].copy_(step.tables[:1, :1].expand(bucket - num_rows, 1))
            self.context_lens[num_rows:bucket].fill_(1)


class WholeSteps:
    """Runs decode steps in lanes' fixed memory.

    Args:
        graphs: the model, its lanes' memory and buckets, and the graphs.
        cache: K and V, with kernels that read them where they lie.
        max_tokens: of the longest sequence.
    """

    def __init__(self, graphs: StepGraphs, cache: PagedKV, max_tokens: int) -> None:
        assert cache.kernels is not None
        self._graphs, self._cache = graphs, cache
        self._width = cache.kv.num_blocks_for(max_tokens)
        self._rooms: dict[int, DecodeRoom] = {}  # by lane

    def prepare(self, buckets: Iterable[int] | None = None) -> None:
        """Take the memory of all lanes, and capture their steps; of these
        buckets, or all. No sequence has been stored yet."""
        for lane in range(self._graphs.num_lanes):
            self._room(lane)
        for bucket in sorted(buckets or self._graphs.buckets.sizes, reverse=True):
            if not self._graphs.warm_up(partial(self._step, 0, bucket), bucket, _WHAT):
                return
            for lane in self._graphs.lanes_of(bucket):
                run = partial(self._step, lane, bucket)
                self._graphs.capture((lane, _WHOLE, bucket), run, _WHAT)

    def takes(self, step: PagedStep) -> bool:
        """Whether it is a step for ``run``."""
        return step.only_decodes and len(step.slots) <= self._graphs.buckets.max_rows

    @torch.inference_mode()
    def run(
        self,
        lane: int,
        rows: Tensor,
        step: PagedStep,
        feed: Feed | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """A step from its first to its last layer.

        Args:
            rows: token ids and positions, int64 [2, T], on the host.
            feed: token ids that the host doesn't know.
            x: what the stage before has come to, [T, hidden], on the host, in
                place of token ids.

        Returns:
            Hidden states [T, hidden], in the lane's memory.
        """
        bucket = self._graphs.fill(lane, rows, feed, x)
        self._room(lane).fill(step, bucket)
        if not self._graphs.replay((lane, _WHOLE, bucket)):
            self._step(lane, bucket)
        return self._graphs.buffers(lane).x[: rows.shape[1]]

    def _room(self, lane: int) -> DecodeRoom:
        if lane not in self._rooms:
            buffers = self._graphs.buffers(lane)
            with torch.inference_mode(False):
                self._rooms[lane] = DecodeRoom.allocate(
                    len(buffers.x), self._width, self._graphs.device
                )
        return self._rooms[lane]

    @torch.inference_mode()
    def _step(self, lane: int, bucket: int) -> None:
        graphs, room, rows = self._graphs, self._room(lane), slice(bucket)
        buffers = graphs.buffers(lane)
        longest = self._width * self._cache.kv.block_size
        for unit in range(graphs.num_units):
            graphs.unit(lane, unit, bucket)
            if unit < graphs.num_units - 1:
                q, k, v = (x[rows] for x in buffers.outputs(unit))
                self._cache.attend_decoded(
                    unit, q, k, v, room.slots[rows], room.tables[rows], room.context_lens[rows],
                    longest, out=buffers.o[rows],
                )  # fmt: skip
