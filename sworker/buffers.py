"""Between the device and the host: pinned memory and copy streams of one lane,
so that no copy waits for compute.

::

    compute   | S-step, lane A |                  | S-step, lane B | …           | S-step, lane A …
    copy out                   | q, k, v of A |                                   ^
    copy in                                              | o of A | ── event ─────┘

The host waits for the device in one place: before it sends a lane's q, k and v,
for their copy (``Staged.wait``). On a CPU nothing is copied, every wait is over
at once, and the same code runs.

A slot of the ring is written again after ``LENT_LAYERS`` layers: by then its
messages have been answered, which is what lets it be lent to them without a
copy (``fastdecode.wire.transport``, "Whose is an array?").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastdecode.wire.messages import Activations
from sworker.device import Event, Gpu

LENT_LAYERS = 5
"""Layers of a lane whose q, k and v may be on loan at a time: R-workers that
only store them may owe the answers of all but the one that is being written."""


class Staged:
    """A layer's q, k and v on their way to the host."""

    def __init__(
        self, arrays: tuple[Activations, Activations, Activations], event: Event | None
    ) -> None:
        self.q, self.k, self.v = (
            arrays  # [T, Hq, D], [T, Hkv, D], [T, Hkv, D]; to be read after ``wait``
        )
        self._event = event

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class Staging:
    """One lane's pinned memory, and its copies both ways. Memory grows to the
    largest step and is kept.

    Args:
        gpu: where q, k, v come from and o goes; None: the host.
    """

    def __init__(self, gpu: Gpu | None = None) -> None:
        self._gpu = gpu
        pinned, room = (_on_host, _on_host) if gpu is None else (gpu.pinned, gpu.room)
        self._slots = [_Room(pinned) for _ in range(LENT_LAYERS)]
        self._arriving = _Room(pinned)
        self._o = _Room(room)
        self._next = 0
        if gpu is not None:
            self._out_stream, self._in_stream = gpu.new_stream(), gpu.new_stream()

    @property
    def is_home(self) -> bool:
        """Whether the device is the host: what arrives is where it belongs."""
        return self._gpu is None

    @property
    def nbytes(self) -> int:
        """Pinned memory on the host."""
        return sum(room.nbytes for room in (*self._slots, self._arriving)) if self._gpu else 0

    def send(self, q: Tensor, k: Tensor, v: Tensor) -> Staged:
        """Start copying q [T, Hq, D], k and v [T, Hkv, D] to the host; never
        waits. The arrays hold for ``LENT_LAYERS`` calls; on a CPU they are the
        tensors' own memory."""
        sources = [x.contiguous() for x in (q, k, v)]
        gpu = self._gpu
        if gpu is None:
            return Staged(_as_arrays(sources), None)
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        targets = slot.take([x.shape for x in sources], q.dtype)
        self._out_stream.wait_stream(gpu.current_stream())
        with gpu.on(self._out_stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
                # The allocator mustn't give this memory to a later S-step before it has been read.
                gpu.keep(source, self._out_stream)
        return Staged(_as_arrays(targets), self._out_stream.record_event())

    def begin_layer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Room for a layer's o [T, Hq, D] on the device, and for what arrives
        of it; the same memory in every layer. The layer before has been
        consumed."""
        if self._gpu is not None:
            (self._landing,) = self._arriving.take([torch.Size(shape)], dtype)
        (o,) = self._o.take([torch.Size(shape)], dtype)
        return o

    def receive(self, array: Activations, o: Tensor, rows: slice) -> None:
        """Copy arrived rows [n, Hq, D] to ``o[rows]``; returns when the array
        may be written again."""
        source = as_tensor(array, o.dtype)
        if self._gpu is None:
            o[rows] = source
            return
        landing = self._landing[rows]
        landing.copy_(source)
        with self._gpu.on(self._in_stream):
            o[rows].copy_(landing, non_blocking=True)

    def join(self) -> None:
        """What the device does from now on comes after all that was received."""
        if self._gpu is not None:
            self._gpu.current_stream().wait_stream(self._in_stream)


class _Room:
    """Memory that is lent out in pieces, again and again.

    Args:
        make: memory of so many bytes, uint8.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._taken: tuple[list[torch.Size], torch.dtype] | None = None
        self._pieces: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def take(self, shapes: list[torch.Size], dtype: torch.dtype) -> list[Tensor]:
        """Tensors of these shapes, side by side; they hold until the next call.
        Grows by half, so that growing ends."""
        if (shapes, dtype) == self._taken:
            return self._pieces
        # An inference tensor may be written by whoever runs in inference mode
        # and by nobody else: make it a plain one.
        with torch.inference_mode(False):
            sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
            starts = [0]
            for size in sizes:
                starts.append(-(-(starts[-1] + size) // 64) * 64)
            if starts[-1] > self._memory.nbytes:
                self._memory = self._make(max(starts[-1], self._memory.nbytes * 3 // 2))
            pieces = zip(shapes, starts, sizes, strict=False)
            self._pieces = [
                self._memory[a : a + size].view(dtype).view(shape) for shape, a, size in pieces
            ]
        self._taken = shapes, dtype
        return self._pieces


def _on_host(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def as_tensor(array: Activations, dtype: torch.dtype) -> Tensor:
    """The array as a tensor of ``dtype``, without a copy."""
    host = torch.from_numpy(array)
    return host if dtype == torch.float32 else host.view(dtype)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy of host memory, or that memory if the device is the host. Never
    waits for the device: a GPU copies it from pinned memory, which its
    allocator lends to nobody else until then."""
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def _as_arrays(tensors: Sequence[Tensor]) -> tuple[Activations, Activations, Activations]:
    q, k, v = (
        x.numpy() if x.dtype == torch.float32 else x.view(torch.uint16).numpy() for x in tensors
    )
    return q, k, v
