"""Sequences of a lost R-worker go on with what its neighbour has kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import prompts
from trouble import crash_after

from fastdecode import LLM, SamplingParams
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.engine.stats import EngineStats

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FORKED = SamplingParams(temperature=0.9, seed=5, max_tokens=20, n=3, ignore_eos=True)


def run(path: Path, **options: Any) -> tuple[list[list[tuple[int, ...]]], EngineStats]:
    """Everybody's tokens, and what the engine has counted."""
    given = {
        "dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01, "prefill_chunk": 8,
        "r_workers": 3, "lanes": 2, "replicas": 1, **options,
    }  # fmt: skip
    with LLM(str(path), **given) as llm:
        asked = prompts([3, 30, 11, 1, 19, 8, 5], seed=2)
        outputs = llm.generate(asked, [GREEDY] * 5 + [FORKED] * 2)
        return [[c.token_ids for c in output.completions] for output in outputs], llm.stats


def test_a_lost_r_worker_costs_no_token_that_its_neighbour_has(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint("llama")
    expected, _ = run(path, replicas=0)
    crash_after(monkeypatch, {"r1": 40})
    tokens, stats = run(path, link_bytes=1 << 16)
    assert tokens == expected
    assert stats.replicas is not None
    (failover,) = stats.replicas.failovers
    assert (failover.worker, failover.keeper) == ("R-worker r1", "R-worker r2")
    assert stats.replicas.unprotected_s > 0
    assert stats.resumed.num_holders == 1 and stats.resumed.num_tokens > 0
    assert stats.num_recomputed == 0


def test_a_second_loss_before_there_is_another_copy_is_recomputed(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint("llama")
    expected, _ = run(path, replicas=0)
    crash_after(monkeypatch, {"r1": 40, "r2": 60})
    tokens, stats = run(path)
    assert tokens == expected
    assert stats.replicas is not None and stats.replicas.num_recomputed_holders > 0
    assert stats.num_recomputed > 0


def test_a_single_r_worker_has_nobody_to_keep_its_replica(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    with pytest.raises(ConfigError, match="need a second R-worker"):
        run(tiny_checkpoint("llama"), r_workers=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("r_partition", "heads"), ("split_tokens", 64), ("prefix_cache", "on"),
        ("kv_placement", "gpu"), ("kv_placement", "hybrid"),
    ],
)  # fmt: skip
def test_what_there_are_no_replicas_with_is_said(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="replicas") as refused:
        EngineConfig.of("model", replicas=1, **{name: value})
    assert name.replace("_", "") in str(refused.value).replace("-", "").replace("_", "")
