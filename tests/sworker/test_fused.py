"""Fused kernels for parts of a layer against torch: Numba's, and Triton's in
the interpreter, or on the GPU where there is one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from recorded_gpu import RecordedGpu
from triton_interpreter import interpret_kernels

from sworker.graphs import StepGraphs
from sworker.kernels import fused, fused_numba
from sworker.kernels.fused import (
    FusedRMSNorm,
    FusedRotary,
    Kernels,
    LayerCalls,
    call_layers,
    fuse,
    fuse_checked,
)
from sworker.kernels.packing import pack
from sworker.load.weights import load_model
from sworker.worker import SWorker

CPU = torch.device("cpu")
GPU = torch.device("cuda") if torch.cuda.is_available() else CPU
ROWS = torch.stack((torch.arange(5, 12), torch.arange(40, 47)))
"""Token ids and positions."""


@dataclass(frozen=True)
class Case:
    """Kernels, and what they are run with."""

    kernels: Kernels
    device: torch.device
    dtype: torch.dtype


# Triton's interpreter truncates to bfloat16. It comes first: transformers, which makes the
# checkpoints, imports Triton, and from then on that compiles.
@pytest.fixture(params=["triton float32", "triton float16", "numba float32", "numba bfloat16"])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    name, dtype = request.param.split()
    if name == "numba":
        assert fused_numba.is_possible(getattr(torch, dtype))
        return Case(fused_numba, CPU, getattr(torch, dtype))
    interpret_kernels(monkeypatch)
    from sworker.kernels import fused_triton

    return Case(fused_triton, GPU, getattr(torch, dtype))


# A whole rotary head, a part of one, and none; gates of SiLU and GELU, and
# none; norms after a sum and without one, of heads, with an offset, and of
# another kind.
@pytest.mark.parametrize(("family", "rotates", "gates", "norms", "adds"), [
    ("llama", True, True, True, True), ("qwen3", True, True, True, True), ("gemma2", True, True,
        True, False),
    ("gpt_neox", True, False, False, False), ("gpt2", False, False, False, False),
])  # fmt: skip
@torch.inference_mode()
def test_fused_layers_say_the_same(
    family: str,
    rotates: bool,
    gates: bool,
    norms: bool,
    adds: bool,
    case: Case,
    tiny_checkpoint: Callable[..., Path],
) -> None:
    found = []
    for is_fused in (False, True):
        spec, model = load_model(tiny_checkpoint(family), device=case.device, dtype=case.dtype)
        if is_fused:
            assert fuse_checked(model, case.kernels) == (rotates or gates or norms)
            last = model.layers[-1]
            assert isinstance(last.rope, FusedRotary) == rotates
            assert (last.mlp.gate_kernel is not None) == gates
            assert (
                isinstance(last.attn_norm, FusedRMSNorm)
                == isinstance(model.final_norm, FusedRMSNorm)
                == norms
            )
            assert (last.add_norm_kernel is not None) == adds
            assert isinstance(last.q_norm, FusedRMSNorm) == (family == "qwen3")
        step = SWorker(spec, model, case.device).begin(ROWS)
        seen, goes_on = [step.q, step.k, step.v], True
        while goes_on:
            goes_on = step.advance(step.q.clone())
            seen += [step.q, step.k, step.v] if goes_on else []
        found.append([*seen, step.logits(np.arange(7))])
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 4e-2}[case.dtype]
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other.float(), plain.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_layers_in_few_calls_say_the_same_to_the_bit(
    dtype: torch.dtype, tiny_checkpoint: Callable[..., Path]
) -> None:
    spec, model = load_model(tiny_checkpoint("llama"), device=CPU, dtype=dtype)
    fuse(model, CPU)
    pack(model)
    found, worker = [], SWorker(spec, model, CPU)
    for is_called in (False, True):
        if is_called:
            call_layers(model)
            assert all(isinstance(layer, LayerCalls) for layer in model.step_layers)
        step = worker.begin(ROWS)
        seen, goes_on = [step.q, step.k, step.v], True
        while goes_on:
            goes_on = step.advance(step.q.clone())
            seen += [step.q, step.k, step.v] if goes_on else []
        found.append([*seen, step.logits(np.arange(7))])
    assert len(found[0]) == 3 * spec.num_layers + 1
    for plain, other in zip(*found, strict=True):
        assert plain.is_contiguous() == other.is_contiguous() and torch.equal(plain, other)


@dataclass
class CountedKernels:
    """The CPU's kernels; says which were called, and hides what they call."""

    gpu: RecordedGpu

    def __getattr__(self, name: str) -> Callable[..., object]:
        def called(*args: object, **options: object) -> object:
            calls, self.gpu.calls = self.gpu.calls, Counter()
            try:
                return getattr(fused_numba, name)(*args, **options)
            finally:
                self.gpu.calls = calls
                calls[name] += 1

        return called


