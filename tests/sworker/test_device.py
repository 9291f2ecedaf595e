"""How torch is set up where a GPU computes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recorded_gpu import RecordedGpu

from fastdecode.wire.buffers import BufferPool
from sworker import device
from sworker.buffers import Room
from sworker.device import Gpu, HostMemory, clear_cuda_error, feed_gpu, gpu_of
from sworker.worker import DeviceTimer


@pytest.fixture
def settings_of_torch() -> Iterator[None]:
    num_threads, matmul = torch.get_num_threads(), torch.backends.cuda.matmul
    yield
    torch.set_num_threads(num_threads)
    torch.set_float32_matmul_precision("highest")
    matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_reduced_precision_reduction = True


@pytest.mark.usefixtures("settings_of_torch")
def test_the_host_of_a_gpu_has_one_thread_and_adds_up_in_float32(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever the environment says: ``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1``, as in NVIDIA's
    images, is a precision of "high"."""
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high")
    feed_gpu(torch.device("cpu"))
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (2, "high")
    feed_gpu(torch.device("cuda"))
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (1, "highest")
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" in caplog.text
    caplog.clear()
    feed_gpu(torch.device("cuda"))
    assert caplog.text == ""


def test_one_block_of_many_that_are_alike_is_timed_and_stands_for_all() -> None:
    gpu = RecordedGpu()
    all_blocks, some = DeviceTimer(gpu), DeviceTimer(gpu, every=8)
    for timer in (all_blocks, some):
        for _ in range(20):
            with timer:
                pass
    assert [timer.seconds() for timer in (all_blocks, some)] == pytest.approx([0.02, 0.02])
    assert gpu.calls["mark"] == 2 * (20 + 3)


class Cudart:
    """Of CUDA's runtime, what pins memory, and the error that it keeps pending."""

    def __init__(self, error: int = 0) -> None:
        self._error = error
        self.pinned: dict[int, int] = {}
        self.pending = 0
        self.num_asked = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.num_asked += 1
        self.pending = self._error or self.pending
        if not self._error:
            self.pinned[address] = num_bytes
        return self._error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0

    def cudaGetLastError(self) -> int:  # noqa: N802
        error, self.pending = self.pending, 0
        return error


def refuse(num_bytes: int) -> torch.Tensor:
    raise RuntimeError("CUDA error: out of memory\nadvice")


class Pins:
    """Pinned memory of torch."""

    def __init__(self) -> None:
        self.taken: list[torch.Tensor] = []

    def __call__(self, num_bytes: int) -> torch.Tensor:
        self.taken.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self.taken[-1]


def gpu_with(
    cudart: Cudart, allocate: Callable[[int], torch.Tensor] = refuse, kind: str = "cuda"
) -> Gpu:
    gpu = torch.device("cuda", 0) if kind == "cuda" else torch.device(kind)
    return Gpu(gpu, HostMemory(gpu, cudart, allocate))


def test_memory_is_pinned_as_long_as_anything_looks_into_it() -> None:
    """A room that has grown may have lent what it had before: views outlive the
    tensor that they are of."""
    cudart = Cudart()
    gpu = gpu_with(cudart)
    room = Room(gpu.pinned, 4096)
    lent = room.take(torch.Size((16,)), torch.float32)
    array = lent.numpy()
    room.take(torch.Size((5000,)), torch.float32)
    del lent
    gc.collect()
    assert sorted(cudart.pinned.values()) == [4096, 20000]
    assert array.ctypes.data in cudart.pinned
    array[:] = 1
    del array
    gc.collect()
    assert sorted(cudart.pinned.values()) == [20000]
    del room
    gc.collect()
    assert cudart.pinned == {}


