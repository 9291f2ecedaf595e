"""S-steps without launch overhead: a lane's rows in fixed memory, padded to a bucket, each unit of
work a CUDA graph.

A **unit** is what the S-worker does between two attentions: unit 0 embeds and runs the first
layer's ``pre_attention``; unit i runs ``post_attention`` of layer i - 1 and ``pre_attention`` of
layer i; the last one ends with hidden states. Everything that a unit reads and writes lies in its
lane's buffers, so a graph that was captured once is right for every later step of its bucket.
Rows are independent: the padding changes only the shape of the matrix products, on which their
rounding may depend.

Graphs are captured before the first step, for all lanes that there may ever be and as many rows as
each may have, the largest first, so that they share memory. None is captured later, when a request
would wait for it. Units that have no graph run without.

Without capture, as on a CPU, the same code runs the units as they are; that is how it is tested
there."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from fastdecode.core.model.spec import ModelSpec
from sworker.buffers import LENT_LAYERS, Feed, to_device
from sworker.device import Gpu, gpu_of
from sworker.failures import is_kernel_error
from sworker.model.moe import Experts
from sworker.model.skeleton import LayerRoom, Model

logger = logging.getLogger(__name__)

MAX_GRAPH_ROWS = 512  # with more rows a layer computes for longer than its launches take
MAX_GRAPHS = 4096  # each takes some of the device's memory, and time to capture
_CHOICES = ((8, 1), (4, 1), (2, 1), (1, 1), (1, 8))
"""Of ``Buckets.parts`` and ``Buckets.least``, the finest first."""


@dataclass(frozen=True)
class LaneGraphs:
    """What is captured for one lane."""

    max_rows: int  # most rows of its steps that run with graphs
    num_graphs: int  # graphs of each bucket
    num_kernels: int = 0  # kernels in all graphs of a bucket together


@dataclass(frozen=True)
class Buckets:
    """Row counts that steps are padded to: powers of two from ``least`` to 8,
    then ``parts`` of them from each power of two to the next, but no less than 8
    rows apart. Up to 64 rows or more a layer is bound by reading its weights, so
    padding costs nothing; beyond, less than one part in ``parts``."""

    max_rows: int = MAX_GRAPH_ROWS  # steps of more rows aren't padded
    parts: int = 8
    least: int = 1

    @classmethod
    def choose(
        cls, lanes: Sequence[LaneGraphs], max_graphs: int, max_rows: int = MAX_GRAPH_ROWS
    ) -> Buckets:
        """Return the finest buckets with at most ``max_graphs`` graphs, or else the coarsest."""
        choices = [cls(max_rows, *choice) for choice in _CHOICES]
        return next((b for b in choices if b.num_graphs(lanes) <= max_graphs), choices[-1])

    def of(self, num_rows: int) -> int:
        """The least bucket for so many rows."""
        assert num_rows >= 1
        if num_rows <= 8:
            return max(self.least, 1 << (num_rows - 1).bit_length())
        below = 1 << ((num_rows - 1).bit_length() - 1)
        step = max(8, below // self.parts)
        return -(-num_rows // step) * step

    @property
    def sizes(self) -> list[int]:
        return self.sizes_to(self.max_rows)

    def sizes_to(self, max_rows: int) -> list[int]:
        """Those of steps of up to so many rows."""
        most = min(max_rows, self.max_rows)
        return sorted({self.of(num_rows) for num_rows in range(1, most + 1)})

    def num_graphs(self, lanes: Sequence[LaneGraphs]) -> int:
        """Of all lanes and buckets."""
        return sum(lane.num_graphs * len(self.sizes_to(lane.max_rows)) for lane in lanes)

    def num_kernels(self, lanes: Sequence[LaneGraphs]) -> int:
        """In these graphs."""
        return sum(lane.num_kernels * len(self.sizes_to(lane.max_rows)) for lane in lanes)


Key: TypeAlias = tuple[int, int, int]
"""Lane, unit and bucket."""


@dataclass(frozen=True)
class LaneBuffers:
    """The fixed memory of one lane, M rows. o is read by a unit, x by the next
    one, qkv by whoever attends."""

    token_ids: Tensor  # int64 [M]
    positions: Tensor  # int64 [M]
    x: Tensor  # [M, hidden]
    o: Tensor  # [M, Hq, D]
    qkv: tuple[tuple[Tensor, Tensor, Tensor], ...]
    """q [M, Hq, D], k and v [M, Hkv, D]: unit i writes i modulo their number.
    Where R-workers read them where they are, as often as layers may be on loan;
    a GPU packs them before its next unit, and one is enough."""

    @classmethod
    def allocate(
        cls,
        spec: ModelSpec,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_qkv: int,
    ) -> LaneBuffers:
        def rows(*dims: int) -> Tensor:
            return torch.zeros((num_rows, *dims), dtype=dtype, device=device)

        ids = torch.zeros((2, num_rows), dtype=torch.int64, device=device)
        q, kv = (spec.num_q_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim)
        qkv = tuple((rows(*q), rows(*kv), rows(*kv)) for _ in range(num_qkv))
        return cls(ids[0], ids[1], rows(spec.hidden_size), rows(*q), qkv)

    def outputs(self, unit: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where a unit writes q, k and v."""
        return self.qkv[unit % len(self.qkv)]


