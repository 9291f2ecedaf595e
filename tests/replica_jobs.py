"""A few requests of a tiny model, whose R-workers keep replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints import prompts

from fastdecode import LLM, SamplingParams
from fastdecode.engine.stats import EngineStats

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FORKED = SamplingParams(temperature=0.9, seed=5, max_tokens=20, n=3, ignore_eos=True)


Tokens = list[list[tuple[int, ...]]]


def run(path: Path | str, **options: Any) -> tuple[Tokens, EngineStats]:
    """Everybody's tokens, and what the engine has counted."""
    given = {
        "dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01, "prefill_chunk": 8,
        "r_workers": 3, "lanes": 2, "replicas": 1, **options,
    }  # fmt: skip
    with LLM(str(path), **given) as llm:
        asked = prompts([3, 30, 11, 1, 19, 8, 5], seed=2)
        outputs = llm.generate(asked, [GREEDY] * 5 + [FORKED] * 2)
        return [[c.token_ids for c in output.completions] for output in outputs], llm.stats
