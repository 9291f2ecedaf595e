"""Blocks that one R-worker has named are fetched by another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chunk_memory import ALL_KV, KV, NUM_BLOCKS, READING
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from pulling import TIMEOUT_S, Host, Hosts, keys_of
from values import replace

from examples import examples
from fastdecode.core.clock import Clock
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import BlockData, ChunkForm, Forget, ReadBlocks, words_of
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import Failed
from rworker.transfers import peer_fetch
from rworker.transfers.neighbours import REACH_S
from rworker.transfers.throttle import ATTENDING_S, SHARE, Throttle


def pair(num_tokens: int, kv: KVSpec = KV, seed: int = 1) -> tuple[Hosts, Host, Host]:
    """Two R-workers, the first of which has named blocks."""
    hosts = Hosts()
    one, other = hosts.add("p", kv), hosts.add("d", kv)
    one.fill(3, num_tokens, seed)
    one.offer(3, num_tokens, seed)
    return hosts, one, other


def read(keys: list[bytes], num_tokens: int, **changes: Any) -> ReadBlocks:
    counts = np.full(len(keys), num_tokens, np.int32)
    share = 0, KV.num_layers, 0, KV.num_kv_heads
    asked = (READING, "a model", KV, ChunkForm.TOKENS, *share, words_of(keys))
    return replace(ReadBlocks(*asked, counts), **changes)


@pytest.mark.parametrize("kv", ALL_KV, ids=lambda kv: kv.dtype.value)
@pytest.mark.parametrize("num_tokens", [1, 16, 37])
def test_what_is_fetched_is_there_bit_for_bit(kv: KVSpec, num_tokens: int) -> None:
    hosts, one, other = pair(num_tokens, kv, seed=5)
    other.fetch(9, num_tokens, one.source(num_tokens), seed=5)
    hosts.run()
    (done,) = other.news()
    assert (done.job, done.reason, len(done.missing)) == (9, "", 0)
    assert done.num_bytes >= num_tokens * kv.token_bytes
    assert other.has(num_tokens, seed=5) and one.has(num_tokens, seed=5)


def test_a_source_of_which_anything_is_raised_ends_that_fetch_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong address from another instance does not cost an R-worker."""
    hosts, one, other = pair(9)
    one.fill(4, 9, seed=2)
    one.offer(4, 9, seed=2)
    open_to = hosts.open

    def open_unless_odd(address: str) -> Any:
        if address == "odd":
            raise ValueError("no such address family")
        return open_to(address)

    monkeypatch.setattr(hosts, "open", open_unless_odd)
    other.fetch(8, 9, replace(one.source(9), address="odd"), seed=1)
    other.fetch(9, 9, one.source(9), seed=2)
    hosts.run()
    reasons = {done.job: done.reason for done in other.news()}
    assert reasons == {8: "ValueError: no such address family", 9: ""}
    assert other.has(9, seed=2)


HALVES = replace(KV, num_kv_heads=2)


def halves(hosts: Hosts, name: str) -> list[Host]:
    return [hosts.add(f"{name}{first}", HALVES, first) for first in (0, 2)]


def whole(hosts: Hosts, name: str) -> list[Host]:
    return [hosts.add(name, KV)]


def one_more_head(hosts: Hosts, name: str) -> list[Host]:
    three, one = replace(KV, num_kv_heads=3), replace(KV, num_kv_heads=1)
    return [hosts.add(f"{name}0", three, 0), hosts.add(f"{name}3", one, 3)]


FLEETS = [whole, halves, one_more_head]


@pytest.mark.parametrize("there", FLEETS)
@pytest.mark.parametrize("here", FLEETS)
def test_heads_may_be_shared_out_otherwise(
    there: Callable[[Hosts, str], list[Host]], here: Callable[[Hosts, str], list[Host]]
) -> None:
    hosts = Hosts()
    sources, targets = there(hosts, "p"), here(hosts, "d")
    for source in sources:
        source.fill(1, 29, seed=2)
        source.offer(1, 29, seed=2)
    for target in targets:
        target.fetch(4, 29, *[source.source(29) for source in sources], seed=2)
    hosts.run()
    for target in targets:
        assert [done.reason for done in target.news()] == [""]
        assert target.has(29, seed=2)


