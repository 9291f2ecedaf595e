"""A GPU that isn't there: operators run at once on the CPU, and what orders them is recorded. Two
accesses to the same bytes, one of which writes, that nothing orders are a race.

Every stream and the host have a vector clock (Lamport; Mattern 1988): what a stream does comes
after all that the host did before it queued it, and after what the stream was told to wait for;
what the host does comes after the events that it waited for. Device memory is ordinary memory. Who
touches what is told by a ``TorchDispatchMode``, and by whoever reads or writes arrays beside
torch."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from sworker.swap.host import HostKV, Staged

HOST, COMPUTE = "host", "compute"
_PAGE_BITS = 12
Clock = dict[str, int]
Span = tuple[int, int]


@dataclass(frozen=True)
class Access:
    """Bytes ``first`` to ``end``, by whom and when."""

    first: int
    end: int
    who: str
    tick: int
    writes: bool
    what: str


@dataclass
class Checker:
    """Finds accesses that nothing orders."""

    races: list[str] = field(default_factory=list)
    num_accesses: int = 0
    clocks: dict[str, Clock] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    host_spans: list[Span] = field(default_factory=list)
    staying_spans: list[Span] = field(default_factory=list)
    _seen: dict[int, list[Access]] = field(default_factory=lambda: defaultdict(list))
    _used_elsewhere: dict[int, str] = field(default_factory=dict)

    @property
    def unkept(self) -> list[str]:
        """Uses of device memory by a stream other than the computing one, for which nothing keeps
        its allocator from lending it to somebody else meanwhile."""
        return [what for first, what in self._used_elsewhere.items() if not self._stays(first)]

    def join(self, who: str, clock: Clock) -> None:
        """What ``who`` does from now on comes after all that the clock says."""
        mine = self.clocks[who]
        for other, tick in clock.items():
            mine[other] = max(mine[other], tick)

    def now(self, who: str) -> Clock:
        """All that comes before what ``who`` does next. A stream's next comes after the host's."""
        if who != HOST:
            self.join(who, self.clocks[HOST])
        return dict(self.clocks[who])

    def forget(self, span: Span) -> None:
        """The host has allocated these bytes: what was there before is nobody's."""
        for page in _pages(span):
            seen = self._seen[page]
            seen[:] = [x for x in seen if x.end <= span[0] or span[1] <= x.first]

    def is_host(self, address: int) -> bool:
        return any(first <= address < end for first, end in self.host_spans)

    def access(self, who: str, spans: Iterable[Span], what: str, *, writes: bool) -> None:
        self.now(who)
        clock = self.clocks[who]
        clock[who] += 1
        self.num_accesses += 1
        for first, end in spans:
            new = Access(first, end, who, clock[who], writes, what)
            self._look_for_race(new, clock)
            if who not in (HOST, COMPUTE):
                self._used_elsewhere[first] = f"{what} on {who}"

    def _look_for_race(self, new: Access, clock: Clock) -> None:
        for page in _pages((new.first, new.end)):
            left = []
            for old in self._seen[page]:
                overlaps = old.first < new.end and new.first < old.end
                is_before = old.tick <= clock[old.who]
                if overlaps and (old.writes or new.writes) and not is_before:
                    self.races.append(f"{new.what} on {new.who} and {old.what} on {old.who}")
                covers = new.writes and new.first <= old.first and old.end <= new.end
                if not (overlaps and is_before and covers):
                    left.append(old)
            self._seen[page] = [*left, new][-64:]

    def _stays(self, address: int) -> bool:
        staying = any(first <= address < end for first, end in self.staying_spans)
        return staying or self.is_host(address)


def _pages(span: Span) -> range:
    return range(span[0] >> _PAGE_BITS, ((span[1] - 1) >> _PAGE_BITS) + 1)


def span_of(x: Tensor | np.ndarray) -> Span | None:
    """The bytes that it lies in; None if there are none."""
    if isinstance(x, np.ndarray):
        return (x.ctypes.data, x.ctypes.data + x.nbytes) if x.size else None
    if x.numel() == 0:
        return None
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


