"""The checks of gpu_first.py's part "right" (benchmarks/gpu_right.py), on a GPU: its
kernels, graphs, copies and sampler, and whole engines in all placements."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from gpu_right import copies, graphs, kernels, prompts, sampler, tokens
from gpu_setup import Check, Setup, UnavailableError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and torch built for CUDA"
    ),
]
SETUP = Setup(torch.device("cuda", 0), torch.bfloat16, smoke=False, deadline_s=float("inf"))
CHECKS = [check for make in (copies, kernels, prompts, graphs, sampler) for check in make(SETUP)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
@torch.inference_mode()
def test_parts(check: Check) -> None:
    assert_right(check)


@pytest.mark.parametrize("check", tokens(SETUP), ids=lambda check: check.name)
def test_engines(check: Check) -> None:
    assert_right(check)


def assert_right(check: Check) -> None:
    try:
        found = check.run()
    except UnavailableError as lacking:
        pytest.skip(str(lacking))
    assert found.is_right, found