@pytest.mark.parametrize("first_heads", [(0,), (0, 0), (0, 1), (0, 2, 2)])
def test_sources_have_each_head_once(first_heads: tuple[int, ...]) -> None:
    hosts, one, other = pair(9)
    parts = [replace(one.source(9), first_head=x, num_heads=2) for x in first_heads]
    other.fetch(4, 9, *parts, seed=1)
    hosts.run()
    (done,) = other.news()
    assert "once" in done.reason and len(done.missing) == len(keys_of(KV, 9, 1))


def test_readers_without_the_right_find_nothing_and_other_kinds_are_refused() -> None:
    hosts, one, _ = pair(20)
    full, tail = keys_of(KV, 20, seed=1)[0], keys_of(KV, 20, seed=1)[-1]
    size = KV.block_size
    nothing = [
        read([full], size, reading=READING + 1),
        read([full], size, reading=0),
        read([b"x" * 16], size),
        read([tail], size),  # what is behind its tokens is another sequence's
        read([tail], size, form=ChunkForm.BLOCKS),
        read([full], 20 % size),
    ]
    refused = [
        read([full], size, kv=replace(KV, block_size=2 * size)),
        read([full], size, model_hash="another"),
        read([full], size, num_layers=KV.num_layers + 1),
        read([full], size, first_head=1),
        read([full], size + 1),
        read([], size),
        read([full], 1, form=ChunkForm.BLOCKS),
        Forget(words_of([full])),
    ]
    for message in [*nothing, *refused, read([full, tail], 20 % size)]:
        reader, _ = connect(InprocHub(), "p", one.hub, "a reader")
        reader.send(read([full], size))
        reader.send(message)
        hosts.run()
        assert isinstance(reader.poll(), BlockData)
        answer = reader.poll()
        if message in refused:
            assert isinstance(answer, Failed)
        else:
            assert isinstance(answer, BlockData)
            assert answer.is_there.tolist() == ([0] if message in nothing else [0, 1])
    assert one.has(20, seed=1)


@pytest.mark.parametrize("is_held", [True, False])
def test_blocks_may_be_named_after_their_reader_has_asked(is_held: bool) -> None:
    """They come over different connections. What is not held is gone."""
    hosts = Hosts()
    one, other = hosts.add("p", KV), hosts.add("d", KV)
    one.fill(3, 20, seed=1)
    other.fetch(1, 20, one.source(20, is_held=is_held), seed=1)
    for _ in range(20):
        one.turn()
        other.turn()
    told = other.news()
    assert [len(done.missing) for done in told] == [] if is_held else [3]
    one.offer(3, 20, seed=1)
    hosts.run()
    told += other.news()
    assert [len(done.missing) for done in told] == ([0] if is_held else [3])
    assert not is_held or other.has(20, seed=1)


def test_blocks_that_are_held_and_missing_are_given_up_after_a_second() -> None:
    hosts, one, other = pair(20)
    one.forget(20, seed=1)
    other.fetch(1, 20, one.source(20, is_held=True), seed=1)
    hosts.run()
    (done,) = other.news()
    assert len(done.missing) == 3 and not done.reason
    assert peer_fetch.NAMED_WITHIN_S <= hosts.now_s < 2 * peer_fetch.NAMED_WITHIN_S
    other.forget(20, seed=1)
    assert other.num_free == NUM_BLOCKS


