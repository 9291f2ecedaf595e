"""What an R-worker reports while it compiles kernels."""

from __future__ import annotations

import itertools

import pytest

from cpu_kernels import reference
from cpu_kernels.layout import BlockLayout
from fastdecode.core.dtype import DType
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import AttentionSpec
from rworker.attention import AttentionExecutor
from rworker.instructions import Prepare

SPEC = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=16, scale=0.25)
LAYOUT = BlockLayout(num_kv_heads=1, head_dim=16, block_size=16, dtype="float32")
PREPARE = Prepare(HolderId(0), LAYOUT, 4, (SPEC, SPEC), DType.FLOAT32)


def reported(seconds_a_kernel: float) -> list[str]:
    """Lines, where each look at the clock is so much later than the one before."""
    lines: list[str] = []
    clock = itertools.count(0.0, seconds_a_kernel)
    executor = AttentionExecutor(kernels=reference, clock=lambda: next(clock), report=lines.append)
    executor.prepare(PREPARE)
    return lines


def test_slow_compilation_is_counted() -> None:
    lines = reported(0.6)
    assert lines == [
        f"compiling kernels {number} of 4 (kept for the next start)" for number in (2, 3, 4)
    ]


def test_kernels_that_cannot_be_kept_are_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpu_kernels.codegen.kept.KeptCode.complained", True)
    assert reported(0.6)[0] == "compiling kernels 2 of 4"


def test_kernels_that_load_at_once_are_not_mentioned() -> None:
    assert reported(0.01) == []
