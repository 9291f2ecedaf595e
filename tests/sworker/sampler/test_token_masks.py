"""Tokens that may not be drawn: allowed_token_ids and bad_words."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampling_rows import V, make_state
from transformers import NoBadWordsLogitsProcessor

from fastdecode.core.errors import RequestError
from fastdecode.core.sequence import SamplingParams, validate_for_vocab
from sworker.sampling.penalties import adjust
from sworker.sampling.sampler import SamplingState, sample
from sworker.sampling.token_masks import mask_logits, packed


@pytest.mark.parametrize("vocab", [1, 32, 33, 1000])
@pytest.mark.parametrize("share", [0.01, 0.33, 1.0])
def test_a_packed_mask_leaves_its_tokens_alone(vocab: int, share: float) -> None:
    rng = np.random.default_rng(vocab)
    allowed = rng.choice(vocab, max(1, int(vocab * share)), replace=False).tolist()
    logits = torch.from_numpy(rng.normal(size=(3, vocab)).astype(np.float32))
    expected = logits.clone()
    out = [token for token in range(vocab) if token not in allowed]
    expected[1, out] = -math.inf
    mask_logits(logits, [None, packed(allowed, vocab), None])
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.5}], ids=str)
def test_only_allowed_tokens_are_drawn(params: dict[str, float]) -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (40, V)).astype(np.float32))
    allowed = (7, 8, 30, 60)
    some = SamplingParams(allowed_token_ids=allowed, logprobs=9, **params)  # type: ignore[arg-type]
    states = [make_state(some if i % 2 else SamplingParams(**params), seed=i) for i in range(40)]  # type: ignore[arg-type]
    free = [make_state(SamplingParams(**params), seed=i) for i in range(40)]  # type: ignore[arg-type]
    drawn, unmasked = sample(logits.clone(), states), sample(logits.clone(), free)
    assert drawn[::2] == unmasked[::2], "other rows draw what they draw without it"
    for row, result in zip(logits[1::2], drawn[1::2], strict=True):
        assert result.logprob is not None
        assert result.token_id in allowed
        assert {token for token, _ in result.logprob.top} == set(allowed), "no others are likely"
        alone = torch.log_softmax(row[list(allowed)].double(), 0)
        assert result.logprob.logprob == pytest.approx(float(alone[allowed.index(result.token_id)]))


@pytest.mark.parametrize("damage", [math.nan, math.inf])
@pytest.mark.parametrize("allowed", [(1,), tuple(t for t in range(V) if t != 50)], ids=len)
def test_a_mask_hides_no_damaged_logits(damage: float, allowed: tuple[int, ...]) -> None:
    logits = torch.zeros(1, V)
    logits[0, 50] = damage
    (result,) = sample(logits, [make_state(SamplingParams(allowed_token_ids=allowed))])
    assert result.error is not None and result.error.code == "non_finite_logits"


def test_nothing_left_to_draw_names_what_forbids_it() -> None:
    params = SamplingParams(allowed_token_ids=(3,), min_tokens=1)  # 3 is EOS
    (result,) = sample(torch.zeros(1, V), [make_state(params)])
    assert result.error is not None and result.error.code == "no_token_left"
    assert "allowed_token_ids" in str(result.error)


def test_bad_words_mask_what_transformers_masks() -> None:
    words = [(5,), (7, 8), (7, 9, 10), (9, 10), (11, 11)]
    rng = np.random.default_rng(2)
    oracle = NoBadWordsLogitsProcessor([list(word) for word in words])
    for length in range(7):
        output = rng.choice([5, 7, 8, 9, 10, 11], length).tolist()
        logits = torch.from_numpy(rng.normal(size=(1, V)).astype(np.float32))
        expected = oracle(torch.tensor([[50, *output]]), logits.clone())
        state = SamplingState(SamplingParams(), 0, (7,), (), V, 0, output, words)
        adjust(logits, [state])
        assert torch.equal(logits, expected), output


def test_bad_words_and_a_bias_for_the_same_token() -> None:
    params = SamplingParams(logit_bias={5: 3.0, 8: 2.0, 12: 1.0})
    state = SamplingState(params, 0, (), (), V, 0, (7,), [(5,), (7, 8)])
    logits = torch.zeros(1, V)
    adjust(logits, [state])
    assert logits[0, [5, 8, 12, 13]].tolist() == [-math.inf, -math.inf, 1.0, 0.0]


def test_a_bad_word_of_the_prompt_counts_only_from_the_output() -> None:
    """As in vLLM: the prompt's tokens begin no bad word."""
    state = SamplingState(SamplingParams(), 0, (7,), (), V, 0, (), [(7, 8)])
    logits = torch.zeros(1, V)
    adjust(logits, [state])
    assert torch.equal(logits, torch.zeros(1, V))


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": []},
        {"allowed_token_ids": "12"},
        {"allowed_token_ids": [-1]},
        {"bad_words": "word"},
        {"bad_words": [""]},
        {"bad_words": [" "]},
        {"bad_words": [3]},
    ],
    ids=str,
)
def test_bad_masks_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        SamplingParams(**options)  # type: ignore[arg-type]


def test_allowed_tokens_are_the_models() -> None:
    with pytest.raises(RequestError, match=f"allowed_token_ids names token {V}"):
        validate_for_vocab(SamplingParams(allowed_token_ids=(V,)), V)
