"""An S-worker is killed at random moments, and another one goes on with its session, by seed: the
real engine, fleet and R-workers on a clock that only moves when somebody waits. Tokens are those
of an undisturbed run, and what R-workers have kept isn't run again."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any, cast

import pytest
from scripted_engine import HELLO, KV, VOCAB, Rig, assemble, continued, request
from simulated_cluster import Network

from examples import examples

pytest.importorskip("zmq")

from values import replace

from fastdecode.core.errors import WorkerError
from fastdecode.core.sequence import PromptRequest, Request
from fastdecode.engine.checker import RequestChecker
from fastdecode.engine.fleet.greeting import greet, limits
from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.fleet.replacements import HubReplacements
from fastdecode.engine.fleet.replicas import replicate
from fastdecode.engine.fleet.ring import LinkOptions
from fastdecode.engine.session import attach
from fastdecode.jobs.session import JobSession
from fastdecode.text.codec import TextCodec

SILENCE_S = 1.0
TIMEOUT_S = 8.0
KEEP_S = 40.0
MOST_STEPS = 20_000
NUM_SEEDS = 60
PLACES = [("0",), ("1",)]


class Returns:
    """A job whose S-worker is lost some times, as follows from a seed.

    Args:
        path: of the session's file.
    """

    def __init__(self, seed: int, path: Path) -> None:
        self.chance = chance = random.Random(seed)
        self._path = path
        self._num_workers = chance.randint(1, 3)
        self._names = [str(number) for number in range(self._num_workers)]
        self._is_replicated = self._num_workers > 1 and seed % 2 == 0
        self._blocks = chance.choice([12, 24, 64])
        kv_bytes = self._blocks * KV.block_bytes
        self.network = Network(self._num_workers, kv_bytes, chance, KEEP_S)
        self._split = chance.choice([None, None, 16])
        self._keeps = chance.random() < 0.9  # else without a prefix cache
        self.asked = [self._request(str(i)) for i in range(chance.randint(2, 8))]
        self.tokens: dict[str, list[tuple[int, ...]]] = {}
        self.num_held = self.num_known = self.num_run = 0
        self.story: list[str] = []

    def _request(self, name: str) -> Request:
        chance = self.chance
        num_tokens = chance.choice([1, chance.randint(2, 40)])
        return request(name, chance.randint(1, 48), num_tokens, chance.choice([1, 1, 2, 3]))

    def live(self, *, is_last: bool) -> bool:
        """An S-worker's life. Whether it came to the job's end."""
        chance, network = self.chance, self.network
        session = JobSession(
            self._path,
            [(name,) for name in self._names],
            lambda name: name not in self.tokens,
            num_replicas=int(self._is_replicated),
        )
        rig = self._start(session)
        late = [one for one in self.asked if one.request_id not in self.tokens]
        most = MOST_STEPS if is_last else int(2 ** chance.uniform(0, 7))
        checker = RequestChecker(TextCodec(None), VOCAB, 1 << 20, session.begun)
        for _ in range(most):
            while late and (chance.random() < 0.3 or not rig.engine.requests):
                rig.submit(_again(checker, late.pop(0)))
            if not late and not rig.engine.has_work:
                session.close(is_over=True)
                return True
            try:
                rig.engine.step()
            except WorkerError:
                break  # no R-worker is left
            network.time.pass_by(rig.engine.pause_s)
            rig.lifecycle.check_invariants()
            for process in network.processes:
                process.state.check_invariants()
            self._take(rig)
            if chance.random() < 0.02:
                self._fault()
        self.num_run += rig.engine.stats.num_output_tokens
        self.story.append(f"{network.time.now:.4f} the S-worker is killed")
        session.close(is_over=False)
        network.forsake(is_seen=chance.random() < 0.7)
        network.time.pass_by(chance.choice([0.0, 1e-3, 1.0, 2 * KEEP_S]))
        return False

    def _take(self, rig: Rig) -> None:
        """What is answered, is."""
        for name, output in rig._outputs.items():
            assert output.error is None
            self.tokens[name] = [completion.token_ids for completion in output.completions]

    def _fault(self) -> None:
        """Something befalls an R-worker, too."""
        number, kind = self.chance.randrange(self._num_workers), self.chance.choice("cpl")
        process, network = self.network.processes[number], self.network
        self.story.append(f"{network.time.now:.4f} {kind} of r{number}")
        if kind == "p":
            process.hang(0.5)
        elif kind == "l":
            network.connections[number].cut(3.0)
        elif process.is_up:
            process.crash()
            network.time.at(network.time.now + 0.3, lambda: self._come_back(number))

    def _come_back(self, number: int) -> None:
        if not self.network.processes[number].is_up:
            self.network.start(number)

    def _start(self, session: JobSession) -> Rig:
        network, chance = self.network, self.chance
        fleet = WorkerPool(network, TIMEOUT_S, SILENCE_S, network.time)
        hello = replace(HELLO, session=session.number, outlives=self._keeps)
        greeting = replace(hello, resumes=session.is_resumed and self._keeps)
        for number in range(self._num_workers):
            self._come_back(number)
        welcomes = greet(fleet, greeting)
        replicas = None
        if self._is_replicated and len(welcomes) > 1:
            links = LinkOptions(self._names, 1 << 20, TIMEOUT_S, session.number)
            welcomes, replicas = replicate(fleet, greeting, welcomes, links, network.time)
        deadlines = Deadlines(TIMEOUT_S, SILENCE_S, network.time)
        replacements = HubReplacements(cast(Any, network), hello, deadlines)
        if replicas is not None:
            blocks_of = {x: y.num_blocks for x, y in welcomes.items()}
            replacements.limit(limits(blocks_of, self._num_workers))
        blocks = tuple(
            welcomes[holder].num_blocks if holder in welcomes else self._blocks
            for holder in range(len(fleet))
        )
        rig = assemble(
            fleet,
            blocks,
            chance.randint(1, 3),
            replacements,
            network.time,
            replicas,
            keeps_blocks=self._keeps,
            session=session,
            split_tokens=self._split,
        )
        if self._keeps and session.is_resumed:
            counts = attach(fleet, rig.lifecycle.scheduler.ledger.cache, session)
            self.num_held += counts.num_held_tokens
            self.num_known += counts.num_tokens
        else:
            session.begin()
        if replicas is not None:
            replicas.begin()
        return rig


def _again(checker: RequestChecker, asked: Request) -> Request:
    """The request as it arrives at another S-worker."""
    params = replace(asked.params, seed=0)
    arrived = PromptRequest(asked.request_id, asked.prompt_token_ids, params)
    return checker.check(arrived, asked.prompt_token_ids)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 30))
def test_another_s_worker_goes_on_as_if_nothing_had_happened(
    first: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL + 1)
    num_held = 0
    for seed in range(first, first + examples(30)):
        trial = Returns(seed, tmp_path / f"{seed}.session")
        try:
            num_lives = trial.chance.randint(2, 4)
            while not trial.live(is_last=num_lives == 1):
                num_lives -= 1
            for one in trial.asked:
                expected = continued(one.prompt_token_ids, one.max_tokens)
                assert trial.tokens[one.request_id] == [expected] * one.params.n
        except (AssertionError, WorkerError) as error:
            raise AssertionError("\n".join([f"seed {seed}: {error}", *trial.story])) from error
        num_held += trial.num_held
    assert num_held


def test_only_what_is_not_held_runs_again(tmp_path: Path) -> None:
    """One of two sequences is killed in the middle: the other S-worker runs no
    token of it twice but the last."""
    network = Network(2, 64 * KV.block_bytes, random.Random(1), KEEP_S)
    path, asked = tmp_path / "job.session", [request("a", 40, 30), request("bb", 21, 30)]
    lost = JobSession(path, PLACES, lambda name: True)
    first = _rig(network, lost)
    for one in asked:
        first.submit(one)
    for _ in range(20):
        first.engine.step()
    ran = {life.sequence.request.request_id: life.sequence.num_cached
           for life in first.lifecycle.sequences.by_sequence.values()}  # fmt: skip
    network.forsake(is_seen=False)
    lost.close(is_over=False)
    session = JobSession(path, PLACES, lambda name: True)
    second = _rig(network, session)
    counts = attach(second.fleet, second.lifecycle.scheduler.ledger.cache, session)
    assert counts.num_sequences == counts.num_held_sequences == 2
    assert sum(ran.values()) - 2 <= counts.num_held_tokens <= sum(ran.values()) + 2
    checker = RequestChecker(TextCodec(None), VOCAB, 1 << 20, session.begun)
    for one in asked:
        second.submit(_again(checker, one))
    outputs = second.run()
    for one in asked:
        (completion,) = outputs[one.request_id].completions
        assert completion.token_ids == continued(one.prompt_token_ids, one.max_tokens)
    stats = second.engine.stats
    assert stats.num_cached_prompt_tokens == counts.num_held_tokens
    assert stats.num_prompt_tokens == 0
    network.time.pass_by(1.0)
    for process in network.processes:
        (cache,) = process.state._caches
        store = cache.books.store
        assert store.pool.num_free + len(store.cached) == store.num_blocks


def _rig(network: Network, session: JobSession) -> Rig:
    fleet = WorkerPool(network, TIMEOUT_S, SILENCE_S, network.time)
    hello = replace(HELLO, session=session.number, outlives=True, resumes=session.is_resumed)
    welcomes = greet(fleet, hello)
    blocks = tuple(welcome.num_blocks for welcome in welcomes.values())
    clock = network.time
    return assemble(fleet, blocks, 1, None, clock, keeps_blocks=True, session=session)


def test_the_first_s_worker_ends_when_a_second_goes_on(tmp_path: Path) -> None:
    network = Network(2, 64 * KV.block_bytes, random.Random(1), KEEP_S)
    path = tmp_path / "job.session"
    lost = JobSession(path, PLACES, lambda name: True)
    first = _rig(network, lost)
    first.submit(request("a", 40, 60))
    for _ in range(20):
        first.engine.step()
    links = network._links
    network._links = [type(links[0])(network, number) for number in range(2)]
    lost.close(is_over=False)
    session = JobSession(path, PLACES, lambda name: True)
    second = _rig(network, session)
    attach(second.fleet, second.lifecycle.scheduler.ledger.cache, session)
    seconds, network._links = network._links, links
    with pytest.raises(WorkerError, match="another S-worker goes on with this session") as raised:
        first.run()
    assert raised.value.code == "session_resumed"
    network._links = seconds
    checker = RequestChecker(TextCodec(None), VOCAB, 1 << 20, session.begun)
    asked = request("a", 40, 60)
    second.submit(_again(checker, asked))
    (completion,) = second.run()["a"].completions
    assert completion.token_ids == continued(asked.prompt_token_ids, 60)