def test_a_source_that_is_lost_or_silent_ends_the_fetch() -> None:
    hosts, one, other = pair(20)
    for seed in (2, 4, 5):
        one.fill(seed, 20, seed)
        one.offer(seed, 20, seed)
    for job in (1, 2):
        other.fetch(job, 20, one.source(20), seed=job)
    one.turn()
    one.die()
    while other.turn():
        pass
    assert sorted(done.job for done in other.news() if done.reason) == [1, 2]
    other.fetch(4, 20, one.source(20), seed=4)  # over another connection
    hosts.run()
    assert [done.reason for done in other.news()] == [""]
    other.fetch(5, 20, one.source(20), seed=5)
    other.behind.work()
    for wait_s, over in ((REACH_S + 1, []), (TIMEOUT_S - REACH_S, [5])):
        hosts.now_s += wait_s
        other.behind.work()
        assert [done.job for done in other.news()] == over, "it is reached, and hangs"
    assert other.has(20, seed=4)


def test_a_pace_is_kept() -> None:
    hosts, one, other = pair(40)
    pace = 8 * 40 * KV.token_bytes / 10.0  # of all in ten seconds
    for seed in range(8):
        if seed != 1:
            one.fill(9, 40, seed)
            one.offer(9, 40, seed)
        other.fetch(seed, 40, one.source(40), seed=seed, bytes_per_s=pace)
    told = 0
    while told < 8:
        one.turn()
        other.turn()
        told += len(other.news())
        hosts.now_s += 0.05
    assert hosts.now_s >= 8.0 and other.has(40, seed=7)


class Ticking:
    """A clock that advances a little whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-4
        return self.now_s


class RecordedTurns(Throttle):
    """Keeps the seconds of each unit."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._now = clock
        self.units: list[float] = []

    def worked(self, began_s: float, *, gives_way: bool) -> None:
        self.units.append(self._now() - began_s)
        super().worked(began_s, gives_way=gives_way)


