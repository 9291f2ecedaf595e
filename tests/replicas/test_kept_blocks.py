"""Replicas follow kept blocks: a shared prompt is run once, and a lost R-worker
costs conversations no history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import prompts
from trouble import crash_after

from fastdecode import LLM, SamplingParams
from fastdecode.engine.stats import EngineStats

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=3, max_tokens=10, ignore_eos=True)
NUM_TURNS = 4
NEW = (9, 14, 21, 6, 17)
"""Tokens of a turn, of each conversation."""

Told = list[tuple[int, ...]]


def make(path: Path | str, **options: Any) -> LLM:
    given = {
        "dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01, "r_workers": 3, "lanes": 2,
        "block_size": 16, "prefix_cache": "on", "replicas": 1, **options,
    }  # fmt: skip
    return LLM(str(path), **given)


def talk(path: Path | str, **options: Any) -> tuple[Told, list[int], EngineStats]:
    """What conversations say, how many tokens of prompts each round of turns has run,
    and what the engine has counted."""
    told: Told = []
    num_run: list[int] = []
    with make(path, **options) as llm:
        for turn in range(NUM_TURNS):
            before = llm.stats.num_prompt_tokens
            asked = prompts(NEW, seed=turn)
            params = [GREEDY if i % 2 else SEEDED for i in range(len(NEW))]
            ids = [f"c{i}" for i in range(len(NEW))]
            outputs = llm.generate(asked, params, conversation_id=ids)
            told += [output.completions[0].token_ids for output in outputs]
            num_run.append(llm.stats.num_prompt_tokens - before)
        return told, num_run, llm.stats


def test_requests_that_share_a_prompt_run_it_once_with_replicas_too(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    path = tiny_checkpoint("llama", max_position_embeddings=1024)
    (shared,) = prompts([512], seed=8)
    asked = [[*shared, *own] for own in prompts([3] * 32, seed=9)]
    num_run: list[int] = []
    tokens = []
    for replicas in (0, 1):
        with make(path, replicas=replicas, kv_memory_gb=0.03) as llm:
            outputs = llm.generate(asked, GREEDY)
            tokens.append([output.completions[0].token_ids for output in outputs])
            num_run.append(llm.stats.num_prompt_tokens)
            assert llm.stats.num_recomputed == 0
    assert tokens[0] == tokens[1]
    assert num_run[0] < 4 * len(shared), "once at each of three R-workers"
    assert num_run[1] <= 1.1 * num_run[0]


@pytest.mark.parametrize("options", [{}, {"cache_disk_gb": 0.001}, {"pp": 2}], ids=str)
def test_the_turn_after_a_loss_runs_what_is_new(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, llama: str, tmp_path: Path
) -> None:
    if "cache_disk_gb" in options:
        options = {**options, "cache_disk": str(tmp_path)}
    expected, undisturbed, _ = talk(llama, replicas=0)
    crash_after(monkeypatch, {"r1": 30})
    told, num_run, stats = talk(llama, **options)
    assert told == expected
    assert stats.replicas is not None and len(stats.replicas.failovers) == 1
    assert num_run[1:] == undisturbed[1:], "the turns after it"
    assert max(num_run[1:]) <= 1.1 * sum(NEW), "a turn's own tokens, and the last of each before"