class StepGraphs:
    """Runs the units of a model's S-steps on lanes' buffers.

    Args:
        model: on ``device``.
        capture: whether ``prepare`` captures CUDA graphs; if not, units run as they are.
        num_lanes: most that there may be.
        lanes: what is captured for each; None: all units of all buckets.
        max_rows: steps of more rows don't come here.
        max_graphs: buckets are as many as this allows.
        gpu: the device's driver, in place of the one that torch has.
    """

    def __init__(
        self,
        model: Model,
        device: torch.device,
        *,
        capture: bool,
        num_lanes: int = 1,
        lanes: Sequence[LaneGraphs] | None = None,
        max_rows: int = MAX_GRAPH_ROWS,
        max_graphs: int = MAX_GRAPHS,
        gpu: Gpu | None = None,
    ) -> None:
        self._gpu = gpu or gpu_of(device)
        self.model = model
        self.device = device
        # Within a unit, the host may have to wait for the device.
        waits = any(isinstance(x.mlp, Experts) and x.mlp.waits for x in model.layers)
        self._capture = capture and not waits
        if capture and not self._capture:
            logger.warning(
                "experts in %s have no grouped product on %s: the host waits to learn their rows, "
                "and nothing is captured as CUDA graphs. Choose dtype bfloat16",
                *(model.dtype, device),
            )
        self.lanes = lanes or [LaneGraphs(max_rows, self.num_units)] * num_lanes
        self._max_graphs = max_graphs
        self.buckets = Buckets.choose(self.lanes, max_graphs, max_rows)
        self._lanes: dict[int, LaneBuffers] = {}
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self._pool = self._gpu.new_pool() if self._gpu is not None else None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def num_lanes(self) -> int:
        return len(self.lanes)

    def lanes_of(self, bucket: int) -> list[int]:
        """Those whose steps may have so many rows."""
        of = self.buckets.of
        most = [min(lane.max_rows, self.buckets.max_rows) for lane in self.lanes]
        return [lane for lane, num_rows in enumerate(most) if bucket <= of(num_rows)]

    @property
    def num_units(self) -> int:
        return len(self.model.layers) + 1

    def buffers(self, lane: int) -> LaneBuffers:
        """A lane's memory, the same at every call."""
        if lane not in self._lanes:
            with torch.inference_mode(False):
                num_rows = self.buckets.of(self.buckets.max_rows)
                self._lanes[lane] = LaneBuffers.allocate(
                    self.model.spec,
                    num_rows,
                    self.model.dtype,
                    self.device,
                    num_qkv=LENT_LAYERS if self._gpu is None else 1,
                )
        return self._lanes[lane]

    def fill(
        self, lane: int, rows: Tensor, feed: Feed | None = None, x: Tensor | None = None
    ) -> int:
        """Put a step's token ids and positions, int64 [2, T], on the host, into
        the lane's memory, and zeros up to its bucket, which is returned.
        ``feed``: token ids that the host doesn't know. ``x``: what the stage
        before has come to, [T, hidden], on the host, in place of token ids."""
        buffers, num_rows = self.buffers(lane), rows.shape[1]
        bucket = self.buckets.of(num_rows)
        on_device = self._upload(rows)
        for buffer, values in zip((buffers.token_ids, buffers.positions), on_device, strict=True):
            buffer[:num_rows].copy_(values)
            buffer[num_rows:bucket].zero_()
        if self.model.spec.moe is not None:
            # Padding rows that are alike go to the same few experts.
            buffers.o[num_rows:bucket].zero_()
        if feed is not None:
            feed.put_into(buffers.token_ids[:num_rows], self._upload)
        if x is not None:
            buffers.x[:num_rows].copy_(self._upload(x))
            buffers.x[num_rows:bucket].zero_()
        return bucket

    def _upload(self, host: Tensor) -> Tensor:
        return to_device(host, self.device, self._gpu)

    def prepare(self, buckets: Iterable[int] | None = None) -> None:
        """Take the lanes' memory, and capture what their steps will need, the largest first; for
        these buckets, or all. Several S-workers do so together."""
        last = self.num_units - 1
        for lane in range(self.num_lanes):
            self.buffers(lane)
        for bucket in sorted(buckets or self.buckets.sizes, reverse=True):
            for unit in sorted({0, *self._first_of_each_kind(), last}):
                if not self.warm_up(partial(self.unit, 0, unit, bucket), bucket, _unit(unit)):
                    return
            for lane, unit in itertools.product(self.lanes_of(bucket), range(self.num_units)):
                run = partial(self.unit, lane, unit, bucket)
                self.capture((lane, unit, bucket), run, _unit(unit))

    def _first_of_each_kind(self) -> list[int]:
        """Of the units between the first and the last, which are alike but for
        the MLP of the layer that they end."""
        kinds: dict[type, int] = {}
        for unit, layer in enumerate(self.model.layers, 1):
            kinds.setdefault(type(layer.mlp), unit)
        return list(kinds.values())

    def run(self, lane: int, unit: int, bucket: int) -> None:
        """One unit on the first ``bucket`` rows of a lane."""
        if not self.replay((lane, unit, bucket)):
            self.unit(lane, unit, bucket)

    def replay(self, key: Key) -> bool:
        """Run a graph. False: there is none."""
        graph = self._graphs.get(key)
        if graph is None:
            return False
        graph.replay()
        return True

    def capture(self, key: Key, run: Callable[[], None], what: str) -> None:
        """Make a graph of what ``run`` does, if graphs are captured and one more is allowed. After
        a failure no more graphs are captured."""
        if not self._capture or len(self._graphs) >= self._max_graphs:
            return
        assert self._gpu is not None
        # A graph of another engine that is freed meanwhile would spoil it.
        collects = gc.isenabled()
        gc.disable()
        try:
            self._graphs[key] = self._gpu.capture(run, self._pool)
        except Exception as error:  # torch's, the driver's, Triton's
            self._stop_capturing(what, key[2], error)
        finally:
            if collects:
                gc.enable()

    def warm_up(self, run: Callable[[], None], bucket: int, what: str) -> bool:
        """Run what will be captured once, so that libraries choose their kernels
        and take their workspaces. False: a kernel can't be built or launched for
        so many rows, and nothing is captured any more."""
        try:
            run()
        except Exception as error:
            if not is_kernel_error(error):
                raise
            self._stop_capturing(what, bucket, error)
            return False
        return True

    def _stop_capturing(self, what: str, bucket: int, error: Exception) -> None:
        if self._capture:
            logger.warning(
                "%s, of %d rows, can't be captured as a CUDA graph on %s: it runs without, and so "
                "does everything that is not captured yet: %s",
                *(what, bucket, self.device, (str(error).splitlines() or [repr(error)])[0]),
            )
        self._capture = False

    @torch.inference_mode()
    def unit(self, lane: int, unit: int, num_rows: int) -> None:
        """One unit as it is, on the first rows of a lane."""
        self._unit(self.buffers(lane), unit, num_rows)

    def _unit(self, lane: LaneBuffers, unit: int, num_rows: int) -> None:
        rows = slice(num_rows)
        x, positions, layers = lane.x[rows], lane.positions[rows], self.model.layers
        added = None
        if unit == 0:
            has_tokens = self.model.with_embedding
            y = self.model.embed(lane.token_ids[rows], positions) if has_tokens else x
        else:
            y, added = layers[unit - 1].post_attention(x, lane.o[rows])
        if unit < len(layers):
            q, k, v = lane.outputs(unit)
            room = LayerRoom(x, (q[rows], k[rows], v[rows]))
            layers[unit].pre_attention(y, added, positions, room)
        elif added is None:
            x.copy_(y)
        else:
            torch.add(y, added, out=x)


def _unit(unit: int) -> str:
    """What a warning calls it."""
    return f"unit {unit} of the S-part"