class RecordedEvent:
    def __init__(self, gpu: RecordedGpu, clock: Clock, name: str) -> None:
        self._gpu, self.clock, self.name = gpu, clock, name
        self._looks_left = gpu.looks_until_done

    def query(self) -> bool:
        if self._looks_left > 0:
            self._looks_left -= 1
            return False
        self._gpu.checker.join(HOST, self.clock)
        return True

    def synchronize(self) -> None:
        self._gpu.refuse_if_capturing("a wait of the host")
        self._gpu.calls["event.synchronize"] += 1
        if self._looks_left:
            self._gpu.on_wait(self.name)
        self._looks_left = 0
        self.query()


@dataclass(frozen=True)
class RecordedMark:
    """Time is the number of calls so far, in milliseconds."""

    time_ms: float

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: RecordedMark) -> float:
        return end.time_ms - self.time_ms


class RecordedStream:
    def __init__(self, gpu: RecordedGpu, name: str) -> None:
        self._gpu, self.name = gpu, name

    def wait_stream(self, stream: RecordedStream) -> None:
        self._gpu.calls["wait_stream"] += 1
        self._gpu.checker.join(self.name, self._gpu.checker.now(stream.name))

    def wait_event(self, event: RecordedEvent) -> None:
        self._gpu.calls["wait_event"] += 1
        self._gpu.checker.join(self.name, event.clock)

    def record_event(self) -> RecordedEvent:
        self._gpu.calls["record_event"] += 1
        return RecordedEvent(self._gpu, self._gpu.checker.now(self.name), self.name)


class RecordedGraph:
    """Does again what was captured, as one call."""

    def __init__(self, gpu: RecordedGpu, run: Callable[[], None]) -> None:
        self._gpu, self._run = gpu, run

    def replay(self) -> None:
        calls = self._gpu.calls
        calls["replay"] += 1
        self._gpu.calls = Counter()
        try:
            self._run()
        finally:
            self._gpu.calls = calls


