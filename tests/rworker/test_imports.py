"""A prompt's K and V are offered by one R-worker and fetched by another."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    rule,
)
from pulling import TIMEOUT_S, Host, Hosts
from stream_suite import ALL_KV, KV, NUM_BLOCKS
from values import replace

from examples import examples
from fastdecode.core.clock import Clock
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import (
    ChunkForm,
    DescribeExport,
    ExportDescription,
    ExportExpired,
    ExportSequence,
    FetchChunk,
    FetchedChunk,
)
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import PROTOCOL_VERSION, Accepted, Failed, Open
from rworker.stream.transfer_plan import TransferPlan
from rworker.transfers import import_transfer
from rworker.transfers.peer_link import REACH_S
from rworker.transfers.throttle import ATTENDING_S, SHARE, Throttle

Pair: TypeAlias = tuple[int, int]


def ticket() -> str:
    return secrets.token_hex(16)


def read_by(ticket: str, layers: Pair, heads: Pair, tokens: Pair) -> FetchChunk:
    """What a reader asks for; of layers, heads and tokens the first, and how many."""
    first, count = (np.array([number], np.int32) for number in tokens)
    ids = np.zeros(1, np.int64)
    return FetchChunk(ChunkForm.TOKENS, *layers, *heads, ids, first, count, ticket=ticket)


@pytest.mark.parametrize("kv", ALL_KV, ids=lambda kv: kv.dtype.value)
@pytest.mark.parametrize("num_tokens", [1, 16, 37])
def test_what_is_fetched_is_there_bit_for_bit(kv: KVSpec, num_tokens: int) -> None:
    hosts = Hosts()
    one, other = hosts.add("p", kv), hosts.add("d", kv)
    one.fill(3, num_tokens, seed=5)
    one.offer(3, given := ticket())
    other.open(9, num_tokens + 30)
    other.pull(9, num_tokens, one.source(given, num_tokens))
    hosts.run()
    (pulled,) = other.news()
    assert (pulled.sequence_id, pulled.reason) == (9, "")
    assert pulled.num_bytes >= num_tokens * kv.token_bytes
    assert other.holds(9, num_tokens, seed=5)
    assert one.holds(3, num_tokens, seed=5)
    assert other.ask(Open(10, num_tokens + 9, num_tokens, parent_id=9)) == Accepted(10)
    assert other.holds(10, num_tokens, seed=5)


def test_a_source_of_which_anything_is_raised_ends_that_pull_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What another instance has said of its prompt is no reason to lose an R-worker."""
    hosts = Hosts()
    one, other = hosts.add("p", KV), hosts.add("d", KV)
    one.fill(3, 9, seed=5)
    one.offer(3, given := ticket())
    open_to = hosts.open

    def open_unless_odd(address: str) -> Any:
        if address == "odd":
            raise ValueError("no such address family")
        return open_to(address)

    monkeypatch.setattr(hosts, "open", open_unless_odd)
    for sequence in (8, 9):
        other.open(sequence, 30)
    for sequence, address in ((8, "odd"), (9, "p")):
        other.pull(sequence, 9, replace(one.source(given, 9), address=address))
    hosts.run()
    reasons = {pulled.sequence_id: pulled.reason for pulled in other.news()}
    assert reasons == {8: "ValueError: no such address family", 9: ""}
    assert other.holds(9, 9, seed=5)


HALVES = replace(KV, num_kv_heads=2)


def halves(hosts: Hosts, name: str) -> list[Host]:
    return [hosts.add(f"{name}{first}", HALVES, first) for first in (0, 2)]


def whole(hosts: Hosts, name: str) -> list[Host]:
    return [hosts.add(name, KV)]


def one_more_head(hosts: Hosts, name: str) -> list[Host]:
    three, one = replace(KV, num_kv_heads=3), replace(KV, num_kv_heads=1)
    return [hosts.add(f"{name}0", three, 0), hosts.add(f"{name}3", one, 3)]


def other_blocks(hosts: Hosts, name: str) -> list[Host]:
    return [hosts.add(name, replace(KV, block_size=5))]


FLEETS = [whole, halves, one_more_head, other_blocks]


