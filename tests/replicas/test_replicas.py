"""Sequences of a lost R-worker go on with what its neighbour has kept."""

from __future__ import annotations

import pytest
from replica_jobs import Tokens, run
from trouble import crash_after

from fastdecode.engine.setup import replicas as replicas_setup


def test_a_lost_r_worker_costs_no_token_that_its_neighbour_has(
    monkeypatch: pytest.MonkeyPatch, llama: str, expected: Tokens
) -> None:
    crash_after(monkeypatch, {"r1": 40})
    monkeypatch.setattr(replicas_setup, "LINK_BYTES", 1 << 16)
    tokens, stats = run(llama)
    assert tokens == expected
    assert stats.replicas is not None
    (failover,) = stats.replicas.failovers
    assert (failover.worker, failover.keeper) == ("R-worker r1", "R-worker r2")
    assert stats.replicas.unprotected_s > 0
    assert stats.resumed.num_holders == 1 and stats.resumed.num_tokens > 0
    assert stats.num_recomputed == 0


def test_a_second_loss_before_there_is_another_copy_is_recomputed(
    monkeypatch: pytest.MonkeyPatch, llama: str, expected: Tokens
) -> None:
    crash_after(monkeypatch, {"r1": 40, "r2": 60})
    tokens, stats = run(llama)
    assert tokens == expected
    assert stats.replicas is not None and stats.replicas.num_recomputed_holders > 0
    assert stats.num_recomputed > 0


def test_a_sequence_that_is_split_over_r_workers_goes_on_with_all_of_its_parts(
    monkeypatch: pytest.MonkeyPatch, llama: str, expected: Tokens
) -> None:
    """Holders that live forget what the step had that the loss came in."""
    options = {"split_tokens": 16, "block_size": 16}
    crash_after(monkeypatch, {"r1": 40})
    tokens, stats = run(llama, spare_r_workers=1, **options)
    assert tokens == expected
    assert stats.resumed.num_holders >= 2 and stats.resumed.num_tokens > 0
    assert stats.num_recomputed == 0 and stats.num_rejoined == 1
