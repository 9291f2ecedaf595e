"""A request's tokens depend on that request alone: not on neighbours,
R-workers, chunk sizes or arrival order."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from examples import examples
from fastdecode import LLM, SamplingParams


def make_requests(vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    generator = torch.Generator().manual_seed(3)

    def prompt(length: int) -> list[int]:
        return torch.randint(3, vocab_size, (length,), generator=generator).tolist()

    return [
        (prompt(5), SamplingParams(temperature=0, max_tokens=12)),
        (prompt(37), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)),
        (prompt(1), SamplingParams(temperature=1.0, seed=11, max_tokens=16)),
        (prompt(18), SamplingParams(temperature=0.8, top_p=0.9, seed=12, max_tokens=9, n=3)),
        (
            prompt(33),
            SamplingParams(
                temperature=1.2, top_k=20, seed=13, max_tokens=15, repetition_penalty=1.2
            ),
        ),
        (
            prompt(64),
            SamplingParams(
                temperature=0.9, min_p=0.02, seed=14, max_tokens=7, frequency_penalty=0.5, n=2
            ),
        ),
    ]


def answers(
    llm: LLM, requests: list[tuple[list[int], SamplingParams]]
) -> list[list[tuple[int, ...]]]:
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    return [[completion.token_ids for completion in output.completions] for output in outputs]


SHARED: dict[str, Any] = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01}
WAYS: list[dict[str, Any]] = [
    {"r_workers": 1},
    {"r_workers": 3, "prefill_chunk": 7, "prompt_attention": "s"},
    {
        "r_workers": 2,
        "prefill_chunk": 16,
        "max_num_sequences": 2,
        "max_step_tokens": 9,
        "block_size": 16,
    },
    {"r_workers": 2, "prefill_chunk": 16, "lanes": 2, "prompt_attention": "s"},
    {"r_workers": 3, "prefill_chunk": 5, "lanes": 4, "max_num_sequences": 5},
    {
        "r_workers": 2,
        "schedule": "stabilized",
        "load_limit": 150,
        "length_quantile": 0.5,
        "block_size": 16,
    },
    {"r_workers": 2, "schedule": "synchronized"},
    {"r_workers": 1, "schedule": "fixed-f", "expected_output_tokens": 64},
    {"kv_placement": "gpu", "prefill_chunk": 7},
    {
        "kv_placement": "gpu",
        "prefill_chunk": 16,
        "lanes": 3,
        "max_num_sequences": 5,
        "block_size": 16,
    },
    {"r_workers": 2, "r_partition": "heads", "prefill_chunk": 16},
    {"r_workers": 3, "split_tokens": 32, "block_size": 16, "prompt_attention": "s"},
    {"r_workers": 2, "split_tokens": 16, "block_size": 16, "prefill_chunk": 23, "lanes": 2},
]


@pytest.fixture(scope="module")
def llms(llama: str) -> list[LLM]:
    return [LLM(llama, **SHARED, **way) for way in WAYS]


@pytest.fixture(scope="module")
def alone(llms: list[LLM]) -> list[list[tuple[int, ...]]]:
    requests = make_requests(100)
    return [answers(llms[0], [request])[0] for request in requests]


@settings(max_examples=examples(36, share=2), deadline=None)
@given(
    order=st.lists(st.integers(0, 5), min_size=1, max_size=8), which=st.integers(0, len(WAYS) - 1)
)
def test_tokens_depend_on_the_request_alone(
    llms: list[LLM], alone: list[list[tuple[int, ...]]], order: list[int], which: int
) -> None:
    requests = make_requests(100)
    assert answers(llms[which], [requests[i] for i in order]) == [alone[i] for i in order]


def test_samples_of_one_request_differ(alone: list[list[tuple[int, ...]]]) -> None:
    assert len(set(alone[3])) == 3


# Truncated rows are ranked, and in these checkpoints ranks change with every way of running.

TWINS = range(10, 34, 2)
"""Each is as likely as the token after it, to the last bits, and likely: far
from where top_k or top_p end."""


@pytest.fixture(scope="module")
def twins(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the twins."""
    path = tmp_path_factory.mktemp("twins") / "llama"
    copytree(llama, path)
    weights = load_file(path / "model.safetensors")
    head = weights["lm_head.weight"]
    generator = torch.Generator().manual_seed(1)
    for token in TWINS:
        head[token + 1] = head[token] * (1 + 1e-7 * torch.randn(head.shape[1], generator=generator))
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


TRUNCATIONS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.9},
    "both": {"top_k": 60, "top_p": 0.9},
}


def truncated(options: dict[str, Any]) -> list[tuple[list[int], SamplingParams]]:
    generator = torch.Generator().manual_seed(6)
    bias = {token: 2.0 for twin in TWINS for token in (twin, twin + 1)}
    return [
        (
            torch.randint(3, 200, (length,), generator=generator).tolist(),
            SamplingParams(
                seed=length, max_tokens=24, ignore_eos=True, logit_bias=bias, n=2, **options
            ),
        )
        for length in (3, 40, 21, 1, 48, 12)
    ]


@pytest.fixture(scope="module")
def truncated_alone(twins: Path) -> dict[str, list[list[tuple[int, ...]]]]:
    with LLM(str(twins), **SHARED) as llm:
        return {
            name: [answers(llm, [request])[0] for request in truncated(options)]
            for name, options in TRUNCATIONS.items()
        }


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_truncated_draws_depend_on_the_request_alone(
    way: dict[str, Any], twins: Path, truncated_alone: dict[str, list[list[tuple[int, ...]]]]
) -> None:
    with LLM(str(twins), **SHARED, **way) as llm:
        drawn = {name: answers(llm, truncated(options)) for name, options in TRUNCATIONS.items()}
    assert drawn == truncated_alone
