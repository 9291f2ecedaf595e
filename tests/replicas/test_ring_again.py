"""One loss after another, on a clock that only moves when somebody waits: the
ring is closed again in between, and no sequence is recomputed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
from scripted_engine import HELLO, KV, Rig, assemble, continued, request
from simulated_cluster import Network

pytest.importorskip("zmq")

from values import replace

from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.greeting import greet, limits
from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.fleet.replacements import HubReplacements
from fastdecode.engine.fleet.replicas import replicate
from fastdecode.engine.fleet.ring import LinkOptions

NUM_WORKERS = 3
NUM_TOKENS = 12
TIMEOUT_S = 8.0


Act = Callable[["Job"], object]


class Job:
    """Three R-workers with replicas; ``returns``: others come in the place of lost ones."""

    def __init__(self, *, returns: bool) -> None:
        chance = random.Random(3)
        self.network = network = Network(NUM_WORKERS, 128 * KV.block_bytes, chance)
        fleet = WorkerPool(network, TIMEOUT_S, 1.0, network.time)
        hello = replace(HELLO, session=7)
        links = LinkOptions([str(i) for i in range(NUM_WORKERS)], 1 << 20, TIMEOUT_S, 7)
        welcomes, self.replicas = replicate(fleet, hello, greet(fleet, hello), links, network.time)
        self.replicas.begin()
        replacements = None
        if returns:
            deadlines = Deadlines(TIMEOUT_S, 1.0, network.time)
            replacements = HubReplacements(cast(Any, network), hello, deadlines)
            blocks_of = {x: y.num_blocks for x, y in welcomes.items()}
            replacements.limit(limits(blocks_of, NUM_WORKERS))
        blocks = tuple(welcomes[HolderId(i)].num_blocks for i in range(NUM_WORKERS))
        back = (replacements, network.time, self.replicas)
        self.rig: Rig = assemble(fleet, blocks, 2, *back)
        self.num_asked = 0

    def rest(self) -> None:
        """Some time in which there is nothing to run."""
        for _ in range(20):
            self.network.time.pass_by(0.5)
            self.rig.engine.look()

    def serve(
        self, lose: int, num_tokens: int = NUM_TOKENS, also: Mapping[int, Act] | None = None
    ) -> None:
        """Requests, in the middle of which an R-worker crashes. ``also``: what
        else happens before which step."""
        asked = [request(f"{self.num_asked + i}", 9 + i, num_tokens, 1) for i in range(6)]
        self.num_asked += len(asked)
        for one in asked:
            self.rig.submit(one)
        for step in range(400):
            if not self.rig.engine.has_work:
                break
            if step == 12:
                self.network.processes[lose].crash()
            if also and step in also:
                also[step](self)
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


def start(number: int) -> Act:
    return lambda job: job.network.start(number)


def crash(number: int) -> Act:
    return lambda job: job.network.processes[number].crash()


def returned(job: Job) -> bool:
    """Whether the R-worker that has come in the place of r1 goes on for it."""
    return [each.keeper for each in job.replicas.figures.returns] == ["R-worker r2"]


def test_one_that_comes_goes_on_with_the_sequences_that_run() -> None:
    job = Job(returns=True)
    job.rest()
    job.serve(1, 40, {16: start(1)})
    assert job.counts == (1, 0) and returned(job)
    assert job.rig.engine.stats.num_rejoined == 1
    job.rest()
    before_s = job.replicas.figures.unprotected_s
    job.rest()
    assert job.replicas.figures.unprotected_s == before_s, "all are protected"
    job.serve(lose=1)
    assert job.counts == (2, 0), "it had a replica"
    job.network.start(1)
    job.rest()
    job.serve(lose=0)
    assert job.counts == (3, 0), "it kept one"
    assert job.replicas.figures.failovers[-1].keeper == "R-worker r1"


@pytest.mark.parametrize("steps_later", range(1, 12, 2))
def test_one_that_is_lost_while_it_catches_up_changes_nothing(steps_later: int) -> None:
    job = Job(returns=True)
    job.rest()
    job.serve(1, 40, {16: start(1), 16 + steps_later: crash(1)})
    assert not job.counts[1] or returned(job), "and had no replica yet"
    assert job.counts[0] in (1, 2)


@pytest.mark.parametrize("steps_later", range(1, 12, 2))
def test_it_goes_on_with_what_it_has_when_the_neighbour_is_lost(steps_later: int) -> None:
    """The neighbour's own sequences go on at its neighbour's."""
    job = Job(returns=True)
    job.rest()
    job.serve(1, 40, {16: start(1), 16 + steps_later: crash(2)})
    num_failovers, num_recomputed = job.counts
    assert num_failovers >= 2
    assert num_recomputed <= 2, "those of r1, if nothing of them had come"
