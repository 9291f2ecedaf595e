"""A request's tokens depend on that request alone: not on neighbours, R-workers, chunk sizes or arrival order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

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
        (prompt(33), SamplingParams(temperature=1.2, top_k=20, seed=13, max_tokens=15, repetition_penalty=1.2)),
        (prompt(64), SamplingParams(temperature=0.9, min_p=0.02, seed=14, max_tokens=7, frequency_penalty=0.5, n=2)),
    ]


def answers(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[list[tuple[int, ...]]]:
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    return [[completion.token_ids for completion in output.completions] for output in outputs]


@pytest.fixture(scope="module")
def llms(tiny_checkpoint: Callable[..., Path]) -> list[LLM]:
    path = str(tiny_checkpoint("llama"))
    shared = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01}
    return [
        LLM(path, r_workers=1, **shared),
        LLM(path, r_workers=3, prefill_chunk=7, prompt_attention="s", **shared),
        LLM(path, r_workers=2, prefill_chunk=16, max_num_sequences=2, max_step_tokens=9, block_size=16, **shared),
        LLM(path, r_workers=2, prefill_chunk=16, lanes=2, prompt_attention="s", **shared),
        LLM(path, r_workers=3, prefill_chunk=5, lanes=4, max_num_sequences=5, **shared),
        LLM(path, r_workers=2, schedule="stabilized", load_limit=150, length_quantile=0.5, block_size=16, **shared),
        LLM(path, r_workers=2, schedule="synchronized", **shared),
        LLM(path, r_workers=1, schedule="fixed-f", target_length=64, interval=4, **shared),
        LLM(path, kv_placement="gpu", prefill_chunk=7, **shared),
        LLM(path, kv_placement="gpu", prefill_chunk=16, lanes=3, max_num_sequences=5, block_size=16, **shared),
    ]


@pytest.fixture(scope="module")
def alone(llms: list[LLM]) -> list[list[tuple[int, ...]]]:
    requests = make_requests(100)
    return [answers(llms[0], [request])[0] for request in requests]


@settings(max_examples=36, deadline=None)
@given(order=st.lists(st.integers(0, 5), min_size=1, max_size=8), which=st.integers(0, 9))
def test_tokens_depend_on_the_request_alone(
    llms: list[LLM], alone: list[list[tuple[int, ...]]], order: list[int], which: int
) -> None:
    requests = make_requests(100)
    assert answers(llms[which], [requests[i] for i in order]) == [alone[i] for i in order]


def test_samples_of_one_request_differ(alone: list[list[tuple[int, ...]]]) -> None:
    assert len(set(alone[3])) == 3
