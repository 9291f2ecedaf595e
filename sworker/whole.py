"""Decode steps whose KV is on the same device: from the embedding to the last layer one CUDA
graph, or a few, and no Python code per layer.

A graph is right for every later step of its bucket, since all that differs lies in fixed memory:
a lane's token ids and positions, and here the slots, block tables and lengths of its rows, and how
their work is divided. Rows that fill up a bucket store nothing, and see one token of the first
row's sequence."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sworker.buffers import Feed, to_device
from sworker.graphs import StepGraphs
from sworker.kv_splits import Splits
from sworker.paged import NOWHERE, PagedKV, PagedStep, Window
from sworker.step_tables import StepInputs
from sworker.worker import AttendLayer, Pass, SWorker

_WHOLE, _FIRST_SLICE = -1, -2
"""A step, or its first slice, in place of a unit; other slices are behind, downwards."""
SLICE_LAYERS = 4  # layers per slice: few, as other lanes wait, but each slice costs a graph
_WHAT = "a whole decode step"


@dataclass(frozen=True)
class DecodeRoom:
    """Where the rows of one lane's decode step go, and what they see."""

    slots: Tensor  # int64 [M]
    tables: Tensor  # int32 [M, W]
    context_lens: Tensor  # int32 [M]
    plans: dict[Window, Tensor]
    """Of each window, how the work is divided: int32, see ``kv_splits.SplitPlan``."""

    @classmethod
    def allocate(cls, num_rows: int, width: int, cache: PagedKV) -> DecodeRoom:
        device, plan_size = cache.pool.device, cache.decode_shape(num_rows).size
        return cls(
            torch.zeros(num_rows, dtype=torch.int64, device=device),
            torch.zeros((num_rows, width), dtype=torch.int32, device=device),
            torch.ones(num_rows, dtype=torch.int32, device=device),
            {
                window: torch.zeros(plan_size, dtype=torch.int32, device=device)
                for window in cache.windows
            },
        )

    def splits(self, cache: PagedKV, bucket: int) -> dict[Window, Splits]:
        """How the work of a bucket's rows is divided, whatever lies in the plans."""
        shape = cache.decode_shape(bucket)
        return {
            window: Splits.of_any_plan(shape, plan[: shape.size])
            for window, plan in self.plans.items()
        }

    def fill(self, step: PagedStep, bucket: int, cache: PagedKV) -> None:
        """With a decode step, filled up to the bucket."""
        for window, room in self.plans.items():
            plan = torch.from_numpy(cache.decode_plan(step.context_lens_host, window, bucket).array)
            room[: len(plan)].copy_(to_device(plan, room.device))
        num_rows, width = step.tables.shape
        self.slots[:num_rows].copy_(step.slots)
        self.tables[:num_rows, :width].copy_(step.tables)
        self.context_lens[:num_rows].copy_(step.context_lens)
        if num_rows < bucket:
            self.slots[num_rows:bucket].fill_(NOWHERE)
            self.tables[num_rows:bucket, :1].copy_(step.tables[:1, :1].expand(bucket - num_rows, 1))
            self.context_lens[num_rows:bucket].fill_(1)


