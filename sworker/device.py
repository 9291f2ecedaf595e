"""What the S-worker asks of a GPU's driver: streams, events, pinned memory.

Everything that orders work on a device, or waits for it, goes through here. So
tests can put a recording driver in CUDA's place, which runs operators on the
CPU and finds what nothing orders.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import Given, WorkerError
from fastdecode.wire.buffers import Pages, map_pages, pages_of

log = logging.getLogger(__name__)

_STAGED_BYTES = 64 << 10
"""Of memory that isn't pinned, CUDA takes so many to itself at once, without a
wait for what is queued before."""
_PORTABLE = 1
"""Pinned for every device: cudaHostRegisterPortable."""


class Event(Protocol):
    """A point in what a stream does."""

    def query(self) -> bool:
        """Whether the device has come so far. Never waits."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Stream(Protocol):
    """Work of a device, done in the order in which it is queued. Other streams
    and events are the same device's."""

    def wait_stream(self, stream: Any) -> None:
        """What is queued here from now on comes after what is queued there by now."""

    def wait_event(self, event: Any) -> None:
        """What is queued here from now on comes after the event."""

    def record_event(self) -> Event:
        """The point after all that is queued by now."""


class Mark(Protocol):
    """A point in what a stream does, and when the device came there."""

    def query(self) -> bool:
        """Whether it has. Never waits."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this point to another, both of which it has passed."""


class Graph(Protocol):
    """Operators that were captured."""

    def replay(self) -> None:
        """Queue them all."""


class Gpu(Protocol):
    """A device whose work is queued, and which has its own memory."""

    def new_stream(self) -> Stream:
        """One beside the others."""

    def current_stream(self) -> Stream:
        """Where this thread's operators are queued."""

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Within, this thread's operators are queued there."""

    def mark(self) -> Mark:
        """This point of the current stream."""

    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 on the host, which the device copies from and to on its own."""

    def reads(self, array: NDArray[Any]) -> bool:
        """Whether the device copies from there on its own: it is pinned memory,
        or messages' buffers, which then become that. Whoever has it copied
        keeps the array until that is done."""

    def upload(self, host: Tensor) -> Tensor:
        """A copy of host memory on the device. Never waits, and the memory may
        be written again at once."""

    def room(self, num_bytes: int) -> Tensor:
        """uint8 on the device. Whoever asks for it keeps it as long as any
        stream may use it."""

    def new_pool(self) -> object:
        """Memory for what graphs need while they run. Those that share one run
        one after another."""

    def capture(self, run: Callable[[], None], pool: object) -> Graph:
        """The operators of ``run``, which it queues on the current stream and
        on no other. Python's collector doesn't run meanwhile.

        Raises:
            RuntimeError: they can't be captured.
        """


class CudaGpu:
    """A CUDA device, by torch.

    Args:
        cudart: CUDA's runtime, in place of torch's.
    """

    def __init__(self, device: torch.device, cudart: Any = None) -> None:
        self._device = device
        self._given_cudart = cudart
        self._capturing: torch.cuda.Stream | None = None
        self._pins_no_messages = False

    def new_stream(self) -> Stream:
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def pinned(self, num_bytes: int) -> Tensor:
        # Not torch's: that rounds up to a power of two, and keeps what is given back.
        view = map_pages(num_bytes)
        assert isinstance(view.obj, Pages)
        if error := self._pin(view.obj):
            raise WorkerError(
                f"{num_bytes / 1e6:.0f} MB of the host's memory can't be pinned for {self._device} "
                f"(CUDA error {error}): see ulimit -l, or lower ",
                Given("max_step_tokens"),
                code="no_pinned_memory",
            )
        return torch.frombuffer(view, dtype=torch.uint8)

    def reads(self, array: NDArray[Any]) -> bool:
        pages = pages_of(array)
        if pages is None or self._pins_no_messages:
            return False
        if pages.unpin is None and (error := self._pin(pages)):
            self._pins_no_messages = True
            log.warning(
                "what R-workers send can't be pinned for %s (CUDA error %d): it is copied on "
                "the host instead; see ulimit -l",
                self._device,
                error,
            )
            return False
        return True

    def upload(self, host: Tensor) -> Tensor:
        if host.nbytes <= _STAGED_BYTES:
            return host.to(self._device, non_blocking=True)
        # Lent to nobody else until it has been copied.
        return host.pin_memory().to(self._device, non_blocking=True)

    def room(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def new_pool(self) -> object:
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None], pool: object) -> Graph:
        current = torch.cuda.current_stream(self._device)
        self._capturing = self._capturing or torch.cuda.Stream(self._device)
        self._capturing.wait_stream(current)
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capturing):
            # Other threads may go on calling CUDA meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run()
                graph.capture_end()
            except BaseException:
                self._give_up(graph, pool)
                raise
        current.wait_stream(self._capturing)
        return graph  # type: ignore[no-any-return]

    def _pin(self, pages: Pages) -> int:
        """Tell the driver of this memory, until nothing looks into it any more.
        Returns CUDA's error, or 0."""
        cudart = self._given_cudart or torch.cuda.cudart()
        error = int(cudart.cudaHostRegister(pages.address, pages.num_bytes, _PORTABLE))
        if not error:
            pages.unpin = partial(cudart.cudaHostUnregister, pages.address)
        return error

    def _give_up(self, graph: Any, pool: object) -> None:
        """End a capture that failed. torch's allocator would go on believing in
        it, and give no memory back that another stream has used."""
        end_allocating = getattr(torch._C, "_cuda_endAllocateToPool", None)
        with contextlib.suppress(RuntimeError):  # it says again what is known
            graph.capture_end()
        if end_allocating is not None:
            with contextlib.suppress(RuntimeError):  # it had ended
                end_allocating(self._device.index or 0, pool)


def feed_gpu(device: torch.device) -> None:
    """Set torch up for a process whose operators run on a GPU; on a CPU do
    nothing.

    One thread: what is left for the host are copies of some 100 KB, for which
    OpenMP's threads would have to get cores that R-workers are computing on.
    Sums of split products in float32: tokens come nearer to the CPU's, and
    depend less on the batch."""
    if device.type == "cuda":
        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def gpu_of(device: torch.device) -> Gpu | None:
    """The device's driver; None: the device is the host."""
    return CudaGpu(device) if device.type == "cuda" else None
