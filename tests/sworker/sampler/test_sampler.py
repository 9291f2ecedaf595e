"""The sampler against a plain float64 oracle, one row at a time; and against transformers' logits
processors."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sampling_rows import EOS, V, assert_drawn_as, draw_row, draws_of, make_state
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from examples import examples
from fastdecode.core.sequence import SamplingParams
from sworker.sampling.sampler import SamplingState, sample
from sworker.sampling.weights import TIE


def naive_logits(
    row: NDArray[np.float32], p: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...]
) -> NDArray[np.float64]:
    """Bias, penalties and masks as their definitions say."""
    x = row.astype(np.float64)
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in set(prompt) | set(output):
        x[token] = (
            x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        )
    for token, count in Counter(output).items():
        x[token] -= p.frequency_penalty * count + p.presence_penalty
    if len(output) < p.min_tokens:
        x[list(p.stop_token_ids)] = -np.inf
        if not p.ignore_eos:
            x[list(EOS)] = -np.inf
    return x


def naive_probabilities(x: NDArray[np.float64], p: SamplingParams) -> NDArray[np.float64]:
    """The distribution that is drawn from, over all tokens."""
    if p.temperature == 0:
        return np.eye(len(x))[np.argmax(x)]
    probs = np.exp((x - x.max()) / p.temperature)
    order = np.argsort(-x, kind="stable")[: p.top_k or None]
    reached = np.cumsum(probs[order]) / probs[order].sum()
    num_by_top_p = int((reached < p.top_p).sum()) + 1
    edge = x[order[min(num_by_top_p, len(order)) - 1]] if p.top_k or p.top_p < 1 else -np.inf
    if p.min_p:
        edge = max(edge, x.max() + p.temperature * math.log(p.min_p))
    probs[x < edge - TIE] = 0
    return probs / probs.sum()


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {},
    "top_k above the vocabulary": {"top_k": 1000},
    "tiny top_p": {"top_p": 1e-9},
    "min_p of 1": {"min_p": 1.0},
    "all truncations": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "bias": {"logit_bias": {0: 5.0, 7: -100.0, 60: 1.5}},
    "presence": {"presence_penalty": 1.5},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.3},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": (11, 12)},
    "min_tokens reached": {"min_tokens": 5, "stop_token_ids": (11, 12)},
    "min_tokens, EOS ignored": {"min_tokens": 9, "stop_token_ids": (11,), "ignore_eos": True},
    "everything": {
        "temperature": 0.8, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {11: 3.0, 2: 2.0},
        "min_tokens": 8, "stop_token_ids": (11,),
    },
}  # fmt: skip
"""What the comparison with transformers leaves out, and all of it together."""


@pytest.mark.parametrize("name", CASES)
def test_the_drawn_distribution_is_the_oracles(name: str) -> None:
    params = SamplingParams(**{"max_tokens": 100, **CASES[name]})
    prompt, output = (1, 1, 5, 20), (5, 7, 7, 8, 20)
    row = np.random.default_rng(len(name)).normal(0, 2, V).astype(np.float32)
    row[[3, 11, 60]] += 2  # likely, so that a mask shows
    expected = naive_probabilities(naive_logits(row, params, prompt, output), params)
    assert_drawn_as(draws_of(row, params, prompt=prompt, output=output), expected)


@pytest.mark.parametrize(
    "params", [{"top_k": 2}, {"top_p": 0.4}, {"top_k": 3, "top_p": 0.5}, {"min_p": 1.0}], ids=str
)
def test_ties_at_the_edge_are_kept_together(params: dict[str, Any]) -> None:
    row = np.full(V, -50, np.float32)
    row[[10, 20, 30, 40]] = 1.0 + np.array([0, 1, -1, 2], np.float32) * 1e-5
    expected = np.zeros(V)
    expected[[10, 20, 30, 40]] = 0.25
    assert_drawn_as(draws_of(row, SamplingParams(**params)), expected)


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}], ids=str)
def test_a_token_below_the_edge_is_not_kept(params: dict[str, Any]) -> None:
    row = np.full(V, -50, np.float32)
    row[[10, 20, 30]] = 1.0, 0.999, 0.998 if "min_p" not in params else 0.8
    assert set(draws_of(row, SamplingParams(**params))) == {10, 20}


@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_k": 1}])
def test_greedy_ties_give_the_lowest_id(params: dict[str, Any]) -> None:
    logits = torch.full((3, 1000), -1.0)
    logits[0, [999, 17, 400]] = 2.0
    logits[1, [5, 6]] = torch.tensor([-0.0, 0.0])
    logits[2] = 0.25
    states = [make_state(SamplingParams(**params), vocab=1000)] * 3
    assert [s.token_id for s in sample(logits, states)] == [17, 5, 0]


def test_top_p_is_of_the_mass_that_its_own_rows_top_k_leaves() -> None:
    row = np.zeros(V, np.float32)
    row[5] = 0.1
    both, neighbour = SamplingParams(top_k=2, top_p=0.4), SamplingParams(top_p=0.4)
    states = [make_state(p, seed=i) for i, p in enumerate([both, neighbour] * 50)]
    drawn = [s.token_id for s in sample(torch.from_numpy(np.tile(row, (100, 1))), states)]
    assert set(drawn[::2]) == {5}
    assert len(set(drawn[1::2])) > 5


def test_draws_pass_a_chi_square_test() -> None:
    probs = np.array([0.4, 0.2, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01])
    count = examples(40_000)
    logits = torch.from_numpy(np.log(probs)).float().expand(count, -1).clone()
    params = SamplingParams()
    by_seed = [make_state(params, seed=seed, vocab=8) for seed in range(count)]
    by_position = []
    for position in range(count):
        state = make_state(params, seed=123, vocab=8)
        state.num_generated = position
        by_position.append(state)
    by_sample = [SamplingState(params, 7, (), EOS, 8, index) for index in range(count)]
    for states in (by_seed, by_position, by_sample):
        drawn = np.array([s.token_id for s in sample(logits.clone(), states)])
        assert_drawn_as(drawn.tolist(), probs)
        # Neighbouring counters are independent: so are pairs of successive draws.
        assert_drawn_as((drawn[:-1:2] * 8 + drawn[1::2]).tolist(), np.outer(probs, probs).ravel())


@pytest.mark.parametrize("vocab", [256, 257, 700])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}], ids=str)
def test_several_groups_are_drawn_from_as_one_row(vocab: int, options: dict[str, Any]) -> None:
    """Groups of unequal mass, and a last one that isn't full."""
    params = SamplingParams(**options)
    row = np.random.default_rng(vocab).normal(0, 1.5, vocab).astype(np.float32)
    row[: vocab // 3] += 1
    row[-1] = row.max()
    tokens = draws_of(row, params)
    assert_drawn_as(tokens, naive_probabilities(row.astype(np.float64), params))
    assert vocab - 1 in tokens


def test_seeds_of_every_kind_give_distinct_streams() -> None:
    seeds = [0, 1, 2, -1, -(1 << 63), (1 << 64) - 2, 1 << 63, 1 << 32]
    streams = {
        SamplingState(SamplingParams(), s, (), EOS, V, i).stream for s in seeds for i in range(64)
    }
    assert len(streams) == 64 * len(seeds) - 64  # -(2^63) and 2^63 are the same 64 bits


def test_prompt_of_many_tokens_and_long_outputs_are_all_counted() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0, frequency_penalty=0.5)
    state = SamplingState(params, 0, range(0, 500, 2), (), 1000)
    for token in [999, *range(600, 700), *range(600, 650)]:
        state.observe(token)
    row = np.random.default_rng(0).normal(0, 1, 1000).astype(np.float32)
    adjusted = torch.from_numpy(row)[None].clone()
    sample(adjusted, [state])
    expected = naive_logits(
        row, params, tuple(range(0, 500, 2)), (999, *range(600, 700), *range(600, 650))
    )
    np.testing.assert_allclose(adjusted[0].numpy(), expected, rtol=1e-6, atol=1e-6)


