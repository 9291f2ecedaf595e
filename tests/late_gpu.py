"""A GPU that takes its time: operators are queued, stream by stream, and run as
late as what is waited for allows, or at random moments. What reads memory too
early, or writes it too soon, gives other numbers.

Memory is the host's, as with ``recorded_gpu``; what an operator returns is there
at once, and holds nonsense until the operator has run.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

_LOOKS = 12
"""So often an event may say that it isn't there yet."""


@dataclass(eq=False)
class LateStream:
    """What is queued, and how much of it is done."""

    gpu: LateGpu
    queue: deque[Callable[[], None] | LateEvent] = field(default_factory=deque)
    num_queued: int = 0
    num_done: int = 0

    def add(self, entry: Callable[[], None] | LateEvent) -> None:
        self.queue.append(entry)
        self.num_queued += 1

    def wait_stream(self, stream: LateStream) -> None:
        self.add(stream.record_event())

    def wait_event(self, event: LateEvent) -> None:
        self.add(event)

    def record_event(self) -> LateEvent:
        return LateEvent(self, self.num_queued)

    def run_to(self, position: int) -> None:
        """Do what was queued by then, and what it waits for."""
        while self.num_done < position:
            entry = self.queue.popleft()
            if isinstance(entry, LateEvent):
                entry.stream.run_to(entry.position)
            else:
                with _disable_current_modes(), torch.inference_mode():
                    entry()
            self.num_done += 1

    def run_one(self) -> None:
        """What is next, unless it waits for something."""
        if self.queue:
            entry = self.queue[0]
            if not isinstance(entry, LateEvent) or entry.has_happened:
                self.run_to(self.num_done + 1)


@dataclass(eq=False)
class LateEvent:
    stream: LateStream
    position: int
    looks: int = 0

    @property
    def has_happened(self) -> bool:
        return self.stream.num_done >= self.position

    def query(self) -> bool:
        self.looks += 1
        self.stream.gpu.go_on()
        if self.looks > _LOOKS:
            self.synchronize()
        return self.has_happened

    def synchronize(self) -> None:
        self.stream.run_to(self.position)


class LateMark:
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: LateMark) -> float:
        return 1.0


@dataclass
class LateGraph:
    """The operators of a capture, and the memory that they had."""

    gpu: LateGpu
    entries: list[Callable[[], None]]

    def replay(self) -> None:
        self.gpu.num_replays += 1
        for entry in self.entries:
            self.gpu.current_stream().add(entry)


class LateGpu(TorchDispatchMode):
    """See ``sworker.device.Gpu``. Entered as a context, it takes in operators.

    Args:
        seed: of the moments at which operators run; None: as late as may be.
    """

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self._random = None if seed is None else random.Random(seed)
        self._streams: list[LateStream] = []
        self._stack = [self.new_stream()]
        self._host: list[Tensor] = []
        self._captured: list[Callable[[], None]] | None = None
        self.num_late = 0
        """Operators that were queued."""
        self.num_replays = 0

    def new_stream(self) -> LateStream:
        stream = LateStream(self)
        self._streams.append(stream)
        return stream

    def current_stream(self) -> LateStream:
        return self._stack[-1]

    @contextlib.contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()

    def mark(self) -> LateMark:
        return LateMark()

    def pinned(self, num_bytes: int) -> Tensor:
        memory = torch.full((num_bytes,), 255, dtype=torch.uint8)  # NaN, and no token
        self._host.append(memory)
        return memory

    def reads(self, array: np.ndarray) -> bool:
        """What a copy reads must be known to be the host's."""
        memory = torch.from_numpy(array.view(np.uint8).reshape(-1))
        self._host.append(memory)
        return True

    def mapped(self, host: Tensor) -> Tensor:
        return host

    def upload(self, host: Tensor) -> Tensor:
        staged = torch.from_numpy(host.numpy().copy())
        device = torch.empty(staged.shape, dtype=staged.dtype)
        self.queue(lambda: device.copy_(staged))
        return device

    def room(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def new_pool(self) -> object:
        return object()

    def capture(self, run: Callable[[], None], pool: object) -> LateGraph:
        self._captured = []
        try:
            run()
            return LateGraph(self, self._captured)
        finally:
            self._captured = None

    def go_on(self) -> None:
        if self._random is not None:
            for _ in range(self._random.randrange(12)):
                self._random.choice(self._streams).run_one()

    def finish(self) -> None:
        for stream in self._streams:
            stream.run_to(stream.num_queued)

    def queue(self, entry: Callable[[], Any]) -> None:
        self.num_late += 1
        if self._captured is not None:
            self._captured.append(entry)
            return
        self.current_stream().add(entry)
        self.go_on()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        with self:  # what is made of others, as a reshape that copies
            parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        if func.is_view or not tensors or func._schema.name in ("aten::detach", "aten::alias"):
            return func(*args, **kwargs)
        if all(map(self._is_host, tensors)):
            return func(*args, **kwargs)
        written = [
            value
            for argument, value in _given(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            self.queue(lambda: func(*args, **kwargs))
            return written[0] if len(func._schema.returns) == 1 else tuple(written)
        try:
            shapes = func(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs))
        except (NotImplementedError, RuntimeError):
            # It depends on what the tensors hold: the host waits for them.
            assert self._captured is None, f"{func} can't be captured"
            stream = self.current_stream()
            stream.run_to(stream.num_queued)
            return func(*args, **kwargs)
        results = tree_map(_like, shapes)
        self.queue(lambda: _put(results, func(*args, **kwargs)))
        return results

    def _is_host(self, tensor: Tensor) -> bool:
        first = tensor.data_ptr()
        return any(x.data_ptr() <= first < x.data_ptr() + x.nbytes for x in self._host)


def _given(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    yield from zip(func._schema.arguments, args, strict=False)
    yield from ((x, kwargs[x.name]) for x in func._schema.arguments if x.name in kwargs)


def _as_meta(x: Any) -> Any:
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


def _like(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    memory = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    return memory.fill_(float("nan")) if x.is_floating_point() else memory.zero_()


def _put(results: Any, found: Any) -> None:
    for result, value in zip(tree_iter(results), tree_iter(found), strict=True):
        if isinstance(result, Tensor):
            result.copy_(value)
