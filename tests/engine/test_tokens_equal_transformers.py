"""The whole path against transformers: a checkpoint in, greedy tokens and
logprobs out, for every family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import FAMILIES, oracle, prompts

from examples import TRIES_ALL
from fastdecode import LLM, SamplingParams

OPT_POST_NORM = {"do_layer_norm_before": False, "word_embed_proj_dim": 20}
CASES = [*((family, {}) for family in FAMILIES), ("opt", OPT_POST_NORM)]
NUM_TOKENS = 64
PROMPT_LENGTHS = (1, 23, 7, 40)
LONGROPE = {
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.3, 1.8],
        "long_factor": [1.5, 2.0, 4.0, 9.0],
    },
    "original_max_position_embeddings": 100,
}


class Reference(NamedTuple):
    """What transformers says, each prompt run alone."""

    asked: list[list[int]]  # prompts
    tokens: list[list[int]]  # its greedy tokens in float32
    logprobs: list[torch.Tensor]  # there, float64 [NUM_TOKENS, vocab]
    tolerance: float
    """1e-4; but models of sharp random weights differ in how much rounding moves them: or twice as
    far as transformers in float32 is from its own float64."""


@lru_cache(maxsize=2)
def reference(path: Path, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> Reference:
    single, double = oracle(path), oracle(path, torch.float64)
    asked = prompts(lengths, seed=7)
    tokens, logprobs, tolerance = [], [], 1e-4
    for prompt in asked:
        continuation, _ = single.greedy(prompt, NUM_TOKENS)
        rounded, exact = (
            x.logits([*prompt, *continuation])[len(prompt) - 1 : -1].double().log_softmax(-1)
            for x in (single, double)
        )
        likely = exact.topk(3).indices
        distance = (rounded - exact).gather(1, likely).abs().max().item()
        assert distance < 2e-4
        tokens.append(continuation)
        logprobs.append(exact)
        tolerance = max(tolerance, 2 * distance)
    return Reference(asked, tokens, logprobs, tolerance)


WHERE: dict[str, dict[str, Any]] = {
    "r1": {"r_workers": 1, "prompt_attention": "s"},
    "r3-prompts-on-r": {"r_workers": 3, "prompt_attention": "r"},
    "r1-prompts-on-r-chunked": {"r_workers": 1, "prompt_attention": "r", "prefill_chunk": 6},
    "r3-chunked": {"r_workers": 3, "prompt_attention": "s", "prefill_chunk": 6},
    "gpu": {"kv_placement": "gpu"},
    "gpu-chunked": {"kv_placement": "gpu", "prefill_chunk": 6},
}
HALVES = ("r1", "r1-prompts-on-r-chunked", "gpu-chunked"), ("r3-prompts-on-r", "r3-chunked", "gpu")
"""In each: decoding on both sides, prompts on both, whole ones and chunks."""
IN_ALL_WAYS = ("llama", "gemma2", "bloom")
"""Grouped queries; windows and soft caps; ALiBi."""


def ways() -> Iterator[Any]:
    """The other families have one half or the other."""
    for number, (family, overrides) in enumerate(CASES):
        everywhere = TRIES_ALL or family in IN_ALL_WAYS
        for how in WHERE if everywhere else HALVES[number % 2]:
            name = f"{family}_post_norm" if overrides else family
            yield pytest.param(family, overrides, WHERE[how], id=f"{name}-{how}")


@pytest.mark.parametrize(("family", "overrides", "where"), list(ways()))
def test_greedy_tokens_and_logprobs(
    family: str,
    overrides: dict[str, Any],
    where: dict[str, Any],
    tiny_checkpoint: Callable[..., Path],
) -> None:
    path = tiny_checkpoint(family, **overrides)
    assert_says(path, reference(path), **where)


@pytest.mark.parametrize("where", [{"r_workers": 2}, {"kv_placement": "gpu"}], ids=["r2", "gpu"])
@pytest.mark.parametrize(
    ("max_model_len", "lengths"),
    [(None, (1, 23, 36)), (100, (36,)), (300, (101, 130, 200)), (512, (140,))],
)
def test_longrope_takes_the_factors_of_the_length_asked_for(
    max_model_len: int | None,
    lengths: tuple[int, ...],
    where: dict[str, Any],
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """Short ones up to the original 100 tokens, long ones for the texts that go beyond them."""
    path = tiny_checkpoint("phi3", seed=0, **LONGROPE)
    assert_says(
        path, reference(path, lengths), max_model_len=max_model_len, prefill_chunk=64, **where
    )


def assert_says(path: Path, expected: Reference, **options: Any) -> None:
    """Greedy tokens and log-probabilities of an engine with these options."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
    shared = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01}
    with LLM(str(path), **{**shared, **options}) as llm:
        outputs = llm.generate(expected.asked, params)
    _, expected_tokens, expected_logprobs, tolerance = expected
    for output, tokens, logprobs in zip(outputs, expected_tokens, expected_logprobs, strict=True):
        assert output.error is None
        completion = output.completions[0]
        assert list(completion.token_ids) == tokens
        assert completion.logprobs is not None
        for step, row in zip(completion.logprobs, logprobs, strict=True):
            assert abs(step.logprob - row[step.token_id].item()) < tolerance
            for token, logprob in step.top:
                assert abs(logprob - row[token].item()) < tolerance


ROUNDED = {
    ("float16", "r"): 2e-2,
    ("float16", "gpu"): 2e-2,
    ("bfloat16", "r"): 2e-1,
    ("bfloat16", "gpu"): 2e-1,
    ("int8", "r"): 5e-1,
    ("int4", "r"): 6.0,
}
"""How far log-probabilities may go, by KV dtype and where it is."""
# Nearly each with R-workers is a kernel to compile, so not all of them.
ROUNDINGS = [
    *(("gemma2", *how) for how in ROUNDED),
    ("llama", "int8", "r"),
    ("llama", "bfloat16", "gpu"),
    ("bloom", "float16", "gpu"),
]
MORE_ROUNDINGS = [
    (family, *how)
    for family in ("llama", "bloom")
    for how in ROUNDED
    if (family, *how) not in ROUNDINGS
]


@pytest.mark.parametrize(
    ("family", "kv_dtype", "kv_placement"), ROUNDINGS + MORE_ROUNDINGS * TRIES_ALL
)
def test_rounded_kv_stays_close(
    family: str, kv_dtype: str, kv_placement: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    """First generated token's logprobs: later ones may follow another token."""
    path = tiny_checkpoint(family)
    asked, _, expected, _ = reference(path)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    options = {
        "dtype": "float32",
        "kv_dtype": kv_dtype,
        "kv_placement": kv_placement,
        "kv_memory_gb": 0.01,
    }
    with LLM(str(path), prefill_chunk=6, **options) as llm:
        outputs = llm.generate(asked, params)
    worst = 0.0
    for output, logprobs in zip(outputs, expected, strict=True):
        steps = output.completions[0].logprobs
        assert steps is not None
        worst = max(worst, max(abs(lp - logprobs[0, token].item()) for token, lp in steps[0].top))
    assert 0 < worst < ROUNDED[kv_dtype, kv_placement]
