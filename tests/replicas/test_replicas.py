"""A neighbour with a replica, or a standby R-worker, takes the place of a lost R-worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from replica_jobs import Tokens, run
from trouble import crash_after

from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.replacements import SpareHub
from fastdecode.engine.setup import greeting as replicas_setup
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import Accepted, Close, FromRWorker, ToRWorker, Welcome
from fastdecode.wire.transport import PeerLostError


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


def test_a_spare_one_that_is_lost_too_is_replaced_by_the_next(
    monkeypatch: pytest.MonkeyPatch, llama: str, expected: Tokens
) -> None:
    crash_after(monkeypatch, {"r0": 20, "r1": 4})
    tokens, stats = run(llama, replicas=0, r_workers=1, lanes=1, spare_r_workers=2)
    assert tokens == expected
    assert stats.num_rejoined == 2


def hub_of(num_workers: int, num_spares: int) -> tuple[SpareHub, list[Any]]:
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    ends = [
        connect(hub, "S", InprocHub[FromRWorker, ToRWorker](), f"r{i}")[1]
        for i in range(num_workers + num_spares)
    ]
    return SpareHub(hub, num_spares, [f"r{i}" for i in range(len(ends))]), ends


def test_what_a_spare_one_says_waits_until_it_is_asked() -> None:
    hub, ends = hub_of(2, 1)
    spare = hub.reconnect(1)
    assert hub.addresses == ["r0", "r2"]
    ends[2].send(Welcome("r2", 10, 16, 1))
    ends[0].send(Accepted(5))
    assert hub.receive_any(1.0) == (0, Accepted(5))
    assert spare.poll() == Welcome("r2", 10, 16, 1)
    assert spare.poll() is None
    hub.replace(1, spare)
    spare.send(Close(1))
    assert ends[2].poll() == Close(1)
    ends[2].send(Accepted(6))
    ends[1].send(Accepted(7))
    assert hub.receive_any(1.0) == (1, Accepted(6)), "the lost one isn't listened to"
    assert hub.given_up(()) == {1}
    ends[2].close()
    with pytest.raises(PeerLostError) as lost:
        hub.receive_any(1.0)
    assert lost.value.index == HolderId(1)


def test_a_spare_one_that_dies_is_found_when_it_is_needed() -> None:
    hub, ends = hub_of(1, 2)
    ends[1].close()
    ends[0].send(Accepted(1))
    assert hub.receive_any(1.0) == (0, Accepted(1))
    first = hub.reconnect(0)
    for _ in range(2):
        with pytest.raises(Exception, match="closed"):
            first.poll()
    assert hub.num_left == 1 and hub.reconnect(0).poll() is None
    with pytest.raises(ConfigError, match="no spare"):
        hub.reconnect(0)


def test_a_replacement_that_takes_a_copy_over_keeps_blocks_on_disk(
    monkeypatch: pytest.MonkeyPatch, llama: str, expected: Tokens, tmp_path: Path
) -> None:
    """It opens its lower tier once it has the copy: before, it has no cache to open it for."""
    disk = {"cache_disk": str(tmp_path), "cache_disk_gb": 0.01, "spare_r_workers": 1}
    crash_after(monkeypatch, {"r1": 40})
    tokens, stats = run(llama, **disk)
    assert tokens == expected
    assert stats.replicas is not None and len(stats.replicas.returns) == 1
    assert [each.worker for each in stats.replicas.failovers] == ["R-worker r1"]
    assert stats.num_recomputed == 0
