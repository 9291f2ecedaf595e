"""The S-worker: runs every layer that has weights over a step's rows, and draws tokens from the
logits.

A ``Pass`` is one step's way through the layers, cut where another worker attends: each ``advance``
runs ``post_attention`` of one layer and ``pre_attention`` of the next as one unit of work (an
S-step). Several passes can be under way at once; the caller chooses which one continues. On a GPU
nothing here waits for the device: units are queued, and results are tensors not yet computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.model.spec import ModelSpec
from sworker.buffers import KEPT_ROWS, LENT_LAYERS, Feed, Fetch, Fetched
from sworker.device import Event, Gpu, gpu_of
from sworker.graphs import StepGraphs
from sworker.host_blocks import BlockMemory
from sworker.kernels.threads import IdleThreads
from sworker.model.skeleton import LayerRoom, Model, make_rooms
from sworker.paged import PagedKV
from sworker.sampling.sampler import Drawing, SampledToken, SamplingState, draw
from sworker.step_tables import StepInputs
from sworker.swap.swapped import LaneMover, SwappedKV

_DRAWN_BYTES = 64 << 10
"""Initial room for what is drawn for a lane: 2,700 tokens, fewer with logprobs."""
_NO_ROOM = (None,)
TIMED_LAYERS = 8
"""One layer in this number is timed: a mark takes a microsecond or two of the
thread that feeds the GPU."""


class SWorker:
    """A model on a device. It holds no KV and no sequence state.

    Args:
        model: the model, or this rank's part of it.
        graphs: Runs small steps in fixed memory, as CUDA graphs. None runs every step as it is.
        gpu: the device's driver, in place of the one that torch has.
        num_lanes: Lanes for which memory is taken now. Others take it when they come.
        idle_threads: Watches whether other processes want the cores, or None.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model: Model,
        device: torch.device,
        graphs: StepGraphs | None = None,
        gpu: Gpu | None = None,
        num_lanes: int = 0,
        idle_threads: IdleThreads | None = None,
    ) -> None:
        self._idle_threads = idle_threads
        self.gpu = gpu or gpu_of(device)
        self.spec = spec
        self.model = model
        self.device = device
        self.graphs = graphs
        self._fetches: dict[int, Callable[[Tensor], Fetched]] = {}  # by lane
        self._outputs: dict[int, Fetch] = {}  # by lane
        self._rooms: dict[int, tuple[LayerRoom, ...]] = {}  # by lane
        for lane in range(num_lanes):
            self._fetch(lane)

    feeds = True  # a step may begin with tokens that only the device knows

    def begin(
        self, rows: Tensor, lane: int = 0, feed: Feed | None = None, x: Tensor | None = None
    ) -> Pass:
        """Run a step up to its first layer's attention. At most one step of a lane is under way.

        Args:
            rows: token ids and positions, int64 [2, T], on the host.
            feed: token ids that the host doesn't know.
            x: the output [T, hidden] of the stage before, on the host; token ids don't count
                then.
        """
        if self._idle_threads is not None:
            self._idle_threads.look()  # whether others want the cores
        return self.begin_alone(rows, lane, feed, x)

    def begin_alone(
        self, rows: Tensor, lane: int, feed: Feed | None = None, x: Tensor | None = None
    ) -> Pass:
        """Begin without the S-workers that this one acts as one with."""
        num_rows = rows.shape[1]
        if self.graphs is not None and num_rows <= self.graphs.buckets.max_rows:
            return PaddedPass(self, self.graphs, lane, rows, feed, x)
        if self.gpu is not None or num_rows > KEPT_ROWS:
            return Pass(self, rows, feed, x)
        # Memory of the lane's own for as many layers as may be on loan.
        rooms = self._rooms.get(lane)
        if rooms is None or rooms[0].x.shape[0] != num_rows:
            rooms = self._rooms[lane] = make_rooms(self.model, num_rows, LENT_LAYERS)
        return Pass(self, rows, feed, x, rooms)

    def upload(self, host: Tensor) -> Tensor:
        """A copy on the device; see ``to_device``."""
        return host if self.gpu is None else self.gpu.upload(host)

    def run_through(self, run: Callable[[], Tensor], inputs: StepInputs | None = None) -> Pass:
        """A step that needs no R-worker: ``run`` gives the last layer's output
        [T, hidden]. ``inputs``: of a step that attends on this device."""
        return WholePass(self, run)

    @property
    def sinks(self) -> tuple[Tensor, ...] | None:
        """Of the heads that attend on this device; see ``Model``."""
        return self.model.sinks

    def attend_in(self, cache: PagedKV) -> bool:
        """Steps attend in a cache on this device from now on. Whether there are
        kernels that read it where it lies."""
        cache.sinks = self.sinks
        return cache.kernels is not None

    def keep_on_host(self, memory: BlockMemory) -> BlockMemory:
        """Blocks of the cache that steps attend in are kept in the host's memory, too.
        Returns what copies them."""
        return memory

    def swap(self, lanes: SwappedKV) -> LaneMover:
        """Steps attend in lanes' caches from now on. Returns what brings them."""
        for cache in lanes.caches:
            cache.sinks = self.sinks
        return lanes

    def together(self) -> AbstractContextManager[object]:
        """Within, all S-workers that act as one compute."""
        return contextlib.nullcontext()

    @torch.inference_mode()
    def draw(self, logits: Tensor, states: Sequence[SamplingState], lane: int = 0) -> Drawing:
        """Start drawing the next token of each row's sequence: logits float32 [R, vocab], R >= 1,
        one state a row. Waits for nothing; at most one drawing of a lane is under way."""
        return draw(logits, states, self._fetch(lane))

    @torch.inference_mode()
    def drawn(self, drawing: Drawing) -> list[SampledToken]:
        """What was drawn, one token a row; waits until it is here."""
        return drawing.result()

    def check(self) -> None:
        """See that what was computed until now means something, once it has come to the host.

        Raises:
            WorkerError: an S-worker that this one acts as one with is lost.
        """

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
        """``draw``, and wait."""
        return self.drawn(self.draw(logits, states)) if states else []

    def to_host(self, x: Tensor, lane: int) -> Fetched:
        """A lane's x on its way to the host; it holds until the next one of
        the lane. On a CPU x itself."""
        if self.gpu is None:
            return Fetched(x)
        if lane not in self._outputs:
            self._outputs[lane] = Fetch(self.gpu)
        return self._outputs[lane](x)

    def _fetch(self, lane: int) -> Callable[[Tensor], Fetched]:
        if lane not in self._fetches:
            self._fetches[lane] = Fetched if self.gpu is None else Fetch(self.gpu, _DRAWN_BYTES)
        return self._fetches[lane]


