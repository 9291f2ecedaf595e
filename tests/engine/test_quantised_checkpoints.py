"""Quantised checkpoints through the engine: tokens are those of the checkpoint
that holds the decoded weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import prompts
from quantised import WAYS, quantise_checkpoint

from fastdecode import LLM, SamplingParams

SHAPES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 211}  # fmt: skip


def say(path: Path, **where: Any) -> list[list[int]]:
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    shared = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01}
    with LLM(str(path), **{**shared, **where}) as llm:
        outputs = llm.generate(prompts((5, 19, 1), seed=3), greedy)
        return [list(output.completions[0].token_ids) for output in outputs]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tokens_are_those_of_the_decoded_weights(
    way: str, family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_checkpoint(family, seed=5, **SHAPES)
    quantised, plain = quantise_checkpoint(source, tmp_path, way)
    expected = say(plain, r_workers=1)
    assert say(quantised, r_workers=2) == expected
    assert say(quantised, kv_placement="gpu") == expected
    assert say(source, r_workers=1) != expected  # quantising changed them
