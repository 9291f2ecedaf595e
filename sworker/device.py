"""What the S-worker asks of a GPU's driver: streams, events, pinned memory.

Everything that orders work on a device, or waits for it, goes through here. So
tests can put a recording driver in CUDA's place, which runs operators on the
CPU and finds what nothing orders.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in what a stream does."""

    def query(self) -> bool:
        """Whether the device has come so far. Never waits."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Stream(Protocol):
    """Work of a device, done in the order in which it is queued."""

    def wait_stream(self, stream: Stream) -> None:
        """What is queued here from now on comes after what is queued there by now."""

    def wait_event(self, event: Event) -> None:
        """What is queued here from now on comes after the event."""

    def record_event(self) -> Event:
        """The point after all that is queued by now."""


class Gpu(Protocol):
    """A device whose work is queued, and which has its own memory."""

    def new_stream(self) -> Stream:
        """One beside the others."""

    def current_stream(self) -> Stream:
        """Where this thread's operators are queued."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Within, this thread's operators are queued there."""

    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 on the host, which the device copies from and to on its own."""

    def room(self, num_bytes: int) -> Tensor:
        """uint8 on the device. Whoever asks for it keeps it as long as any
        stream may use it."""

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Let nobody else have the tensor's memory before the stream has done
        what is queued by now."""


class CudaGpu:
    """A CUDA device, by torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self) -> Stream:
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        assert isinstance(stream, torch.cuda.Stream)
        return torch.cuda.stream(stream)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def room(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        assert isinstance(stream, torch.cuda.Stream)
        tensor.record_stream(stream)


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