@pytest.mark.parametrize("there", FLEETS)
@pytest.mark.parametrize("here", FLEETS)
def test_heads_may_be_shared_out_otherwise(
    there: Callable[[Hosts, str], list[Host]], here: Callable[[Hosts, str], list[Host]]
) -> None:
    hosts = Hosts()
    sources, targets = there(hosts, "p"), here(hosts, "d")
    given = ticket()
    for source in sources:
        source.fill(1, 29, seed=2)
        source.offer(1, given)
    for target in targets:
        target.open(4, 40)
        target.pull(4, 29, *[source.source(given, 29) for source in sources])
    hosts.run()
    for target in targets:
        assert [pulled.reason for pulled in target.news()] == [""]
        assert target.holds(4, 29, seed=2)


def test_parts_of_sequences_may_be_others() -> None:
    hosts = Hosts()
    sources = [hosts.add(f"p{i}", KV) for i in range(3)]
    targets = [hosts.add(f"d{i}", KV) for i in range(2)]
    tickets = [ticket() for _ in sources]
    for source, given, first, count in zip(sources, tickets, (0, 8, 24), (8, 16, 7), strict=True):
        source.fill(1, count, seed=2, first_token=first)
        source.offer(1, given)
    offered = [
        source.source(given, count, first)
        for source, given, first, count in zip(
            sources, tickets, (0, 8, 24), (8, 16, 7), strict=True
        )
    ]
    for target, first, count in zip(targets, (0, 20), (20, 11), strict=True):
        target.open(4, 40)
        target.pull(4, count, *offered, first_token=first)
    hosts.run()
    for target, first, count in zip(targets, (0, 20), (20, 11), strict=True):
        assert [pulled.reason for pulled in target.news()] == [""]
        assert target.holds(4, count, seed=2, first_token=first)


def test_a_ticket_that_was_released_or_never_given_is_refused() -> None:
    hosts = Hosts()
    one, other = hosts.add("p", KV), hosts.add("d", KV)
    one.fill(3, 20, seed=1)
    one.offer(3, given := ticket())
    reader, _ = connect(InprocHub(), "p", one.hub, "a reader")
    asked = read_by(given, (0, KV.num_layers), (0, KV.num_kv_heads), (0, 20))
    reader.send(DescribeExport(PROTOCOL_VERSION, given))
    reader.send(asked)
    hosts.run()
    assert reader.poll() == ExportDescription("a model", KV, 20)
    assert isinstance(reader.poll(), FetchedChunk)
    one.close(3)
    one.fill(4, 20, seed=7)  # in the same blocks
    for message in (asked, replace(asked, ticket=ticket())):
        reader.send(message)
        hosts.run()
        assert isinstance(reader.poll(), ExportExpired)
    other.open(1, 20)
    other.pull(1, 20, one.source(given, 20))
    hosts.run()
    (pulled,) = other.news()
    assert "released" in pulled.reason and not pulled.num_bytes
    reader.send(ExportSequence(4, ticket()))
    hosts.run()
    refused = reader.poll()
    assert isinstance(refused, Failed) and "a reader may not say that" in refused.message


def test_an_offer_may_come_behind_whoever_fetches_it() -> None:
    """They come over different connections."""
    hosts = Hosts()
    one, other = hosts.add("p", KV), hosts.add("d", KV)
    one.fill(3, 20, seed=1)
    other.open(1, 20)
    other.pull(1, 20, one.source(given := ticket(), 20))
    for _ in range(20):
        one.turn()
        other.turn()
    assert not other.news()
    one.offer(3, given)
    hosts.run()
    assert [pulled.reason for pulled in other.news()] == [""] and other.holds(1, 20, seed=1)


def test_nobody_reads_beyond_what_was_offered() -> None:
    hosts = Hosts()
    one = hosts.add("p", KV)
    one.fill(3, 20, seed=1)
    one.offer(3, given := ticket())
    beyond = [
        ((0, 4), (0, 4), (0, 20)),
        ((0, 3), (3, 2), (0, 20)),
        ((0, 3), (0, 4), (10, 11)),
        ((2, 1), (0, 4), (20, 1)),
    ]
    for layers, heads, tokens in beyond:
        reader, _ = connect(InprocHub(), "p", one.hub, "a reader")
        reader.send(read_by(given, layers, heads, tokens))
        hosts.run()
        assert isinstance(reader.poll(), Failed)
    assert one.holds(3, 20, seed=1)


