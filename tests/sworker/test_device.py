"""How torch is set up where a GPU computes."""

from __future__ import annotations

import torch

from sworker.device import feed_gpu


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
