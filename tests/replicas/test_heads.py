"""R-workers that share out the heads, each with a replica at its neighbour's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replica_jobs import run
from trouble import crash_after

HEADS: dict[str, Any] = {"r_partition": "heads"}
SHAPE = {"num_attention_heads": 10, "num_key_value_heads": 5}  # uneven among 3


def test_a_lost_r_workers_heads_go_on_at_its_neighbour(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint("qwen3", **SHAPE)
    expected, _ = run(path, replicas=0)
    crash_after(monkeypatch, {"r1": 40})
    tokens, stats = run(path, **HEADS)
    assert tokens == expected
    assert stats.replicas is not None
    (failover,) = stats.replicas.failovers
    assert (failover.worker, failover.keeper) == ("R-worker r1", "R-worker r2")
    assert stats.resumed.num_tokens > 0 and stats.num_recomputed == 0


def test_a_spare_one_is_given_the_lost_ones_heads(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint("qwen3", **SHAPE)
    expected, _ = run(path, replicas=0)
    crash_after(monkeypatch, {"r0": 40})
    tokens, stats = run(path, **HEADS, spare_r_workers=1)
    assert tokens == expected
    assert stats.replicas is not None and stats.num_recomputed == 0
    (back,) = stats.replicas.returns
    assert (back.worker, back.keeper) == ("R-worker r3", "R-worker r1")
    assert stats.replicas.num_rings == 1


def test_two_neighbours_that_are_lost_are_recomputed_by_those_that_are_left(
    monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint("qwen3", **SHAPE)
    expected, _ = run(path, replicas=0)
    crash_after(monkeypatch, {"r1": 40, "r2": 60})
    tokens, stats = run(path, **HEADS)
    assert tokens == expected
    assert stats.replicas is not None and stats.replicas.num_recomputed_holders > 0
    assert stats.num_recomputed > 0