def slices_of(num_layers: int) -> list[range]:
    """Layers in slices of some each, as even as can be: ``SLICE_LAYERS``, or up to
    twice as many where layers are few."""
    count = max(1, num_layers // SLICE_LAYERS)
    bounds = [num_layers * i // count for i in range(count + 1)]
    return [range(first, end) for first, end in itertools.pairwise(bounds)]


class WholeSteps:
    """Runs decode steps in lanes' fixed memory: all layers at once, or slice by
    slice, where other lanes are to come between.

    Args:
        graphs: the model, its lanes' memory and buckets, and the graphs.
        cache: K and V, with kernels that read them where they lie.
    """

    def __init__(self, graphs: StepGraphs, cache: PagedKV, max_tokens: int) -> None:
        assert cache.kernels is not None
        self.graphs, self._cache = graphs, cache
        self._width = cache.kv.num_blocks_for(max_tokens)
        self._rooms: dict[int, DecodeRoom] = {}  # by lane
        self.slices = slices_of(graphs.num_units - 1)

    def prepare(
        self, buckets: Iterable[int] | None = None, *, only_lane: int | None = None
    ) -> None:
        """Take the memory of all lanes, and capture their steps; of these buckets, or all. No
        sequence has been stored yet. ``only_lane``: of this one alone, and its slices, too."""
        lanes = range(self.graphs.num_lanes) if only_lane is None else (only_lane,)
        for lane in lanes:
            self._room(lane)
        for bucket in sorted(buckets or self.graphs.buckets.sizes, reverse=True):
            run = partial(self._step, lanes[0], bucket)
            if not self.graphs.warm_up(run, bucket, _WHAT):
                return
            for lane in set(lanes).intersection(self.graphs.lanes_of(bucket)):
                run = partial(self._step, lane, bucket)
                self.graphs.capture((lane, _WHOLE, bucket), run, _WHAT)
            if only_lane is not None and only_lane in self.graphs.lanes_of(bucket):
                for number in range(len(self.slices)):
                    run = partial(self._slice, only_lane, number, bucket)
                    what = "some layers of a decode step"
                    self.graphs.capture((only_lane, _FIRST_SLICE - number, bucket), run, what)

    def takes(self, step: PagedStep) -> bool:
        """Whether it is a step for ``run``."""
        return step.only_decodes and len(step.slots) <= self.graphs.buckets.max_rows

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
            x: output [T, hidden] of the stage before, on the host, in place of token ids.

        Returns:
            Hidden states [T, hidden], in the lane's memory.
        """
        bucket = self.fill(lane, rows, step, feed, x)
        if not self.graphs.replay((lane, _WHOLE, bucket)):
            self._step(lane, bucket)
        return self.graphs.buffers(lane).x[: rows.shape[1]]

    def fill(
        self,
        lane: int,
        rows: Tensor,
        step: PagedStep,
        feed: Feed | None = None,
        x: Tensor | None = None,
    ) -> int:
        """Put a step into the lane's memory; its bucket. As in ``run``."""
        bucket = self.graphs.fill(lane, rows, feed, x)
        self._room(lane).fill(step, bucket, self._cache)
        return bucket

    def run_slice(self, lane: int, number: int, bucket: int) -> None:
        """The next slice of the step that the lane's memory has."""
        if not self.graphs.replay((lane, _FIRST_SLICE - number, bucket)):
            self._slice(lane, number, bucket)

    def _room(self, lane: int) -> DecodeRoom:
        if lane not in self._rooms:
            buffers = self.graphs.buffers(lane)
            with torch.inference_mode(False):
                self._rooms[lane] = DecodeRoom.allocate(len(buffers.x), self._width, self._cache)
        return self._rooms[lane]

    @torch.inference_mode()
    def _step(self, lane: int, bucket: int) -> None:
        self.graphs.unit(lane, 0, bucket)
        self._layers(lane, range(self.graphs.num_units - 1), bucket)

    @torch.inference_mode()
    def _slice(self, lane: int, number: int, bucket: int) -> None:
        if number == 0:
            self.graphs.unit(lane, 0, bucket)
        self._layers(lane, self.slices[number], bucket)

    def _layers(self, lane: int, layers: range, bucket: int) -> None:
        """Layers whose q, k and v begin in the lane's memory, each one's attention
        and the unit behind it."""
        graphs, room, rows = self.graphs, self._room(lane), slice(bucket)
        buffers = graphs.buffers(lane)
        splits = room.splits(self._cache, bucket)
        for layer in layers:
            q, k, v = (x[rows] for x in buffers.outputs(layer))
            self._cache.attend_decoded(
                layer, q, k, v, room.slots[rows], room.tables[rows], room.context_lens[rows],
                splits, out=buffers.o[rows],
            )  # fmt: skip
            graphs.unit(lane, layer + 1, bucket)


class SlicedPass(Pass):
    """A decode step slice by slice, attention included: ``advance`` runs the next
    one, whatever o it is given."""

    def __init__(
        self,
        worker: SWorker,
        whole: WholeSteps,
        lane: int,
        rows: Tensor,
        step: PagedStep,
        feed: Feed | None = None,
        x: Tensor | None = None,
    ) -> None:
        self._whole, self._lane, self._step, self._number = whole, lane, step, 0
        buffers, mine = whole.graphs.buffers(lane), slice(rows.shape[1])
        self._x, self.place = buffers.x[mine], buffers.o[mine]
        self.q, self.k, self.v = (part[mine] for part in buffers.outputs(0))
        super().__init__(worker, rows, feed, x)

    @torch.inference_mode()
    def advance(self, o: Tensor) -> bool:
        """Run the next slice. False: none was left."""
        if self._number + 1 == len(self._whole.slices):
            return False
        self._number += 1
        with self._timer:
            self._run()
        return True

    def _begin(self, rows: Tensor, feed: Feed | None, x: Tensor | None) -> None:
        self._bucket = self._whole.fill(self._lane, rows, self._step, feed, x)
        self._run()

    def _run(self) -> None:
        self._whole.run_slice(self._lane, self._number, self._bucket)
        self.layer = self._whole.slices[self._number].stop - 1


def run_step(
    worker: SWorker,
    whole: WholeSteps | None,
    inputs: StepInputs,
    step: PagedStep,
    attend: AttendLayer,
    feed: Feed | None = None,
) -> Tensor:
    """A step from its first to its last layer, which attends on the worker's device.

    Args:
        whole: runs decode steps as one graph; None: every step runs layer by layer, as
            those do that have prompts among their rows: units as graphs, attention between.
        step: of ``inputs``, on the device.
        attend: of one layer, where steps run layer by layer.
        feed: token ids that the host does not know.

    Returns:
        Hidden states [T, hidden].
    """
    rows, lane = inputs.rows, inputs.lane
    if whole is not None and whole.takes(step):
        return whole.run(lane, rows, step, feed, inputs.x)
    return worker.begin_alone(rows, lane, feed, inputs.x).run(attend).output
