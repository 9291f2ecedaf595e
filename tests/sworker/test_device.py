"""How torch is set up where a GPU computes."""

from __future__ import annotations

import pytest
import torch
from recorded_gpu import RecordedGpu

from sworker.device import feed_gpu
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
