"""Requests of several kinds, and what an engine makes of them."""

from __future__ import annotations

from functools import cache
from typing import Any

from checkpoints import prompts

from fastdecode import LLM, SamplingParams

Tokens = list[list[tuple[int, ...]]]
OPTIONS: dict[str, Any] = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01}


def tokens(llm: LLM, asked: list[tuple[list[int], SamplingParams]]) -> Tokens:
    outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    assert all(output.ok for output in outputs), outputs
    return [[completion.token_ids for completion in output.completions] for output in outputs]


def mixed_requests() -> list[tuple[list[int], SamplingParams]]:
    """Short and long, greedy and sampled, several completions of one prompt."""
    short, long, forked, middling = prompts((5, 40, 18, 23))
    return [
        (short, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)),
        (long, SamplingParams(temperature=1.0, seed=4, max_tokens=9, ignore_eos=True)),
        (forked, SamplingParams(temperature=0.8, seed=5, top_p=0.9, max_tokens=8, n=3)),
        (middling, SamplingParams(temperature=0, max_tokens=15, repetition_penalty=1.2)),
    ]


@cache
def plain(path: str) -> Tokens:
    """Return what one engine with one R-worker says to these."""
    with LLM(path, **OPTIONS) as llm:
        return tokens(llm, mixed_requests())