class RecordedGpu(TorchDispatchMode):
    """See ``sworker.device.Gpu``. Entered as a context, it records.

    Args:
        looks_until_done: how often an event says that it isn't there yet.
    """

    def __init__(self, looks_until_done: int = 3) -> None:
        super().__init__()
        self.checker = Checker()
        self.calls: Counter[str] = Counter()
        """Of the driver and of torch's operators; views together."""
        self.looks_until_done = looks_until_done
        self.collected_while_capturing = False
        self._is_capturing = False
        self._streams = [RecordedStream(self, COMPUTE)]
        self._num_streams = 0
        self._kept: list[Tensor] = []

    def on_wait(self, stream: str) -> None:
        """The host waits for a stream, which isn't there yet."""

    def new_stream(self) -> RecordedStream:
        self._num_streams += 1
        return RecordedStream(self, f"stream {self._num_streams}")

    def current_stream(self) -> RecordedStream:
        return self._streams[-1]

    @contextlib.contextmanager
    def on(self, stream: RecordedStream) -> Iterator[None]:
        self.calls["on"] += 1
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.pop()

    def mark(self) -> RecordedMark:
        self.calls["mark"] += 1
        return RecordedMark(sum(self.calls.values()))

    def pinned(self, num_bytes: int) -> Tensor:
        self.refuse_if_capturing("pinned memory")
        self.calls["pinned"] += 1
        return self.host(torch.empty(num_bytes, dtype=torch.uint8))

    def reads(self, array: np.ndarray) -> bool:
        return self.checker.is_host(array.ctypes.data)

    def mapped(self, host: Tensor) -> Tensor:
        return host

    def upload(self, host: Tensor) -> Tensor:
        self.refuse_if_capturing("a copy from the host")
        self.calls["upload"] += 1
        if self.checker.is_host(host.data_ptr()):
            self.read(host.numpy(), "upload")  # by the host, at once
        staged = torch.from_numpy(host.numpy().copy())
        if span := span_of(staged):
            self.checker.forget(span)
        if self._streams[-1].name != COMPUTE:
            self.stays(staged)  # allocated for that stream, and lent again in its order
        return staged

    def room(self, num_bytes: int) -> Tensor:
        """Once nobody has it, torch's allocator lends it to the computing stream."""
        self.calls["room"] += 1
        memory = np.empty(num_bytes, np.uint8)
        kept = self.stays(torch.from_numpy(memory))
        lent = memory[:]
        weakref.finalize(lent, self.lend_again, kept)
        return torch.from_numpy(lent)

    def lend_again(self, memory: Tensor) -> None:
        """The computing stream writes what was given back."""
        if span := span_of(memory):
            self.checker.access(COMPUTE, [span], "memory that was given back", writes=True)

    def new_pool(self) -> object:
        return object()

    def capture(self, run: Callable[[], None], pool: object) -> RecordedGraph:
        self.collected_while_capturing |= gc.isenabled()
        self._is_capturing = True
        gc.callbacks.append(self._on_collection)
        try:
            run()
        finally:
            self._is_capturing = False
            gc.callbacks.remove(self._on_collection)
        return RecordedGraph(self, run)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        self.collected_while_capturing = True

    def refuse_if_capturing(self, what: str) -> None:
        if self._is_capturing:
            raise RuntimeError(f"{what} can't be captured")

    def host(self, memory: Tensor | np.ndarray) -> Tensor:
        """Memory that was allocated on the host just now."""
        tensor = torch.from_numpy(memory) if isinstance(memory, np.ndarray) else memory
        if span := span_of(tensor):
            self.checker.forget(span)
            self.checker.host_spans.append(span)
        self._kept.append(tensor)
        return tensor

    def stays(self, tensor: Tensor) -> Tensor:
        """Memory on the device that is never given back."""
        if span := span_of(tensor):
            self.checker.staying_spans.append(span)
        self._kept.append(tensor)
        return tensor

    def read(self, array: np.ndarray, what: str) -> None:
        """The host, or whoever it lent the array to, reads it."""
        if span := span_of(array):
            self.checker.access(HOST, [span], what, writes=False)

    def write(self, array: np.ndarray, what: str) -> None:
        """The host, or whoever it was lent by, writes it."""
        if span := span_of(array):
            self.checker.access(HOST, [span], what, writes=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        if name.startswith("aten::lift_fresh") and result.dim() > 0:
            # Where it has no dims, it stays on the host, and is a kernel's argument.
            self.refuse_if_capturing("a tensor made of numbers")
        self.calls["view"] += func.is_view
        if func.is_view or "empty" in name or name in ("aten::detach", "aten::alias"):
            return result
        self.calls[name] += 1
        given = [*zip(func._schema.arguments, args, strict=False)]
        given += [(x, kwargs[x.name]) for x in func._schema.arguments if x.name in kwargs]
        written, read = set(_spans(result)), set()
        for argument, value in given:
            info = argument.alias_info
            (written if info is not None and info.is_write else read).update(_spans(value))
        on_host = {self.checker.is_host(first) for first, _ in written | read}
        if len(on_host) > 1 or _asks_host(func, args):
            self.refuse_if_capturing(name)
        is_host = on_host == {True}
        who = HOST if is_host else self._streams[-1].name
        self.checker.access(who, read - written, name, writes=False)
        self.checker.access(who, written, name, writes=True)
        return result


def _asks_host(func: Any, args: Any) -> bool:
    """Whether the host must know something to queue it: numbers, or chance."""
    if func._schema.name == "aten::index":  # by numbers it may
        return any(x is not None and x.dtype == torch.bool for x in args[1])
    asking = {
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.nondeterministic_seeded,
    }
    return not asking.isdisjoint(func.tags)


def _spans(values: object) -> Iterator[Span]:
    for x in tree_iter(values):
        if isinstance(x, Tensor) and (span := span_of(x)):
            yield span


def record_places(gpu: RecordedGpu, host: HostKV) -> None:
    """Record the host's own writes to swapped KV, which torch does not see."""
    place = host.place

    def placed(slots: np.ndarray, staged: Staged) -> None:
        for rows, came in zip(host._rows, staged.rows, strict=True):
            gpu.read(came, "what has come")
            for there in rows:
                for slot in slots.tolist():
                    gpu.write(there[slot], "its place on the host")
        place(slots, staged)

    host.place = placed  # type: ignore[method-assign]
