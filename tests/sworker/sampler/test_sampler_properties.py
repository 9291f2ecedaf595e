"""A row's result doesn't depend on its batch, to the bit; nor on how the work is cut."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sworker.sampling.sampler as sampler
import sworker.sampling.weights as weights
from examples import examples
from fastdecode.core.sequence import SamplingParams
from sworker.sampling.sampler import SampledToken, SamplingState, sample

EOS = (1, 2)


@st.composite
def sampling_params(draw: st.DrawFn, vocab: int) -> SamplingParams:
    ids = st.integers(0, vocab - 1)
    sometimes: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.sampled_from([0.0, 1e-3, 0.5, 1.0, 3.0]),
        "top_k": st.integers(0, vocab + 3),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.5, 2),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(ids, st.floats(-5, 5), max_size=4),
        "stop_token_ids": st.lists(ids, max_size=3).map(tuple),
        "min_tokens": st.integers(0, 6),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 5),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(sometimes)), max_size=5))
    return SamplingParams(max_tokens=64, **{name: draw(sometimes[name]) for name in sorted(chosen)})


Row = tuple[torch.Tensor, Any]


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[Any]]:
    """Logits [B, V], and a maker of fresh states a row. Rounded logits bring ties."""
    vocab = draw(st.sampled_from([5, 37, 130, 1031]))
    count = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    logits = rng.normal(0, draw(st.sampled_from([0.1, 2.0, 8.0])), (count, vocab)).astype(
        np.float32
    )
    if draw(st.booleans()):
        logits = logits.round()
    makers = []
    for row in range(count):
        params, seed = draw(sampling_params(vocab)), draw(st.integers(0, 1 << 60))
        tokens = rng.integers(0, vocab, 12).tolist()
        num_prompt = draw(st.integers(0, 12))
        args = (params, seed, tokens[:num_prompt], EOS, vocab, row, tokens[num_prompt:])
        makers.append(lambda args=args: SamplingState(*args))
    return torch.from_numpy(logits), makers


def run(logits: torch.Tensor, makers: list[Any]) -> list[SampledToken]:
    results = sample(logits.clone(), [maker() for maker in makers])
    # Errors are compared by what they say.
    return [SampledToken(r.token_id, r.logprob, r.error and str(r.error)) for r in results]  # type: ignore[arg-type]


@settings(max_examples=examples(160), deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_a_row_alone_gives_what_it_gives_in_any_batch(
    batch: tuple[torch.Tensor, list[Any]], random: Any
) -> None:
    logits, makers = batch
    together = run(logits, makers)
    for row, maker in enumerate(makers):
        assert run(logits[row : row + 1], [maker]) == [together[row]]
    order = random.sample(range(len(makers)), len(makers))
    assert run(logits[order], [makers[row] for row in order]) == [together[row] for row in order]


@settings(max_examples=examples(120), deadline=None)
@given(batches(), st.integers(1, 40), st.integers(1, 3000))
def test_neither_short_list_nor_blocks_change_a_result(
    batch: tuple[torch.Tensor, list[Any]], short_list: int, block: int
) -> None:
    logits, makers = batch
    expected = run(logits, makers)
    with mock.patch.multiple(sampler, SHORT_LIST=short_list, MAX_CPU_BLOCK_ELEMENTS=block):
        assert run(logits, makers) == expected


@settings(max_examples=examples(120), deadline=None)
@given(batches())
def test_only_tokens_that_may_be_drawn_are_drawn(batch: tuple[torch.Tensor, list[Any]]) -> None:
    logits, makers = batch
    for result, maker, row in zip(run(logits, makers), makers, logits, strict=True):
        state = maker()
        params, vocab = state.params, state.vocab_size
        if result.error is not None:
            assert vocab == 5 and state.num_generated < params.min_tokens  # all five tokens masked
            continue
        assert 0 <= result.token_id < vocab
        if state.num_generated < params.min_tokens:
            assert result.token_id not in params.stop_token_ids
            assert params.ignore_eos or result.token_id not in EOS
        if (
            params
            == SamplingParams(max_tokens=64, top_k=params.top_k, temperature=params.temperature)
            and params.top_k
        ):
            assert (row > row[result.token_id] + weights.TIE).sum() < params.top_k


def test_the_whole_mass_of_the_largest_vocabulary_stays_exact() -> None:
    for vocab in (1, 2, 3, 128_256, 1 << 20, 1 << 24):
        assert vocab * weights.scale_of(vocab) <= 2.0**52
    assert weights.scale_of(128_256) >= 2.0**35