@torch.inference_mode()
def test_a_unit_is_eight_kernels(tiny_checkpoint: Callable[..., Path]) -> None:
    """Four products, and four between them; the result is what it was."""
    spec, model = load_model(tiny_checkpoint("llama"), device=CPU, dtype=torch.float32)
    _, plain = load_model(tiny_checkpoint("llama"), device=CPU, dtype=torch.float32)
    gpu = RecordedGpu()
    assert fuse_checked(model, CountedKernels(gpu))  # type: ignore[arg-type]
    found, expected = (StepGraphs(x, CPU, capture=False, max_rows=8) for x in (model, plain))
    generator = torch.Generator().manual_seed(1)
    for graphs in (found, expected):
        graphs.buffers(0).token_ids.copy_(torch.arange(8))
        graphs.buffers(0).positions.copy_(torch.arange(8))
    for unit in range(found.num_units):
        o = torch.randn(8, spec.num_q_heads, spec.head_dim, generator=generator)
        for graphs in (found, expected):
            graphs.buffers(0).o.copy_(o)
        gpu.calls.clear()
        with gpu:
            found.run(0, unit, 8)
        if 0 < unit < found.num_units - 1:
            del gpu.calls["view"]
            assert gpu.calls == {"aten::linear": 4, "add_norm": 2, "gate": 1, "rotate_split": 1}
        expected.run(0, unit, 8)
        mine, other = found.buffers(0), expected.buffers(0)
        pairs = [(mine.x, other.x)]
        if unit < found.num_units - 1:
            pairs += zip(mine.outputs(unit), other.outputs(unit), strict=True)
        for one, two in pairs:
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_kernels_that_fail_are_not_used(
    tiny_checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    _, model = load_model(tiny_checkpoint("llama"), device="cpu", dtype=torch.float32)
    before = dict(model.named_modules())
    with mock.patch.object(fused, "_kernels_of", return_value=fused_numba):
        with mock.patch.object(fused, "_same_parts", side_effect=RuntimeError("no compiler")):
            assert not fuse(model, torch.device("cuda", 0))
        assert "no compiler" in caplog.text
        with mock.patch.object(fused, "_same_parts", return_value=False):
            assert not fuse(model, torch.device("cuda", 0))
    assert dict(model.named_modules()) == before


def test_a_cpus_dtypes(tiny_checkpoint: Callable[..., Path]) -> None:
    for dtype, is_fused in ((torch.float32, True), (torch.bfloat16, True), (torch.float16, False)):
        _, model = load_model(tiny_checkpoint("llama"), device=CPU, dtype=dtype)
        before = torch.get_rng_state()
        assert fuse(model, CPU) == isinstance(model.final_norm, FusedRMSNorm) == is_fused
        assert torch.equal(torch.get_rng_state(), before)


def noise(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 768])
@pytest.mark.parametrize("num_rows", [3, 301])  # by one thread, by several
@torch.inference_mode()
def test_sums_and_norms(num_rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = noise(num_rows, size, dtype), noise(3, size, dtype)[2]
    x *= torch.logspace(-12, 12, num_rows)[:, None].to(dtype)
    total, normed = fused_numba.add_norm(x, x.flip(0), weight, 1e-5, 0.0)
    assert torch.equal(total, x + x.flip(0))
    steps = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 2)
    expected = torch.nn.functional.rms_norm(total, (size,), weight, 1e-5)
    torch.testing.assert_close(normed, expected, rtol=steps, atol=1e-12)
    x[1, size // 2] = float("nan")
    assert fused_numba.norm(x, weight, 1e-5, 0.0).isnan().all(1).nonzero().tolist() == [[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_gates_of_all_sizes(dtype: torch.dtype) -> None:
    gate = torch.cat(
        (
            torch.logspace(-44, 38, 999),
            torch.linspace(0, 100, 999),
            torch.tensor([0.0, float("nan")]),
        )
    )
    gate = torch.cat((gate, -gate)).to(dtype)
    wide = gate.double()
    for is_silu in (True, False):
        # (1 + tanh(u)) / 2 is the sigmoid of 2u, which isn't a difference of nearly equal numbers.
        angle = wide if is_silu else math.sqrt(8 / math.pi) * (wide + 0.044715 * wide**3)
        expected = wide * angle.sigmoid() / 2
        found = fused_numba.gate(
            torch.cat((gate, torch.full_like(gate, 0.5)))[None], is_silu=is_silu
        )[0]
        # A large angle's last digit is many of its exponential's.
        steps = torch.finfo(dtype).eps * (1 if dtype == torch.bfloat16 else 8 if is_silu else 88)
        torch.testing.assert_close(found.double(), expected, rtol=steps, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_rows_know_nothing_of_each_other(dtype: torch.dtype) -> None:
    h, positions = noise(298, 256, dtype), torch.arange(298)
    weight, table = torch.ones(256, dtype=dtype), torch.randn(298, 2 * 12)

    def everything(rows: slice) -> list[torch.Tensor]:
        heads = h[rows].unflatten(1, (8, 32))[:, 1:7]  # not dense
        num_rows = heads.shape[0]
        q, k, v = (torch.empty(num_rows, num, 32, dtype=dtype) for num in (4, 1, 1))
        fused_numba.rotate_split(heads[:, :5], heads[:, 5:], positions[rows], table, (q, k, v))
        turned = fused_numba.rotate(heads, positions[rows], table)
        assert torch.equal(torch.cat((q, k), 1), turned[:, :5])
        assert torch.equal(v, heads[:, 5:])
        return [
            q,
            fused_numba.norm(h[rows], weight, 1e-5, 1.0),
            fused_numba.norm(heads, weight[:32], 1e-5, 0.0),
            *fused_numba.add_norm(h[rows], h[rows], weight, 1e-5, 0.0),
            fused_numba.rotate(heads, positions[rows], table),
            fused_numba.gate(h[rows], is_silu=True),
            fused_numba.gate(h[rows], is_silu=False),
        ]

    together = everything(slice(0, 298))
    for row in (0, 1, 150, 297):
        for alone, among in zip(everything(slice(row, row + 1)), together, strict=True):
            assert torch.equal(alone[0], among[row])