def test_what_is_fetched_gives_way_to_what_is_attended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a layer attended again and again, fetching takes its share of the time;
    without, and at a given pace, all of it."""
    spent: dict[str, float] = {}
    units: dict[str, list[float]] = {}
    monkeypatch.setattr(peer_fetch, "_MOST_BLOCKS", 1)
    for way in ("alone", "attending", "paced"):
        (_, one, other), clock = pair(40), Ticking()
        turns = RecordedTurns(clock)
        other.behind._clock = clock
        monkeypatch.setattr(other.behind, "_throttle", turns)
        other.fetch(3, 40, one.source(40), seed=1, bytes_per_s=1e14 * (way == "paced"))
        began_s = clock.now_s
        while not (told := other.news()):
            one.turn()
            if way != "alone":
                other.behind.attended()
            other.turn()
            clock.now_s += 1e-3  # of other work
        assert not told[0].reason and other.has(40, seed=1)
        spent[way] = clock.now_s - began_s
        units[way] = turns.units
    # No rest is due after the last one.
    share = {way: sum(units[way][:-1]) / spent[way] for way in spent}
    assert 0 < share["attending"] <= SHARE < min(share["alone"], share["paced"])
    assert spent["alone"] == pytest.approx(spent["paced"], rel=0.3)
    assert spent["attending"] > 2 * spent["alone"]


@pytest.mark.parametrize("is_attending", [False, True])
def test_chunks_come_one_by_one_beside_what_is_attended(
    monkeypatch: pytest.MonkeyPatch, is_attending: bool
) -> None:
    """A layer that comes meanwhile waits for one chunk at most; else many are under way."""
    monkeypatch.setattr(peer_fetch, "_MOST_BLOCKS", 1)
    hosts, one, other = pair(60)
    other.fetch(3, 60, one.source(60), seed=1)
    owed = set[int]()
    while not (told := other.news()):
        one.turn()
        if is_attending:
            other.behind.attended()
        other.turn()
        owed |= {link.num_owed for link in other.behind._links.values()}
        hosts.now_s += 1e-2
    assert not told[0].reason and other.has(60, seed=1)
    assert max(owed) == (1 if is_attending else 4)


def test_what_was_attended_long_ago_holds_nothing_up() -> None:
    hosts, one, other = pair(40)
    other.behind.attended()
    hosts.now_s += 2 * ATTENDING_S
    other.fetch(3, 40, one.source(40), seed=1)
    assert not other.behind.gives_way
    other.behind.attended()
    assert other.behind.gives_way
    hosts.run()
    assert [done.reason for done in other.news()] == [""] and other.has(40, seed=1)


@pytest.mark.parametrize("most_bytes", [KV.block_bytes // KV.num_layers, 700])
def test_a_block_that_fills_no_chunk_is_cut(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr(peer_fetch, "_MOST_BYTES", most_bytes)
    hosts, one, other = pair(37)
    other.fetch(3, 37, one.source(37), seed=1)
    hosts.run()
    assert [done.reason for done in other.news()] == [""] and other.has(37, seed=1)


class Fetching(RuleBasedStateMachine):
    """Blocks are named, fetched, and forgotten on either side, and lost, in any order, between
    any two messages. Each seed's sequence has one length."""

    seeds = st.integers(1, 6)

    @initialize()
    def begin(self) -> None:
        self.hosts = Hosts()
        self.one = self.hosts.add("p", KV)
        self.other = self.hosts.add("d", KV)
        self.jobs: dict[int, int] = {}  # under way, by seed
        self.there: set[int] = set()
        self.num_jobs = 0

    def num_tokens(self, seed: int) -> int:
        return 7 * seed + 2

    @rule(seed=seeds)
    def name(self, seed: int) -> None:
        num_tokens = self.num_tokens(seed)
        is_named = keys_of(KV, num_tokens, seed)[0] in self.one.books.store.cached
        if not is_named and self.one.num_free > num_tokens // KV.block_size:
            self.one.fill(seed, num_tokens, seed)
            self.one.offer(seed, num_tokens, seed)

    @rule(seed=seeds, is_held=st.booleans())
    def fetch(self, seed: int, is_held: bool) -> None:
        num_tokens = self.num_tokens(seed)
        if seed in self.jobs or seed in self.there:
            return
        if self.other.num_free > num_tokens // KV.block_size:
            self.num_jobs += 1
            self.jobs[seed] = self.num_jobs
            source = self.one.source(num_tokens, is_held=is_held)
            self.other.fetch(self.num_jobs, num_tokens, source, seed=seed)

    @rule(seed=seeds)
    def forget_there(self, seed: int) -> None:
        self.one.forget(self.num_tokens(seed), seed)

    @rule(seed=seeds)
    def forget_here(self, seed: int) -> None:
        if seed in self.there:
            self.there.remove(seed)
            self.other.forget(self.num_tokens(seed), seed)

    @rule(turns=st.integers(1, 5))
    def serve(self, turns: int) -> None:
        for _ in range(turns):
            self.one.turn()

    @rule(turns=st.integers(1, 5))
    def work(self, turns: int) -> None:
        for _ in range(turns):
            self.other.turn()
        self.hear()

    @rule()
    def lose(self) -> None:
        self.one.die()

    def hear(self) -> None:
        for done in self.other.news():
            (seed,) = [x for x, job in self.jobs.items() if job == done.job]
            del self.jobs[seed]
            if len(done.missing):
                self.other.forget(self.num_tokens(seed), seed)
            else:
                self.there.add(seed)
                assert self.other.has(self.num_tokens(seed), seed)

    def teardown(self) -> None:
        if not hasattr(self, "one"):
            return
        self.hosts.run()
        self.hear()
        assert not self.jobs, "each is reported once"
        for seed in self.there:
            assert self.other.has(self.num_tokens(seed), seed), "what came later left it as it was"
            self.other.forget(self.num_tokens(seed), seed)
        for seed in range(1, 7):
            self.one.forget(self.num_tokens(seed), seed)
        assert {self.one.num_free, self.other.num_free} == {NUM_BLOCKS}


TestFetching = Fetching.TestCase
TestFetching.settings = settings(max_examples=examples(60), stateful_step_count=20, deadline=None)
