"""Scripts written for vLLM's offline API, and what their parameters mean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdecode import LLM, SamplingParams

DEMO = Path(__file__).parents[2] / "examples/model/checkpoint"
PROMPTS = ["Once upon a time", "The old map showed"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(DEMO), dtype="float32", kv_memory_gb=0.05) as llm:
        yield llm


def test_bad_words_are_never_said(llm: LLM) -> None:
    free = llm.generate(PROMPTS, GREEDY)
    words = [free[0].text.split()[1], free[1].text.split()[2]]
    params = SamplingParams(temperature=0, max_tokens=24, bad_words=words)
    for output, before in zip(llm.generate(PROMPTS, params), free, strict=True):
        assert output.text != before.text
        assert not any(word in output.text.split() for word in words)


def test_allowed_tokens_are_the_only_ones(llm: LLM) -> None:
    allowed = llm.codec.encode(" the cat sat on a mat", add_special_tokens=False)
    params = SamplingParams(temperature=1, seed=3, max_tokens=9, allowed_token_ids=allowed)
    (output,) = llm.generate(PROMPTS[:1], params)
    assert set(output.completions[0].token_ids) <= set(allowed)
    assert output.completions[0].finish_reason == "length"
