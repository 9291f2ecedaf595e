"""The shipped checkpoint, and the recall that a wrong KV cache would spoil."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import TRIES_ALL, examples
from fastdecode import LLM, SamplingParams

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHECKPOINT = EXAMPLES / "model" / "checkpoint"
STATED_RECALL = 0.775


def test_the_checkpoint_is_small_and_transformers_loads_it() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 6_000_000
    _, report = AutoModelForCausalLM.from_pretrained(CHECKPOINT, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    text = 'Q: Who carried the brass lantern in room 402?\nA: "Oscar," said Mirard.'
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


MANY = {"r_workers": 3, "prefill_chunk": 48, "lanes": 2}


@pytest.mark.parametrize("options", [MANY, *[{"r_workers": 1}] * TRIES_ALL])
def test_it_recalls_what_its_prompts_told(options: dict[str, int]) -> None:
    lines = (EXAMPLES / "model" / "recall_eval.jsonl").read_text().splitlines()
    items = [json.loads(line) for line in lines[: examples(200)]]
    three_deviations = 3 * (STATED_RECALL * (1 - STATED_RECALL) / len(items)) ** 0.5
    params = SamplingParams(temperature=0, max_tokens=32, stop=("\n",))
    with LLM(str(CHECKPOINT), r_threads=1, kv_memory_gb=0.2, **options) as llm:
        outputs = llm.generate([item["prompt"] for item in items], params)
    right = [
        output.text.strip().startswith(item["answer"].strip())
        for output, item in zip(outputs, items, strict=True)
    ]
    assert sum(right) / len(right) >= STATED_RECALL - three_deviations