def test_a_source_that_is_lost_or_silent_ends_the_pull() -> None:
    hosts = Hosts()
    one, other = hosts.add("p", KV), hosts.add("d", KV)
    one.fill(3, 20, seed=1)
    one.offer(3, given := ticket())
    for sequence in (1, 2):
        other.open(sequence, 20)
        other.pull(sequence, 20, one.source(given, 20))
    one.turn()
    one.die()
    while other.turn():
        pass
    assert sorted(pulled.sequence_id for pulled in other.news() if pulled.reason) == [1, 2]
    other.open(4, 20)
    other.pull(4, 20, one.source(given, 20))  # over another connection
    hosts.run()
    assert [pulled.reason for pulled in other.news()] == [""]
    other.open(5, 20)
    other.pull(5, 20, one.source(given, 20))
    for wait_s, over in ((REACH_S + 1, []), (TIMEOUT_S - REACH_S, [5])):
        hosts.now_s += wait_s
        other.behind.work()
        assert [pulled.sequence_id for pulled in other.news()] == over, "it is reached, and hangs"
    assert other.holds(4, 20, seed=1)


def test_a_pace_is_kept() -> None:
    hosts = Hosts()
    one, other = hosts.add("p", KV), hosts.add("d", KV)
    one.fill(3, 40, seed=1)
    one.offer(3, given := ticket())
    pace = 8 * 40 * KV.token_bytes / 10.0  # of all in ten seconds
    for sequence in range(8):
        other.open(sequence, 40)
        other.pull(sequence, 40, one.source(given, 40), bytes_per_s=pace)
    told = 0
    while told < 8:
        one.turn()
        other.turn()
        told += len(other.news())
        hosts.now_s += 0.05
    assert hosts.now_s >= 8.0 and other.holds(7, 40, seed=1)


class Ticking:
    """A clock that goes on by itself a little whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-4
        return self.now_s


class RecordedTurns(Throttle):
    """Keeps how long each unit took."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._now = clock
        self.units: list[float] = []

    def worked(self, began_s: float, *, gives_way: bool) -> None:
        self.units.append(self._now() - began_s)
        super().worked(began_s, gives_way=gives_way)