class AttendLayer(Protocol):
    """See ``sworker.model.skeleton.Attend``. ``place``: where o [T, Hq, D] may be put."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> Tensor: ...


class Pass:
    """One step between two layers: ``q``, ``k``, ``v`` of ``layer`` wait for their attention."""

    layer: int
    q: Tensor  # [T, Hq, D]
    k: Tensor  # [T, Hkv, D]
    v: Tensor  # [T, Hkv, D]
    attended_s: Callable[[], float] | None = None
    """Seconds of attention within what the device is timed for."""
    place: Tensor | None = None
    """Where ``advance`` likes best to find o [T, Hq, D]; the same in every layer."""

    @torch.inference_mode()
    def __init__(
        self,
        worker: SWorker,
        rows: Tensor,
        feed: Feed | None = None,
        x: Tensor | None = None,
        rooms: Sequence[LayerRoom | None] = _NO_ROOM,
    ) -> None:
        """rows: token ids and positions, int64 [2, T], on the host; ``feed``:
        token ids that the host doesn't know; ``x``: see ``SWorker.begin``; ``rooms``: for
        layer i that of i modulo their number."""
        self._rooms = rooms
        self._model = worker.model
        self._layers = worker.model.step_layers
        self._upload = worker.upload
        self._inference = torch.inference_mode()
        self._timer: Timer = UNTIMED
        self._layers_timer: Timer = UNTIMED
        if worker.gpu is not None:
            self._timer = DeviceTimer(worker.gpu)
            self._layers_timer = DeviceTimer(worker.gpu, every=TIMED_LAYERS)
        self.layer = 0
        with self._timer:
            self._begin(rows, feed, x)

    def advance(self, o: Tensor) -> bool:
        """Continue with the attention's output o [T, Hq, D]. Return True if the next layer's q, k,
        v are ready. After the last layer return False; ``logits`` and ``output`` are ready then."""
        is_last = self.layer + 1 == len(self._layers)
        self.layer += not is_last
        with self._inference:  # as a decorator it would be made anew in each layer
            if self._layers_timer is not UNTIMED:
                with self._layers_timer:
                    self._advance(o, is_last)
            else:
                self._advance(o, is_last)
        return not is_last

    def run(self, attend: AttendLayer) -> Pass:
        """All layers that are left, with their attention."""
        goes_on = True
        while goes_on:
            goes_on = self.advance(attend(self.layer, self.q, self.k, self.v, self.place))
        return self

    @torch.inference_mode()
    def logits(self, rows: NDArray[np.int64]) -> Tensor:
        """Logits of some rows [R], float32 [R, vocab], on the device."""
        with self._timer:
            return self._model.logits(self._x[self._upload(torch.from_numpy(rows))])

    @property
    def output(self) -> Tensor:
        """The last layer's [T, hidden], on the device: for the stage behind."""
        return self._x

    @torch.inference_mode()
    def come_home(self, x: Tensor) -> None:
        """x [R, hidden], on the host: what the stages behind have made of some
        rows of ``output``. ``logits`` goes by these rows from now on."""
        self._x = self._upload(x)

    def device_s(self) -> float:
        """Seconds that a GPU has computed for this step, as far as it has come;
        0 on a CPU, where the caller's clock tells."""
        return self._without_attention(self._timer.seconds() + self._layers_timer.seconds())

    def _without_attention(self, seconds: float) -> float:
        return seconds if self.attended_s is None else max(0.0, seconds - self.attended_s())

    def _begin(self, rows: Tensor, feed: Feed | None, x: Tensor | None) -> None:
        token_ids, self._positions = self._upload(rows)
        if feed is not None:
            feed.put_into(token_ids, self._upload)
        if x is None:
            self._x = self._model.embed(token_ids, self._positions)  # [T, hidden]
        else:
            self._x = self._upload(x)
        self._x, (self.q, self.k, self.v) = self._layers[0].pre_attention(
            self._x, None, self._positions, self._rooms[0]
        )

    def _advance(self, o: Tensor, is_last: bool) -> None:
        layers = self._layers
        x, added = layers[self.layer - 1 + is_last].post_attention(self._x, o)
        if is_last:
            self._x = x if added is None else x + added
            return
        room = self._rooms[self.layer % len(self._rooms)]
        self._x, (self.q, self.k, self.v) = layers[self.layer].pre_attention(
            x, added, self._positions, room
        )


