"""Between the device and the host: pinned memory and copy streams of one lane,
so that no copy waits for compute.

::

    compute   | S-step, lane A | pack |           | S-step, lane B | …   | S-step, lane A …
    copy out                          | q, k, v |                        ^
    copy in                                         | o of A | ── event ─┘

A layer's q, k and v are packed on the device as they are sent, holder by
holder, only what each is sent; one copy takes them to the host, to where they
are sent from. The host waits for the device in one place: before it sends them
(``Staged.wait``). What arrives of o goes to the device once it is all there: a
long answer from where it was received, the others in one copy, side by side.

On a CPU nothing is copied, every wait is over at once, and ``Staging`` is what
remains.

A slot of the ring is written again after ``LENT_LAYERS`` layers: by then its
messages have been answered, which is what lets it be lent to them without a
copy (``fastdecode.wire.transport``, "Whose is an array?").
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.wire.messages import Activations
from sworker.device import Event, Gpu, gpu_of


class Room:
    """Memory that is lent out, again and again.

    Args:
        make: Returns memory of a number of bytes, uint8.
    """

    def __init__(self, make: Callable[[int], Tensor], num_bytes: int = 0) -> None:
        self._make = make
        self._memory = make(num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)
        self._taken: tuple[torch.Size, torch.dtype] | None = None
        self._lent = self._memory

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor; it holds until the next call. Grows by half, so that growing ends."""
        if (shape, dtype) == self._taken:
            return self._lent
        num_bytes = math.prod(shape) * dtype.itemsize
        # An inference tensor may be written in inference mode only: make it a
        # plain one.
        with torch.inference_mode(False):
            if num_bytes > self._memory.nbytes:
                self._memory = self._make(max(num_bytes, self._memory.nbytes * 3 // 2))
            self._lent = self._memory[:num_bytes].view(dtype).view(shape)
        self._taken = shape, dtype
        return self._lent


KEPT_ROWS = 256
"""Of a step of so many rows or fewer, q, k and v of the layers on loan are in memory of the
lane's own, and what is sent of them is cut up once. With more rows that memory would be much,
and calls are few for what is computed."""
LENT_LAYERS = 5
"""Layers of a lane whose q, k and v may be on loan at a time: R-workers that
only store them may owe the answers of all but the one that is being written."""

DIRECT_BYTES = 128 << 10
"""Of an answer that goes to the device by itself: to copy fewer on the host
takes no longer than a call of the driver."""

Shipment: TypeAlias = tuple[Activations, Activations, Activations]
"""q [n, Hq, D], k and v [m, Hkv, D] for one holder."""


@dataclass(frozen=True)
class Share:
    """The rows of a step that one holder is sent."""

    queries: slice  # rows whose q is sent, and whose o comes back
    closed: tuple[NDArray[np.int64], ...]  # rows whose q is sent behind those
    rows: slice  # rows whose k and v are sent
    answered: slice  # those of ``queries`` whose o is all that comes back


class _Copied:
    """On its way to the host.

    Args:
        event: when it is there; None: it is.
    """

    def __init__(self, event: Event | None) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class Staged(_Copied):
    """A layer's q, k and v on their way to the host.

    Args:
        shipments: one a share; to be read after ``wait``.
        event: when they are there; None: they are.
    """

    def __init__(self, shipments: Sequence[Shipment], event: Event | None) -> None:
        super().__init__(event)
        self.shipments = shipments


class Staging:
    """One lane's way to R-workers and back where the device is the host."""

    is_home = True  # what arrives is where it belongs

    def __init__(self) -> None:
        self._o = Room(host_memory)
        self._shares: Sequence[Share] = ()
        self._sent: dict[int, tuple[Tensor, Tensor, Tensor, Staged]] = {}
        """By q's identity: a layer in the lane's own memory, and what is sent of it."""
        self._lent: tuple[Activations, Tensor] | None = None

    def begin_step(self, shares: Sequence[Share]) -> None:
        """The layers from now on are of a step that has these shares."""
        if any(share.closed for share in shares) or shares != self._shares:
            self._sent.clear()
        self._shares = shares

    def send(self, q: Tensor, k: Tensor, v: Tensor) -> Staged:
        """Start copying q [T, Hq, D], k and v [T, Hkv, D] to the host; never waits. The shipments
        hold for ``LENT_LAYERS`` calls; on a CPU they are the tensors' own memory."""
        sent = self._sent.get(id(q))
        if sent is None or sent[1] is not k or sent[2] is not v:
            return self._stage(q, k, v)
        return sent[3]

    def _stage(self, q: Tensor, k: Tensor, v: Tensor) -> Staged:
        dense = q.contiguous(), k.contiguous(), v.contiguous()
        staged = Staged(self.shipments(*map(as_array, dense)), None)
        has_closed = any(share.closed for share in self._shares)
        are_views = all(map(operator.is_, dense, (q, k, v))) and not has_closed
        if are_views and q.shape[0] <= KEPT_ROWS:
            if len(self._sent) == LENT_LAYERS:
                self._sent.clear()  # it is other memory in each layer
            self._sent[id(q)] = *dense, staged
        return staged

    def shipments(self, q: Activations, k: Activations, v: Activations) -> list[Shipment]:
        """Each share of a layer's rows."""
        return [
            (
                np.concatenate((q[share.queries], *(q[rows] for rows in share.closed)))
                if share.closed
                else q[share.queries],
                k[share.rows],
                v[share.rows],
            )
            for share in self._shares
        ]

    def begin_layer(
        self, shape: torch.Size, dtype: torch.dtype, place: Tensor | None = None
    ) -> Tensor:
        """Room for a layer's o [T, Hq, D] on the device, and for what arrives of it: ``place`` if
        the lane has one; the same memory in every layer. The layer before has been consumed."""
        return place if place is not None else self._o.take(shape, dtype)

    def receive(self, array: Activations, o: Tensor, rows: slice) -> None:
        """Take in arrived rows [n, Hq, D] of o; returns when the array may be
        written again. They may be answered rows only."""
        o[rows] = as_tensor(array, o.dtype)

    def lend(self, array: Activations, dtype: torch.dtype) -> Tensor:
        """All rows of a layer's o, where they are: mostly the same array in every layer."""
        if self._lent is None or self._lent[0] is not array:
            self._lent = array, as_tensor(array, dtype)
        return self._lent[1]

    def join(self) -> None:
        """What the device does from now on comes after all that was received."""


class GpuStaging(Staging):
    """One lane's way over pinned memory.

    Args:
        gpu: where q, k, v come from and o goes.
        slot_bytes: most that a layer's q, k and v take: memory for all of them is taken once,
            since taking it stops the device. It grows if more is sent after all.
        direct_bytes: see ``DIRECT_BYTES``.
    """

    is_home = False

    def __init__(self, gpu: Gpu, slot_bytes: int = 0, direct_bytes: int = DIRECT_BYTES) -> None:
        super().__init__()
        self._gpu = gpu
        self._slots = [Room(gpu.pinned, slot_bytes) for _ in range(LENT_LAYERS)]
        self._landing = Room(gpu.pinned, slot_bytes)
        self._packed, self._o = Room(gpu.room, slot_bytes), Room(gpu.room)
        self._next = 0
        self._out_stream, self._in_stream = gpu.new_stream(), gpu.new_stream()
        self._copied: Event | None = None
        self._direct_bytes = direct_bytes
        self._landed: list[slice] = []  # rows of the layer that came by way of the host
        self._direct: list[tuple[slice, Activations]] = []  # and those that didn't
        self._kept: list[tuple[slice, Activations]] = []  # of the last layer that was joined
        self._step = _PackedStep((), gpu.upload)

    @property
    def nbytes(self) -> int:
        """Pinned memory on the host."""
        return sum(room.nbytes for room in (*self._slots, self._landing))

    def begin_step(self, shares: Sequence[Share]) -> None:
        self._step = _PackedStep(shares, self._gpu.upload)
        self._direct, self._landed = [], []

    def send(self, q: Tensor, k: Tensor, v: Tensor) -> Staged:
        step, gpu = self._step, self._gpu
        computing = gpu.current_stream()
        sources = step.sources(q, k, v)
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        size = torch.Size((step.num_elements(q, k),))
        packed, target = self._packed.take(size, q.dtype), slot.take(size, q.dtype)
        if self._copied is not None:
            computing.wait_event(self._copied)  # of what was packed before
        if sources:
            torch.cat(sources, out=packed)
        self._out_stream.wait_stream(computing)
        with gpu.on(self._out_stream):
            target.copy_(packed, non_blocking=True)
        self._copied = self._out_stream.record_event()
        return Staged(step.shipments(target, q, k), self._copied)

    def begin_layer(
        self, shape: torch.Size, dtype: torch.dtype, place: Tensor | None = None
    ) -> Tensor:
        o = super().begin_layer(shape, dtype, place)
        self._step.land(self._landing.take(shape, dtype), o)
        return o

    def receive(self, array: Activations, o: Tensor, rows: slice) -> None:
        if array.nbytes >= self._direct_bytes and self._gpu.reads(array):
            self._direct.append((rows, array))
            return
        self._step.landing[rows] = array  # with no thread but this one
        self._landed.append(rows)

    def join(self) -> None:
        if not self._direct and not self._landed:
            return
        landed = self._landed if self._direct else None
        with self._gpu.on(self._in_stream):
            for o, landing in self._step.arriving(landed):
                o.copy_(landing, non_blocking=True)
            for rows, array in self._direct:
                self._step.place(rows).copy_(torch.from_numpy(array), non_blocking=True)
        self._gpu.current_stream().wait_stream(self._in_stream)
        # The layer before was computed, which came behind its copies: else none
        # of these answers would be here. So what it had is nobody's any more.
        self._kept = self._direct
        self._direct, self._landed = [], []


class Fetched(_Copied):
    """A small result on its way to the host.

    Args:
        host: holds it after ``wait``.
        event: when it is there; None: it is.
    """

    def __init__(self, host: Tensor, event: Event | None = None) -> None:
        super().__init__(event)
        self.host = host


class Fetch:
    """Takes small results to the host, one after another, behind what is computed.

    Args:
        num_bytes: pinned memory to begin with.
    """

    def __init__(self, gpu: Gpu, num_bytes: int = 0) -> None:
        self._gpu = gpu
        self._room = Room(gpu.pinned, num_bytes)

    def __call__(self, x: Tensor) -> Fetched:
        """Never waits. The result holds until the next call."""
        host = self._room.take(x.shape, x.dtype)
        host.copy_(x, non_blocking=True)
        return Fetched(host, self._gpu.current_stream().record_event())


@dataclass(frozen=True)
class Feed:
    """Drawn tokens that a step embeds before the host knows them, for some of its rows."""

    tokens: Tensor  # int64 [B], on the device
    sources: NDArray[np.int64]  # [K] indices into ``tokens``
    rows: NDArray[np.int64]  # [K] rows of the step that they are for

    def put_into(self, token_ids: Tensor, upload: Callable[[Tensor], Tensor]) -> None:
        """Write them among a step's token ids, int64 [T], on the device. ``upload`` copies to
        the device."""
        rows, sources = upload(torch.from_numpy(np.stack((self.rows, self.sources))))
        token_ids.index_copy_(0, rows, self.tokens.index_select(0, sources))


def make_staging(gpu: Gpu | None, slot_bytes: int) -> Staging:
    """A lane's; gpu: None if the device is the host."""
    return Staging() if gpu is None else GpuStaging(gpu, slot_bytes)


class _PackedStep:
    """What is the same in every layer of a step: made once, and kept."""

    def __init__(self, shares: Sequence[Share], upload: Callable[[Tensor], Tensor]) -> None:
        self._shares, self._upload = shares, upload
        self._num_queries = [
            _length(share.queries) + sum(map(len, share.closed)) for share in shares
        ]
        self._num_packed = sum(self._num_queries), sum(_length(share.rows) for share in shares)
        self._has_closed = any(share.closed for share in shares)
        self._packed_from: tuple[Tensor, list[Tensor]] | None = None
        self._shipments: dict[int, list[Shipment]] = {}
        self._landed_at: tuple[Tensor, Tensor] | None = None
        self._o = torch.empty(0)  # as messages carry it
        self._places: dict[tuple[int, int], Tensor] = {}
        self.landing: Activations = np.zeros(0, np.float32)
        """What has arrived of o, [T, Hq, D], on the host."""
        self._all_arriving: list[tuple[Tensor, Tensor]] = []

    def num_elements(self, q: Tensor, k: Tensor) -> int:
        """That are packed of such a q and such k and v."""
        num_queries, num_kv = self._num_packed
        return num_queries * _row_size(q) + 2 * num_kv * _row_size(k)

    def sources(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """What is packed, one behind the other, each flat and dense. Tensors that are the same in
        every layer, as a lane's own are, are cut up once."""
        if self._packed_from is not None and self._packed_from[0] is q:
            return self._packed_from[1]
        dense_q, dense_k, dense_v = q.contiguous(), k.contiguous(), v.contiguous()
        pieces: list[Tensor] = []
        for share in self._shares:
            pieces.append(dense_q[share.queries])
            pieces += [dense_q[self._upload(torch.from_numpy(x))] for x in share.closed]
            pieces += [dense_k[share.rows], dense_v[share.rows]]
        flat = [piece.reshape(-1) for piece in pieces if piece.numel()]
        if not self._has_closed and dense_q is q and dense_k is k and dense_v is v:
            self._packed_from = q, flat
        return flat

    def shipments(self, packed: Tensor, q: Tensor, k: Tensor) -> list[Shipment]:
        """The shares of what was packed, on the host."""
        if packed.data_ptr() not in self._shipments:
            self._shipments[packed.data_ptr()] = self._cut(as_array(packed), q, k)
        return self._shipments[packed.data_ptr()]

    def land(self, landing: Tensor, o: Tensor) -> None:
        """Where o arrives, and where it goes."""
        before = self._landed_at
        if before is not None and before[0] is landing and before[1] is o:
            return
        self._landed_at = landing, o
        self._o, self.landing = _carried(o), as_array(landing)
        self._places.clear()
        stretches: list[slice] = []
        for share in self._shares:
            rows = share.answered
            if rows.start == rows.stop:
                continue
            if stretches and stretches[-1].stop == rows.start:
                rows = slice(stretches.pop().start, rows.stop)
            stretches.append(rows)
        self._all_arriving = [(o[rows], landing[rows]) for rows in stretches]

    def place(self, rows: slice) -> Tensor:
        """These rows of o on the device, as messages carry them."""
        ends = rows.start, rows.stop
        place = self._places.get(ends)
        if place is None:
            place = self._places[ends] = self._o[rows]
        return place

    def arriving(self, landed: Sequence[slice] | None) -> list[tuple[Tensor, Tensor]]:
        """Return these rows of o and of ``landing``; of None all answered ones, in stretches."""
        if landed is None or self._landed_at is None:
            return self._all_arriving
        landing, o = self._landed_at
        return [(o[rows], landing[rows]) for rows in landed]

    def _cut(self, packed: Activations, q: Tensor, k: Tensor) -> list[Shipment]:
        first, shipments = 0, []
        for share, num_queries in zip(self._shares, self._num_queries, strict=True):
            arrays = []
            num_kv = _length(share.rows)
            for num_rows, like in ((num_queries, q), (num_kv, k), (num_kv, k)):
                end = first + num_rows * _row_size(like)
                arrays.append(packed[first:end].reshape(num_rows, *like.shape[1:]))
                first = end
            shipments.append((arrays[0], arrays[1], arrays[2]))
        return shipments


def host_memory(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _row_size(x: Tensor) -> int:
    return math.prod(x.shape[1:])


def as_tensor(array: Activations, dtype: torch.dtype) -> Tensor:
    """The array as a tensor of ``dtype``, without a copy."""
    host = torch.from_numpy(array)
    return host if dtype == torch.float32 else host.view(dtype)


def as_array(x: Tensor) -> Activations:
    """A tensor on the host as an array, without a copy."""
    array: Activations = _carried(x).numpy()
    return array


def _carried(x: Tensor) -> Tensor:
    """As messages carry it: NumPy has no bfloat16."""
    return x if x.dtype == torch.float32 else x.view(torch.uint16)


def to_device(host: Tensor, device: torch.device, gpu: Gpu | None = None) -> Tensor:
    """A copy of host memory, or that memory if the device is the host. Never waits for the
    device. ``gpu``: its driver, in place of the one that torch has."""
    gpu = gpu or gpu_of(device)
    return host if gpu is None else gpu.upload(host)
