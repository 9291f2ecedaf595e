"""One loss after another, on a clock that only moves when somebody waits: the
ring is closed again in between, and no sequence is recomputed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import pytest
from scripted_engine import HELLO, KV, Rig, assemble, continued, request
from simulated_cluster import Network

pytest.importorskip("zmq")

from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.engine.fleet.replacements import AddressReplacements
from fastdecode.engine.fleet.replicas import limits, replicate
from fastdecode.engine.fleet.ring import LinkOptions
from fastdecode.engine.recovery import Recovery

NUM_WORKERS = 3
NUM_TOKENS = 12
TIMEOUT_S = 8.0


class Job:
    """Three R-workers with replicas; ``returns``: others come in the place of lost ones."""

    def __init__(self, *, returns: bool) -> None:
        chance = random.Random(3)
        self.network = network = Network(NUM_WORKERS, 128 * KV.block_bytes, chance)
        fleet = Fleet(network, TIMEOUT_S, 1.0, network.time)
        hello = replace(HELLO, session=7)
        links = LinkOptions([str(i) for i in range(NUM_WORKERS)], 1 << 20, TIMEOUT_S, 7)
        welcomes, self.replicas = replicate(fleet, hello, fleet.greet(hello), links, network.time)
        replacements = None
        if returns:
            replacements = AddressReplacements(
                cast(Any, network), hello, timeout_s=TIMEOUT_S, clock=network.time
            )
            replacements.limit(limits(welcomes, NUM_WORKERS))
        blocks = tuple(welcomes[HolderId(i)].num_blocks for i in range(NUM_WORKERS))
        recovery = Recovery(fleet, replacements, network.time, self.replicas)
        self.rig: Rig = assemble(fleet, blocks, 2, recovery)
        self.num_asked = 0

    def rest(self) -> None:
        """Some time in which there is nothing to run."""
        for _ in range(20):
            self.network.time.pass_by(0.5)
            self.rig.engine.look()

    def serve(self, lose: int) -> None:
        """Requests, in the middle of which an R-worker crashes."""
        asked = [request(f"{self.num_asked + i}", 9 + i, NUM_TOKENS, 1) for i in range(6)]
        self.num_asked += len(asked)
        for one in asked:
            self.rig.submit(one)
        for step in range(400):
            if not self.rig.engine.has_work:
                break
            if step == 12:
                self.network.processes[lose].crash()
            self.rig.engine.step()
            self.rig.lifecycle.check_invariants()
        outputs = self.rig.run()
        for one in asked:
            expected = continued(one.prompt_token_ids, one.max_tokens)
            assert [c.token_ids for c in outputs[one.request_id].completions] == [expected]

    @property
    def counts(self) -> tuple[int, int]:
        """Losses that neighbours went on for, and sequences that were recomputed."""
        return len(self.replicas.figures.failovers), self.rig.engine.stats.num_recomputed


def test_the_next_loss_is_gone_on_with_by_the_new_neighbour() -> None:
    job = Job(returns=False)
    job.rest()
    job.serve(lose=1)
    assert job.counts == (1, 0)
    job.rest()
    job.serve(lose=0)
    assert job.counts == (2, 0)
    assert [each.keeper for each in job.replicas.figures.failovers] == ["R-worker r2"] * 2
    assert job.replicas.figures.num_rings >= 1


@pytest.mark.parametrize("again", [0, 1, 2])
def test_one_that_has_come_back_keeps_a_replica_and_has_one(again: int) -> None:
    job = Job(returns=True)
    job.rest()
    job.serve(lose=1)
    job.network.start(1)
    job.rest()
    assert job.rig.engine.stats.num_rejoined == 1
    before_s = job.replicas.figures.unprotected_s
    job.rest()
    assert job.replicas.figures.unprotected_s == before_s, "all are protected"
    job.serve(lose=again)
    assert job.counts == (2, 0)
    keeper = f"R-worker r{(again + 1) % NUM_WORKERS}"
    assert job.replicas.figures.failovers[-1].keeper == keeper
