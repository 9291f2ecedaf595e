"""How torch is set up where a GPU computes."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from recorded_gpu import RecordedGpu

from fastdecode.core.errors import WorkerError
from fastdecode.wire.buffers import BufferPool
from sworker.device import CudaGpu, feed_gpu
from sworker.room import Room
from sworker.worker import DeviceTimer


def test_the_host_of_a_gpu_has_one_thread_and_adds_up_in_float32() -> None:
    num_threads, matmul = torch.get_num_threads(), torch.backends.cuda.matmul
    try:
        torch.set_num_threads(2)
        feed_gpu(torch.device("cpu"))
        assert torch.get_num_threads() == 2
        feed_gpu(torch.device("cuda"))
        assert torch.get_num_threads() == 1
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction
    finally:
        torch.set_num_threads(num_threads)
        matmul.allow_bf16_reduced_precision_reduction = True
        matmul.allow_fp16_reduced_precision_reduction = True


def test_one_block_of_many_that_are_alike_is_timed_and_stands_for_all() -> None:
    gpu = RecordedGpu()
    all_blocks, some = DeviceTimer(gpu), DeviceTimer(gpu, every=8)
    for timer in (all_blocks, some):
        for _ in range(20):
            with timer:
                pass
    assert [timer.seconds() for timer in (all_blocks, some)] == pytest.approx([0.02, 0.02])
    assert gpu.calls["mark"] == 2 * (20 + 3)
    assert DeviceTimer(None).seconds() == 0.0


class Cudart:
    """Of CUDA's runtime, what pins memory."""

    def __init__(self, error: int = 0) -> None:
        self._error = error
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        if not self._error:
            self.pinned[address] = num_bytes
        return self._error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def test_memory_is_pinned_as_long_as_anything_looks_into_it() -> None:
    """A room that has grown may have lent what it had before: views outlive the
    tensor that they are of."""
    cudart = Cudart()
    gpu = CudaGpu(torch.device("cuda", 0), cudart)
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
    gpu, pool = CudaGpu(torch.device("cuda", 0), cudart), BufferPool()
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
    gpu, answer = CudaGpu(torch.device("cuda", 0), Cudart(error=2)), BufferPool().take(5000)
    assert not gpu.reads(answer) and not gpu.reads(answer)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ulimit -l" in caplog.text


def test_memory_that_cannot_be_pinned() -> None:
    cudart = Cudart(error=2)
    with pytest.raises(WorkerError, match="CUDA error 2"):
        CudaGpu(torch.device("cuda", 0), cudart).pinned(4096)
    gc.collect()
