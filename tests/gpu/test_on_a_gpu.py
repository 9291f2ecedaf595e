"""What only a GPU can show, beside the checks of test_right.py: other families than
Llama, and paged attention by everything that it can be asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import SPECS, CachedSequences
from checkpoints import prompts

from fastdecode import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and torch built for CUDA"
    ),
]
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


@pytest.mark.parametrize("name", SPECS)
def test_paged_attention(name: str) -> None:
    pytest.importorskip("triton")
    pasts, news = [5, 2000, 64, 63, 0, 20, 700, 0, 12], [1, 1, 1, 1, 1, 1, 9, 30, 2]
    step = CachedSequences(SPECS[name], pasts, news, torch.device("cuda", 0))
    assert step.cache.kernels is not None
    assert step.error() < 1e-4
    step.cache.kernels = None
    assert step.error() < 1e-4