# --- logprobs
# ------------------------------------------------------------------------------


def test_logprobs_are_of_the_adjusted_untruncated_distribution() -> None:
    params = SamplingParams(
        temperature=0.3,
        top_k=2,
        logprobs=6,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        logit_bias={4: 2.5},
    )
    prompt, output = (1, 2, 3), (4, 4, 9)
    rows = np.random.default_rng(1).normal(0, 3, (40, V)).astype(np.float32)
    results = sample(
        torch.from_numpy(rows.copy()), [make_state(params, i, prompt, output) for i in range(40)]
    )
    for row, result in zip(rows, results, strict=True):
        x = naive_logits(row, params, prompt, output)
        expected = x - x.max() - np.log(np.exp(x - x.max()).sum())
        assert result.logprob is not None and result.logprob.token_id == result.token_id
        assert result.logprob.logprob == pytest.approx(expected[result.token_id], abs=2e-6)
        order = np.argsort(-x, kind="stable")[:6]
        assert [token for token, _ in result.logprob.top] == order.tolist()
        np.testing.assert_allclose(
            [value for _, value in result.logprob.top], expected[order], atol=2e-6
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_changes_nothing_but_rounding() -> None:
    kinds = [SamplingParams(**{"max_tokens": 100, **case}) for case in CASES.values()]
    states = [
        make_state(p, seed=i, prompt=(1, 2), output=(5, 6))
        for i, p in enumerate(p for p in kinds for _ in range(8))
    ]
    logits = torch.from_numpy(
        np.random.default_rng(4).normal(0, 2, (len(states), V)).astype(np.float32)
    )
    on_cpu = sample(logits.clone(), states)
    on_gpu = sample(logits.cuda(), states)
    assert [s.token_id for s in on_cpu] == [s.token_id for s in on_gpu]


def processors_of(p: SamplingParams) -> LogitsProcessorList:
    chain = LogitsProcessorList()
    if p.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    chain.append(TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        chain.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        chain.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        chain.append(MinPLogitsWarper(p.min_p))
    return chain


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"top_k": 1},
        {"top_k": 12},
        {"top_p": 0.85},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.15},
        {"temperature": 0.7, "top_k": 10, "top_p": 0.95},
    ],
    ids=str,
)
def test_drawn_frequencies_are_the_processed_probabilities(options: dict[str, Any]) -> None:
    params, rng = SamplingParams(**options), np.random.default_rng(17)
    row = torch.from_numpy(rng.normal(0, 2, V).astype(np.float32))
    prompt, output = rng.integers(0, V, 6).tolist(), rng.integers(0, V, 3).tolist()
    processed = processors_of(params)(torch.tensor([prompt + output]), row[None].clone())  # type: ignore[arg-type]
    expected = torch.softmax(processed, dim=-1)[0].double().numpy()
    state = SamplingState(params, 0, prompt, (), V, 0, output)
    assert_drawn_as(draw_row(row.numpy(), state), expected)