def test_what_is_fetched_gives_way_to_what_is_attended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a layer attended again and again, fetching takes its share of the time;
    without, and at a pace that somebody gave, all that it likes."""
    spent: dict[str, float] = {}
    units: dict[str, list[float]] = {}
    for way in ("alone", "attending", "paced"):
        hosts, clock = Hosts(), Ticking()
        one, other = hosts.add("p", KV), hosts.add("d", KV)
        turns = RecordedTurns(clock)
        other.behind._clock = clock
        monkeypatch.setattr(other.behind, "_throttle", turns)
        one.fill(3, 40, seed=1)
        one.offer(3, given := ticket())
        other.open(3, 40)
        other.pull(3, 40, one.source(given, 40), bytes_per_s=1e14 * (way == "paced"))
        began_s = clock.now_s
        while not (told := other.news()):
            one.turn()
            if way != "alone":
                other.behind.attended()
            other.turn()
            clock.now_s += 1e-3  # of whatever else
        assert not told[0].reason and other.holds(3, 40, seed=1)
        spent[way] = clock.now_s - began_s
        units[way] = turns.units
    # Nothing is to rest for behind the last one.
    share = {way: sum(units[way][:-1]) / spent[way] for way in spent}
    assert 0 < share["attending"] <= SHARE < min(share["alone"], share["paced"])
    assert spent["alone"] == pytest.approx(spent["paced"], rel=0.3)
    assert spent["attending"] > 2 * spent["alone"]


@pytest.mark.parametrize("is_attending", [False, True])
def test_chunks_come_one_by_one_beside_what_is_attended(
    monkeypatch: pytest.MonkeyPatch, is_attending: bool
) -> None:
    """A layer that comes meanwhile waits for one chunk at most; else many are under way."""
    small = partial(TransferPlan, most_bytes=KV.token_bytes)
    monkeypatch.setattr(import_transfer, "TransferPlan", small)
    hosts = Hosts()
    one, other = hosts.add("p", KV), hosts.add("d", KV)
    one.fill(3, 40, seed=1)
    one.offer(3, given := ticket())
    other.open(3, 40)
    other.pull(3, 40, one.source(given, 40))
    owed = set[int]()
    while not (told := other.news()):
        one.turn()
        if is_attending:
            other.behind.attended()
        other.turn()
        owed |= {link.num_owed for link in other.behind._links.values()}
        hosts.now_s += 1e-2
    assert not told[0].reason and other.holds(3, 40, seed=1)
    assert max(owed) == (1 if is_attending else 4)


def test_what_was_attended_long_ago_holds_nothing_up() -> None:
    hosts = Hosts()
    one, other = hosts.add("p", KV), hosts.add("d", KV)
    one.fill(3, 40, seed=1)
    one.offer(3, given := ticket())
    other.behind.attended()
    hosts.now_s += 2 * ATTENDING_S
    other.open(3, 40)
    other.pull(3, 40, one.source(given, 40))
    assert not other.behind.gives_way
    other.behind.attended()
    assert other.behind.gives_way
    hosts.run()
    assert [pulled.reason for pulled in other.news()] == [""] and other.holds(3, 40, seed=1)


class Handing(RuleBasedStateMachine):
    """Sequences are offered, fetched, closed on either side, and lost, in any
    order, between any two messages."""

    offered = Bundle("offered")
    fetched = Bundle("fetched")

    @initialize()
    def begin(self) -> None:
        self.hosts = Hosts()
        self.one = self.hosts.add("p", KV)
        self.other = self.hosts.add("d", KV)
        self.numbers = iter(range(1, 1 << 20))
        self.open_here: dict[int, tuple[int, int]] = {}
        self.open_there: dict[int, tuple[int, int]] = {}
        self.done: set[int] = set()
        self.num_pulls = self.num_told = 0
        self.is_dead = False

    @rule(target=offered, num_tokens=st.integers(1, 40))
    def offer(self, num_tokens: int) -> tuple[int, str, int]:
        sequence, given = next(self.numbers), ticket()
        if self.one.num_free < -(-num_tokens // KV.block_size):
            return 0, given, num_tokens
        self.one.fill(sequence, num_tokens, seed=sequence)
        self.one.offer(sequence, given)
        self.open_here[sequence] = sequence, num_tokens
        return sequence, given, num_tokens

    @rule(target=fetched, one=offered, share=st.floats(0.1, 1))
    def fetch(self, one: tuple[int, str, int], share: float) -> int:
        source, given, num_tokens = one
        sequence, wanted = next(self.numbers), max(1, int(share * num_tokens))
        if self.other.num_free < -(-(num_tokens + 9) // KV.block_size):
            return 0
        self.other.open(sequence, num_tokens + 9)
        self.other.pull(sequence, wanted, self.one.source(given, num_tokens))
        self.open_there[sequence] = source, wanted
        self.num_pulls += 1
        return sequence

    @rule(one=consumes(offered))
    def release(self, one: tuple[int, str, int]) -> None:
        if self.open_here.pop(one[0], None):
            self.one.close(one[0])

    @rule(sequence=consumes(fetched))
    def cancel(self, sequence: int) -> None:
        if self.open_there.pop(sequence, None):
            self.other.close(sequence)
            self.done.discard(sequence)

    @rule(turns=st.integers(1, 5))
    def serve(self, turns: int) -> None:
        for _ in range(turns):
            self.one.turn()

    @rule(turns=st.integers(1, 5))
    def work(self, turns: int) -> None:
        for _ in range(turns):
            self.other.turn()
        self._hear()

    @rule()
    def lose(self) -> None:
        self.one.die()

    def _hear(self) -> None:
        for pulled in self.other.news():
            self.num_told += 1
            if not pulled.reason and pulled.sequence_id in self.open_there:
                self.done.add(pulled.sequence_id)
                self._check({pulled.sequence_id})

    def _check(self, sequences: set[int]) -> None:
        for sequence in sequences:
            source, num_tokens = self.open_there[sequence]
            assert self.other.holds(sequence, num_tokens, seed=source)

    def teardown(self) -> None:
        if not hasattr(self, "one"):
            return
        self.hosts.run()
        self._hear()
        self._check(self.done)  # what came later left it as it was
        assert self.num_told == self.num_pulls, "each is told of once"
        for sequence, (seed, num_tokens) in self.open_here.items():
            assert self.one.holds(sequence, num_tokens, seed=seed)
            self.one.close(sequence)
        for sequence in self.open_there:
            self.other.close(sequence)
        self.hosts.run()
        for host in (self.one, self.other):
            assert host.num_free == NUM_BLOCKS and not len(host.books.offers)
            assert not len(host.books.arrivals)


TestHanding = Handing.TestCase
TestHanding.settings = settings(max_examples=examples(60), stateful_step_count=20, deadline=None)
