"""What only a GPU can show, beside the checks of test_right.py: other families than
Llama, and paged attention by everything that it can be asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import prompts
from paged_sequences import SPECS, Sequences

from fastdecode import LLM, SamplingParams
from sworker.kernels.fused import fuse
from sworker.load.weights import load_model
from sworker.worker import SWorker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and torch built for CUDA"
    ),
]
CUDA = torch.device("cuda", 0)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=20, n=2, ignore_eos=True)
LENGTHS = (3, 30, 11, 1, 19, 8, 5, 40)


def tokens(path: Path, **options: Any) -> list[list[tuple[int, ...]]]:
    shared = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.02, "prefill_chunk": 9}
    shared |= {"device": "cpu", "kv_placement": "r"}
    with LLM(str(path), **{**shared, **options}) as llm:
        outputs = llm.generate(prompts(LENGTHS, seed=2), [GREEDY] * 6 + [SAMPLED] * 2)
    assert [output.error for output in outputs] == [None] * len(LENGTHS)
    return [[completion.token_ids for completion in output.completions] for output in outputs]


@pytest.mark.parametrize("family", ["gemma2", "bloom", "mistral"])
def test_the_cpus_tokens_of_other_families(
    family: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint(family)
    expected = tokens(path)
    for options in ({"lanes": 2}, {"kv_placement": "gpu"}):
        assert tokens(path, device="cuda", **options) == expected, options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_fused_kernels(dtype: torch.dtype, tiny_checkpoint: Callable[..., Path]) -> None:
    pytest.importorskip("triton")
    steps = []
    for is_fused in (False, True):
        spec, model = load_model(tiny_checkpoint("gemma2"), device=CUDA, dtype=dtype)
        assert not is_fused or fuse(model, CUDA)
        steps.append(SWorker(spec, model, CUDA).begin(torch.arange(9).repeat(2, 1)))
    plain, fused = steps
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fused.q, plain.q, atol=tolerance, rtol=tolerance)
    plain.advance(plain.q)
    fused.advance(plain.q)
    torch.testing.assert_close(fused.k, plain.k, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", SPECS)
def test_paged_attention(name: str) -> None:
    pytest.importorskip("triton")
    step = Sequences(
        SPECS[name], [5, 2000, 64, 63, 0, 20, 700, 0, 12], [1, 1, 1, 1, 1, 1, 9, 30, 2], device=CUDA
    )
    assert step.cache.kernels is not None
    np.testing.assert_allclose(step.attend(), step.expected(), atol=1e-4)
    step.cache.kernels = None
    np.testing.assert_allclose(step.attend(), step.expected(), atol=1e-4)