class PaddedPass(Pass):
    """A step in its lane's fixed memory; q, k and v hold for as many units as
    ``LaneBuffers`` says."""

    def __init__(
        self,
        worker: SWorker,
        graphs: StepGraphs,
        lane: int,
        rows: Tensor,
        feed: Feed | None = None,
        x: Tensor | None = None,
    ) -> None:
        self._graphs, self._lane = graphs, lane
        self._buffers = graphs.buffers(lane)
        mine = slice(rows.shape[1])
        self._x, self.place = self._buffers.x[mine], self._buffers.o[mine]
        self._qkv = [tuple(x[mine] for x in qkv) for qkv in self._buffers.qkv]
        super().__init__(worker, rows, feed, x)

    def _begin(self, rows: Tensor, feed: Feed | None, x: Tensor | None) -> None:
        self._bucket = self._graphs.fill(self._lane, rows, feed, x)
        self._run(0)

    def _advance(self, o: Tensor, is_last: bool) -> None:
        assert self.place is not None
        if o is not self.place:
            self.place.copy_(o)
        self._run(self.layer + is_last)

    def _run(self, unit: int) -> None:
        self._graphs.run(self._lane, unit, self._bucket)
        self.q, self.k, self.v = self._qkv[unit % len(self._qkv)]


class WholePass(Pass):
    """A step that needed nobody else: its last layer is done."""

    @torch.inference_mode()
    def __init__(self, worker: SWorker, run: Callable[[], Tensor]) -> None:
        self._model, self._upload = worker.model, worker.upload
        self._timer = UNTIMED if worker.gpu is None else DeviceTimer(worker.gpu)
        self.layer = len(self._model.layers) - 1
        with self._timer:
            self._x = run()

    def device_s(self) -> float:
        return self._without_attention(self._timer.seconds())

    def _advance(self, o: Tensor, is_last: bool) -> None:
        raise AssertionError("no layer is left")


class DeviceTimer:
    """Adds up what a GPU spends on the blocks that it is entered around, without waiting for any.

    Args:
        every: One in ``every`` blocks that are alike is measured, first the second one, and
            stands for all.
    """

    def __init__(self, gpu: Gpu, *, every: int = 1) -> None:
        self._gpu, self._every = gpu, every
        self._num_blocks = 0
        self._spans: list[tuple[Event, Event]] = []
        self._start: Event | None = None

    def __enter__(self) -> None:
        is_measured = self._num_blocks % self._every == min(1, self._every - 1)
        self._num_blocks += 1
        self._start = self._gpu.mark() if is_measured else None

    def __exit__(self, *error: object) -> None:
        if self._start is not None:
            self._spans.append((self._start, self._gpu.mark()))

    def seconds(self) -> float:
        spans = [start.elapsed_time(end) / 1e3 for start, end in self._spans if end.query()]
        blocks = self._num_blocks if self._every > 1 else len(spans)
        return float(sum(spans)) / len(spans) * blocks if spans else 0.0


class Untimed(contextlib.nullcontext[None]):
    """Stands for a timer where the device is the host, and the caller's clock tells."""

    def seconds(self) -> float:
        return 0.0


Timer: TypeAlias = DeviceTimer | Untimed
UNTIMED: Final = Untimed()
