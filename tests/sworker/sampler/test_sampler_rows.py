"""Rows that can't be sampled, or hardly, and what is refused before; few rows, which NumPy
draws; and what is sent to a GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sampling_rows import V, make_state

from fastdecode.core.errors import RequestError
from fastdecode.core.sequence import SamplingParams, validate_for_vocab
from sworker import buffers
from sworker.sampling.sampler import SamplingState, draw, sample
from sworker.sampling.weights import FEW_ELEMENTS


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("whole_row", [True, False])
def test_a_bad_row_fails_alone(bad: float, whole_row: bool) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {}, {"min_p": 0.1}, {"top_k": 5}, {"top_p": 0.5}, {"logprobs": 3},
        {"min_tokens": 5, "repetition_penalty": 1.2, "frequency_penalty": 1.0,
         "logit_bias": {3: 4.0}},
    ]  # fmt: skip
    params = [SamplingParams(**kind) for kind in kinds]
    states = [
        make_state(p, seed=i, prompt=(3, 4), output=(3,))
        for i, p in enumerate(p for p in params for _ in "xy")
    ]
    logits = torch.from_numpy(
        np.random.default_rng(3).normal(0, 2, (len(states), V)).astype(np.float32)
    )
    clean = sample(logits.clone(), states)
    poisoned = logits.clone()
    if whole_row:
        poisoned[::2] = bad
    else:
        poisoned[::2, 3] = bad  # the very token that min_tokens masks
    results = sample(poisoned, states)
    for i, result in enumerate(results):
        if i % 2:
            assert result == clean[i]
        else:
            assert result.token_id == -1 and isinstance(result.error, RequestError)
            assert result.error.code == "non_finite_logits"


def test_a_row_with_every_token_masked_is_an_error() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(V)))
    results = sample(torch.zeros(2, V), [make_state(params), make_state(SamplingParams())])
    assert results[0].error is not None and results[0].error.code == "no_token_left"
    assert "min_tokens" in str(results[0].error)
    assert results[1].error is None
    assert sample(torch.zeros(0, V), []) == []


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-30, 1e-6, 100.0])
def test_extreme_temperatures_and_logits_stay_finite(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9)
    logits = torch.tensor([[-3e38, 3e38, 1.0, 0.0], [1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    states = [make_state(params, seed=i, vocab=4) for i in range(3)]
    results = sample(logits, states)
    assert all(result.error is None for result in results)
    assert results[0].token_id == 1
    if temperature < 1:
        assert results[1].token_id == 3


def test_the_vocabulary_of_one_token() -> None:
    for params in (
        SamplingParams(),
        SamplingParams(top_p=0.5, logprobs=4),
        SamplingParams(temperature=0),
    ):
        (result,) = sample(torch.zeros(1, 1), [make_state(params, vocab=1)])
        assert result.token_id == 0


def test_eos_beyond_the_vocabulary_is_harmless() -> None:
    state = SamplingState(SamplingParams(min_tokens=3), 0, (), (2, V + 5), V)
    assert sample(torch.zeros(1, V), [state])[0].token_id != 2


def test_token_ids_beyond_the_vocabulary_are_refused() -> None:
    validate_for_vocab(SamplingParams(logit_bias={V - 1: 1.0}, stop_token_ids=(0, V - 1)), V)
    for params, name in (
        (SamplingParams(logit_bias={3: 1.0, V: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=(1, 1 << 30)), "stop_token_ids"),
    ):
        with pytest.raises(RequestError, match=f"{name} names token .* end at {V - 1}") as refused:
            validate_for_vocab(params, V)
        assert refused.value.code == "invalid_sampling_params"


def states_of(num_rows: int, vocab_size: int) -> list[SamplingState]:
    temperatures = (1.0, 0.3, 2.5)
    return [
        SamplingState(SamplingParams(temperature=temperatures[i % 3]), i, [], [], vocab_size)
        for i in range(num_rows)
    ]


@pytest.mark.parametrize("vocab_size", [1, 7, 255, 256, 257, 1000, 8192])
def test_few_rows_draw_the_tokens_of_many(vocab_size: int) -> None:
    num_rows = FEW_ELEMENTS // vocab_size + 1 if vocab_size >= 255 else 300
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 4
    states = states_of(num_rows, vocab_size)
    together = [found.token_id for found in sample(logits.clone(), states)]
    one_by_one = [
        sample(logits[i : i + 1].clone(), states[i : i + 1])[0].token_id for i in range(num_rows)
    ]
    assert together == one_by_one
    assert len(set(together)) > 1 or vocab_size == 1


class Uploading:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        self.sizes.append(host.nbytes)
        return host.clone()


def test_penalties_are_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With long prompts they are megabytes a step: CUDA waits for the stream before
    it copies that from plain memory. Before, ``Tensor.to`` copied them."""
    gpu: Any = Uploading()
    vocab, length = 5000, 4000
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, repetition_penalty=1.3, logit_bias={3: 1.0})
    prompts = [tuple(rng.integers(0, vocab, length).tolist()) for _ in range(4)]
    states = [SamplingState(params, 0, prompt, (), vocab, 0) for prompt in prompts]
    logits = torch.randn(4, vocab)
    expected = draw(logits.clone(), states).result()
    monkeypatch.setattr(buffers, "gpu_of", lambda device: gpu)
    assert draw(logits.clone(), states).result() == expected
    num_ids = sum(len(set(prompt)) for prompt in prompts)
    # Rows, ids and counts of each token that is penalised, and three factors.
    assert sorted(gpu.sizes)[-4:] == [num_ids * 4, num_ids * 8, num_ids * 8, num_ids * 12]
