"""The whole path against transformers: a checkpoint in, greedy tokens and logprobs out, for every family."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastdecode import LLM, SamplingParams

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "opt", "opt_post_norm", "gpt2", "gpt_neox", "bloom")
NUM_TOKENS = 64
PROMPT_LENGTHS = (1, 23, 7, 40)


def prompts_for(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@lru_cache(maxsize=2)
def reference(path: Path) -> tuple[list[list[int]], list[list[int]], list[torch.Tensor]]:
    """Prompts, transformers' greedy tokens, and its logprobs at every generated position, each prompt run alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = prompts_for(model.config.vocab_size)
    tokens, logprobs = [], []
    for prompt in prompts:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens.append(out.sequences[0, len(prompt) :].tolist())
        logprobs.append(torch.stack([step[0] for step in out.logits]).log_softmax(-1))
    return prompts, tokens, logprobs


@pytest.mark.parametrize(("r_workers", "prefill_chunk"), [(1, 512), (3, 512), (1, 6), (3, 6)])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logprobs(
    family: str, r_workers: int, prefill_chunk: int, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint(family)
    prompts, expected, expected_logprobs = reference(path)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
    with LLM(
        str(path), dtype="float32", r_workers=r_workers, r_threads=1, prefill_chunk=prefill_chunk, kv_memory_gb=0.01
    ) as llm:
        outputs = llm.generate(prompts, params)
    for output, tokens, logprobs in zip(outputs, expected, expected_logprobs, strict=True):
        assert output.error is None
        completion = output.completions[0]
        assert list(completion.token_ids) == tokens
        assert completion.logprobs is not None
        for step, row in zip(completion.logprobs, logprobs, strict=True):
            assert abs(step.logprob - row[step.token_id].item()) < 1e-4
            for token, logprob in step.top:
                assert abs(logprob - row[token].item()) < 1e-4


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("float16", 5e-3), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
def test_16_bit_kv_stays_close(
    family: str, kv_dtype: str, tolerance: float, tiny_checkpoint: Callable[..., Path]
) -> None:
    """First generated token's logprobs: later ones may follow another token."""
    path = tiny_checkpoint(family)
    prompts, _, expected = reference(path)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    with LLM(str(path), dtype="float32", kv_dtype=kv_dtype, prefill_chunk=6, kv_memory_gb=0.01) as llm:
        outputs = llm.generate(prompts, params)
    worst = 0.0
    for output, logprobs in zip(outputs, expected, strict=True):
        steps = output.completions[0].logprobs
        assert steps is not None
        worst = max(worst, max(abs(lp - logprobs[0, token].item()) for token, lp in steps[0].top))
    assert 0 < worst < tolerance
