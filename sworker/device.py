"""What the S-worker asks of a GPU's driver: streams, events, pinned memory.

Everything that orders work on a device, or waits for it, goes through here. So tests can put a
recording driver in CUDA's place, which runs operators on the CPU and finds what nothing orders.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.host.cpus import available_cores, release_cpus
from fastdecode.core.host.facts import TF32_SWITCH
from fastdecode.wire.buffers import Pages, map_pages, pages_of

log = logging.getLogger(__name__)

Event: TypeAlias = torch.cuda.Event
"""A point in what a stream does. With timing it is a **mark**."""

release_cpus()  # importing torch may have bound this thread
if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > available_cores():
    torch.set_num_threads(available_cores())  # torch counts CPUs, and no quota of their time

_STAGED_BYTES = 64 << 10
"""Of memory that isn't pinned, CUDA takes so many to itself at once, without a
wait for what is queued before."""
_PORTABLE = 1  # pinned for every device: cudaHostRegisterPortable
_OLDEST_TORCH = (2, 7)
"""On CUDA. Before, each replay of a graph fills two tensors for random numbers
first, also where the graph draws none (pytorch #143777)."""


class HostMemory:
    """Memory of the host that a CUDA device copies from and to on its own.

    The first way is to register ordinary memory, which may be refused: by a
    sandbox, a virtual machine or a limit. The second is torch's own pinned
    memory, which rounds up to a power of two and keeps what is given back. The
    last is plain memory. What was refused once is not asked for again.

    Args:
        cudart: CUDA's runtime, in place of torch's.
        allocate: takes torch's pinned memory of so many bytes, uint8; raises
            RuntimeError if there is none. In place of torch.
    """

    def __init__(
        self,
        device: torch.device,
        cudart: Any = None,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        self._device = device
        self._given_cudart = cudart
        self._allocate = allocate or partial(torch.empty, dtype=torch.uint8, pin_memory=True)
        self._can_register = True
        self._can_allocate = True

    @property
    def cudart(self) -> Any:
        return self._given_cudart or torch.cuda.cudart()

    def take(self, num_bytes: int) -> Tensor:
        """uint8, pinned if that is possible."""
        view = map_pages(num_bytes)
        assert isinstance(view.obj, Pages)
        if not self.register(view.obj) and (pinned := self.allocate(num_bytes)) is not None:
            return pinned
        return torch.frombuffer(view, dtype=torch.uint8)

    def register(self, pages: Pages) -> bool:
        """Pin this memory until nothing refers to it any more. False: refused."""
        if not self._can_register:
            return False
        error = int(self.cudart.cudaHostRegister(pages.address, pages.num_bytes, _PORTABLE))
        if error:
            clear_cuda_error(self.cudart)
            self._can_register = False
            log.warning(
                "memory of the host can't be registered with %s (CUDA error %d): torch's own "
                "pinned memory is used, and what R-workers send is copied on the host first. "
                "Raise ulimit -l",
                self._device,
                error,
            )
            return False
        pages.unpin = partial(_unregister, self.cudart, pages.address)
        return True

    def allocate(self, num_bytes: int) -> Tensor | None:
        """torch's own pinned memory, uint8; None: refused."""
        if not self._can_allocate:
            return None
        try:
            return self._allocate(num_bytes)
        except RuntimeError as error:
            if self._given_cudart is not None or torch.cuda.is_available():
                clear_cuda_error(self.cudart)
            self._can_allocate = False
            log.warning(
                "no memory of the host can be pinned for %s (%s): plain memory is used, and "
                "copies wait for the GPU. Raise ulimit -l, or leave the sandbox that forbids it",
                self._device,
                str(error).splitlines()[0],
            )
            return None


@cache
def _host_memory_of(device: torch.device) -> HostMemory:
    """One for all drivers of a device: what is refused is asked for, and told, once."""
    return HostMemory(device)


class Stream:
    """Work of a device, done in the order in which it is queued. Other streams and events are the
    same device's. What torch does in three or four calls of Python for each of these takes a
    third of a unit's time together."""

    __slots__ = ("_passed", "raw")

    def __init__(self, raw: torch.cuda.Stream) -> None:
        self.raw = raw
        self._passed = torch.cuda.Event()

    def wait_stream(self, stream: Stream) -> None:
        """Let what is queued here next wait for what is already queued there."""
        # A wait is for the point at which the event was recorded by then: it may be
        # recorded again at once.
        passed = stream._passed
        passed.record(stream.raw)
        self.raw.wait_event(passed)

    def wait_event(self, event: Event) -> None:
        """Let what is queued here next wait for the event."""
        self.raw.wait_event(event)

    def record_event(self) -> Event:
        """Return the point after all that is already queued."""
        event = torch.cuda.Event()
        event.record(self.raw)
        return event


class _Current(threading.local):
    """The stream where a thread's operators are queued, by the device's index: torch takes five
    microseconds to find it. Only ``Gpu.on`` changes it."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}


_current = _Current()


class _On:
    """Within, this thread's operators are queued on a stream."""

    __slots__ = ("_before", "_gpu", "_stream")

    def __init__(self, gpu: Gpu, stream: Stream) -> None:
        self._gpu, self._stream = gpu, stream

    def __enter__(self) -> None:
        self._before = self._gpu.current_stream()
        self._gpu.queue_on(self._stream)

    def __exit__(self, *error: object) -> None:
        self._gpu.queue_on(self._before)


class Gpu:
    """A CUDA device, by torch: its work is queued, and it has its own memory.

    Args:
        memory: of the host, in place of what all drivers of the device share.
    """

    def __init__(self, device: torch.device, memory: HostMemory | None = None) -> None:
        self._device, self._index = device, device.index or 0
        self._memory = memory or _host_memory_of(device)
        self._capturing: Stream | None = None

    def new_stream(self) -> Stream:
        return Stream(torch.cuda.Stream(self._device))

    def current_stream(self) -> Stream:
        """Return the stream where this thread's operators are queued."""
        found = _current.streams.get(self._index)
        if found is None:
            found = Stream(torch.cuda.current_stream(self._device))
            _current.streams[self._index] = found
        return found

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Queue this thread's operators on the stream, within."""
        return _On(self, stream)

    def queue_on(self, stream: Stream) -> None:
        """Queue this thread's next operators on the stream."""
        torch.cuda.set_stream(stream.raw)
        _current.streams[self._index] = stream

    def mark(self) -> Event:
        """Return the current stream's present point, with its time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.current_stream().raw)
        return event

    def pinned(self, num_bytes: int) -> Tensor:
        """Return uint8 on the host, which the device copies from and to on its own. It is plain
        memory where the system pins none: copies are right, and slower."""
        return self._memory.take(num_bytes)

    def reads(self, array: NDArray[Any]) -> bool:
        """Return True if the device copies from there on its own.

        It is pinned memory, or messages' buffers, which are then pinned. The caller keeps the
        array until it has been copied."""
        pages = pages_of(array)
        return pages is not None and (pages.unpin is not None or self._memory.register(pages))

    def upload(self, host: Tensor) -> Tensor:
        """Copy host memory to the device. Never waits. The memory may be reused right away."""
        if host.nbytes > _STAGED_BYTES:
            # Not lent again until it has been copied.
            pinned = self._memory.allocate(host.nbytes)
            if pinned is not None:
                host = pinned.view(host.dtype).view(host.shape).copy_(host)
        return host.to(self._device, non_blocking=True)

    def mapped(self, host: Tensor) -> Tensor | None:
        """Return memory that ``pinned`` gave as a tensor that the device's kernels read, without
        copying it. None if they can't. It is valid as long as ``host``."""
        if not host.is_contiguous() or not host.is_pinned():
            return None
        try:  # pinned memory has one address for the host and the device
            raw: Tensor = torch.as_tensor(_DeviceView(host), device=self._device)
        except (RuntimeError, TypeError, ValueError) as error:
            clear_cuda_error(self._memory.cudart)
            log.warning("kernels can't read the host's memory on %s: %s", self._device, error)
            return None
        return raw.view(host.dtype).view(host.shape)

    def room(self, num_bytes: int) -> Tensor:
        """Return uint8 on the device. The caller keeps it as long as any stream may use it."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def new_pool(self) -> object:
        """Return memory for what graphs need while they run, one after another."""
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None], pool: object) -> torch.cuda.CUDAGraph:
        """Return the operators that ``run`` queues on the current stream and on no other.
        Python's collector must not run meanwhile.

        Raises:
            Exception: If they can't be captured; torch's, the driver's or Triton's.
        """
        current = self.current_stream()
        self._capturing = self._capturing or self.new_stream()
        self._capturing.wait_stream(current)
        graph: Any = torch.cuda.CUDAGraph()
        with self.on(self._capturing):
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

    def _give_up(self, graph: Any, pool: object) -> None:
        """End a capture that failed. torch's allocator would go on believing in
        it, and give no memory back that another stream has used."""
        end_allocating = getattr(torch._C, "_cuda_endAllocateToPool", None)
        with contextlib.suppress(RuntimeError):  # it says again what is known
            graph.capture_end()
        if end_allocating is not None:
            with contextlib.suppress(RuntimeError):  # it had ended
                end_allocating(self._device.index or 0, pool)


class _DeviceView:
    """Host memory, in the terms of the CUDA array interface. It keeps the memory."""

    def __init__(self, host: Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes,), "typestr": "|u1", "data": (host.data_ptr(), False),
            "version": 3, "strides": None,
        }  # fmt: skip


def feed_gpu(device: torch.device) -> None:
    """Set torch up for a process whose operators run on a GPU; on a CPU do nothing.

    One thread: what is left for the host are copies of some 100 KB, for which OpenMP's threads
    would have to get cores that R-workers are computing on. Sums of split products in float32:
    tokens come nearer to the CPU's, and depend less on the batch. Products of float32 in float32,
    whatever the environment sets: TF32 rounds their factors to 10 bits."""
    if device.type != "cuda":
        return
    _warn_of_old_torch(torch.__version__)
    if torch.get_float32_matmul_precision() != "highest":
        log.warning(
            "torch was set to compute float32 products in TF32 (%s in the environment does it, as "
            "in NVIDIA's images): this process computes them in float32. Choose dtype bfloat16 "
            "if speed matters more",
            TF32_SWITCH,
        )
        torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _warn_of_old_torch(version: str) -> None:
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < _OLDEST_TORCH:
        log.warning(
            "torch %s launches two more kernels for each CUDA graph than torch 2.7 and later, "
            "which slows every step: install torch>=2.7",
            version,
        )


def gpu_of(device: torch.device) -> Gpu | None:
    """The device's driver; None: the device is the host."""
    return Gpu(device) if device.type == "cuda" else None


def clear_cuda_error(cudart: Any, libraries: Iterable[Any] | None = None) -> None:
    """Make CUDA's runtime forget this thread's last error. A call that fails
    leaves it pending, and torch raises it from the next kernel that it launches.

    Args:
        cudart: torch's binding. It hands error codes back and keeps the error
            pending; not every version binds ``cudaGetLastError``.
        libraries: the loaded CUDA runtimes, for ``ctypes``; None: look for them.
    """
    if (clear := getattr(cudart, "cudaGetLastError", None)) is not None:
        clear()
        return
    for library in _loaded_cudarts() if libraries is None else libraries:
        library.cudaGetLastError()


def _loaded_cudarts() -> list[ctypes.CDLL]:
    """CUDA's runtimes in this process, of Linux; usually one."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = {fields[5] for line in lines if len(fields := line.split(None, 5)) == 6}
    libraries = []
    for path in sorted(path for path in paths if Path(path).name.startswith("libcudart")):
        with contextlib.suppress(OSError):  # a file that was replaced meanwhile
            libraries.append(ctypes.CDLL(path))
    return libraries


def _unregister(cudart: Any, address: int) -> None:
    if int(cudart.cudaHostUnregister(address)):
        clear_cuda_error(cudart)