def test_messages_buffers_are_pinned_when_they_are_first_read() -> None:
    """Each mapping once, and as long as anything looks into it."""
    cudart = Cudart()
    gpu, pool = gpu_with(cudart), BufferPool()
    large, small = pool.take(3 << 20), pool.take(5000)
    answers = [large[64:].view(np.float32).reshape(-1, 4), small[:400].view(np.uint16)]
    assert all(gpu.reads(answer) for answer in answers * 2)
    assert sorted(cudart.pinned.values()) == [2 << 20, 4 << 20]
    assert any(first == large.ctypes.data for first in cudart.pinned)
    assert not gpu.reads(np.zeros(5000, np.float32))
    del large, pool, small
    gc.collect()
    assert len(cudart.pinned) == 2
    del answers
    gc.collect()
    assert cudart.pinned == {}


def test_where_messages_buffers_cannot_be_pinned_that_is_asked_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cudart, answer = Cudart(error=2), BufferPool().take(5000)
    gpu = gpu_with(cudart)
    assert not gpu.reads(answer) and not gpu.reads(answer)
    assert cudart.num_asked == 1 and cudart.pending == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ulimit -l" in caplog.text


def test_where_registering_is_refused_torch_pins(caplog: pytest.LogCaptureFixture) -> None:
    """And a staging works with it; torch's next kernel finds no error pending."""
    cudart, pins = Cudart(error=2), Pins()
    gpu = gpu_with(cudart, pins)
    assert gpu.pinned(4096) is pins.taken[0] and cudart.pending == 0
    assert gpu.pinned(100) is pins.taken[1] and cudart.num_asked == 1
    assert len(caplog.records) == 1 and "CUDA error 2" in caplog.text


def test_where_nothing_is_pinned_memory_is_plain(caplog: pytest.LogCaptureFixture) -> None:
    """One warning for each way, whoever asks. Before, no engine started."""
    cudart = Cudart(error=801)
    gpu = gpu_with(cudart)
    for _ in range(3):
        room = Room(gpu.pinned, 4096)
        room.take(torch.Size((5000,)), torch.float32).fill_(1.0)
        assert gpu.pinned(10).shape == (10,) and cudart.pending == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "out of memory" in caplog.text and "advice" not in caplog.text
    gc.collect()


def test_all_drivers_of_a_device_know_what_was_refused() -> None:
    """There are many: each lane's staging, the sampler, the S-worker."""
    one, other = (gpu_of(torch.device("cuda", 0)) for _ in range(2))
    assert isinstance(one, Gpu) and isinstance(other, Gpu)
    assert one is not other and one._memory is other._memory


@pytest.mark.parametrize("num_bytes", [100, 300_000])
def test_uploads_where_nothing_is_pinned(num_bytes: int) -> None:
    """Of large ones torch would ask for pinned memory itself, and raise."""
    gpu = gpu_with(Cudart(error=2), kind="cpu")
    host = torch.arange(num_bytes // 4, dtype=torch.float32).view(-1, 5)
    assert torch.equal(gpu.upload(host), host)


def test_large_uploads_leave_from_pinned_memory() -> None:
    pins = Pins()
    gpu = gpu_with(Cudart(), pins, "cpu")
    host = torch.arange(99_999).view(3, -1).T
    assert torch.equal(gpu.upload(host), host)
    assert [x.nbytes for x in pins.taken] == [99_999 * 8]


def test_an_error_is_cleared_whatever_torch_binds() -> None:
    """torch binds cudaGetLastError in some versions only; else the loaded runtimes are asked."""
    bound, unbound, library = Cudart(), SimpleNamespace(), Cudart()
    bound.pending = library.pending = 2
    clear_cuda_error(bound, [library])
    assert (bound.pending, library.pending) == (0, 2)
    clear_cuda_error(unbound, [library])
    assert library.pending == 0
    clear_cuda_error(unbound)  # none is loaded here


@pytest.mark.parametrize(
    ("version", "warns"),
    [("2.6.0+cu124", True), ("2.7.0", False), ("2.13.0+cpu", False), ("3.0.0a1", False)],
)
def test_an_old_torch_is_named(version: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    device._warn_of_old_torch(version)
    assert ("torch>=2.7" in caplog.text) is warns
