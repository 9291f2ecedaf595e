"""Sequences of a lost R-worker go on with what its neighbour has kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import prompts
from trouble import crash_after

from fastdecode import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FORKED = SamplingParams(temperature=0.9, seed=5, max_tokens=20, n=3, ignore_eos=True)


def run(path: Path, **options: Any) -> tuple[list[list[tuple[int, ...]]], Any]:
    """Everybody's tokens, and what has become of replicas."""
    given = {
        "dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01, "prefill_chunk": 8,
        "r_workers": 3, "replicas": 1, **options,
    }  # fmt: skip
    with LLM(str(path), **given) as llm:
        asked = prompts([3, 30, 11, 1, 19, 8, 5], seed=2)
        outputs = llm.generate(asked, [GREEDY] * 5 + [FORKED] * 2)
        for output in outputs:
            assert output.ok, output.error
        return [[c.token_ids for c in output.completions] for output in outputs], llm.stats


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("crashes", [{"r1": 7}, {"r1": 40}, {"r2": 23}])
def test_a_lost_worker_changes_no_token(
    lanes: int,
    crashes: Mapping[str, int],
    monkeypatch: pytest.MonkeyPatch,
    tiny_checkpoint: Callable[..., Path],
) -> None:
    path = tiny_checkpoint("llama")
    expected, _ = run(path, lanes=lanes, replicas=0)
    crash_after(monkeypatch, crashes)
    tokens, stats = run(path, lanes=lanes)
    assert tokens == expected
    print(stats)
