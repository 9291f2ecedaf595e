"""Kernels that read blocks where they lie, beside float64: decoded tokens and later chunks of
prompts; in Triton's interpreter, or on the GPU where there is one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import MOST_OFF, Case, cases, pairwise
from triton_interpreter import DEVICE, interpret_kernels

from cpu_kernels.reference import quantize
from examples import TRIES_ALL
from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from sworker.paged import NOWHERE, BlockKernels, PagedKV

# Triton's interpreter multiplies bfloat16 as whole numbers.
DTYPES = (torch.float16, torch.float32)
CASES = [*cases(DTYPES, (16, 80, 128), (1, 4, 32), (16, 64)), *cases(DTYPES, (256,), (4,), (64,))]
SOME = CASES if TRIES_ALL else pairwise(CASES)
CONTEXTS = (1, 63, 64, 65, 300)
CHUNKS = ((64, 9), (1, 3), (63, 20), (300, 2))
"""Cached tokens, and new ones."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> BlockKernels:
    interpret_kernels(monkeypatch)
    from sworker.kernels import paged_triton

    found: BlockKernels = paged_triton
    return found


@pytest.mark.parametrize("case", SOME, ids=str)
def test_decoded_tokens(case: Case, kernels: BlockKernels) -> None:
    """The longest context is cut into pieces, and the others aren't."""
    step = case.sequences([n - 1 for n in CONTEXTS], [1] * len(CONTEXTS), DEVICE, kernels)
    assert step.cache.decode_plan(np.array(CONTEXTS), None).num_merges == 1
    assert step.error(step.step("decoded")) < MOST_OFF[case.dtype]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_later_chunks(case: Case, kernels: BlockKernels) -> None:
    pasts, news = zip(*CHUNKS, strict=True)
    step = case.sequences(pasts, news, DEVICE, kernels)
    assert step.error(step.step("later")) < MOST_OFF[case.dtype]


@pytest.mark.parametrize("kind", ["plain", "window"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks(dtype: torch.dtype, kind: str, kernels: BlockKernels) -> None:
    """By the log-sum-exp of pieces that are whole and of pieces that are merged."""
    case = Case(dtype, False, 16, 4, 16, kind)
    sinks = torch.linspace(-30.0, 30.0, 8)
    ones = [1] * len(CONTEXTS)
    decoded = case.sequences([n - 1 for n in CONTEXTS], ones, DEVICE, kernels, sinks)
    assert decoded.error(decoded.step("decoded")) < MOST_OFF[dtype]
    pasts, news = zip(*CHUNKS, strict=True)
    later = case.sequences(pasts, news, DEVICE, kernels, sinks)
    assert later.error(later.step("later")) < MOST_OFF[dtype]


def test_a_chunk_of_few_tokens_is_cut_by_what_it_sees(kernels: BlockKernels) -> None:
    case = Case(torch.float32, False, 16, 2, 16, "window")
    step = case.sequences((900, 40), (5, 50), DEVICE, kernels)
    later = step.step("later")
    assert step.error(later) < MOST_OFF[torch.float32]
    assert later.chunk_work[100].splits.num_merges == 0  # a window of 100 isn't worth it
    plain = replace(case, kind="plain").sequences((900, 40), (5, 50), DEVICE, kernels)
    later = plain.step("later")
    assert plain.error(later) < MOST_OFF[torch.float32]
    assert later.chunk_work[None].splits.num_merges > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_as_an_r_worker_holds_it(dtype: torch.dtype, kernels: BlockKernels) -> None:
    """Whole numbers and scales are R-workers', to the bit, halves between two included."""
    generator = torch.Generator().manual_seed(3)
    x = (
        torch.randn(2, 200, 3, 80, generator=generator)
        * 10 ** torch.linspace(-4, 4, 200)[:, None, None]
    )
    x[0, 7] = 0.0
    x[1, :, 1, 0] = 127.0
    x[1, :, 1, 1:] = torch.randint(-253, 254, (200, 79), generator=generator) / 2
    k, v = x.to(dtype).to(DEVICE)
    spec = AttentionSpec(3, 3, 80, 1.0)
    cache = PagedKV(KVSpec(1, 3, 80, DType.INT8, 16), [spec], 13, DEVICE, kernels)
    cache.pool.fill_(99)
    slots = torch.randperm(13 * 16, generator=generator)[:200]
    slots[[5, 90]] = NOWHERE
    cache.store(0, k, v, slots.to(DEVICE))
    assert cache.scales is not None
    is_stored = slots >= 0
    for half, new in enumerate((k, v)):
        whole, scales = quantize(new.float().cpu().numpy(), "int8")
        at = slots[is_stored]
        assert np.array_equal(cache.pool[0, half].cpu()[at].numpy(), whole[is_stored])
        assert np.array_equal(cache.scales[0, half].cpu()[at].numpy(), scales[is_stored])
    others = np.setdiff1d(np.arange(13 * 16), slots.numpy())
    assert (cache.pool[0, :, torch.from_numpy(others)] == 99).all()
