"""Lower tiers of kept blocks, put to work: on R-workers' real KV stores, with a
memory and a disk that remember what each slot was written for."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from lifecycles import lifecycle
from random_traffic import POLICIES, keeping
from remembering_store import BLOCK_SIZE
from traffic import Harness

from fastdecode.core.holders import HolderId, SequenceId
from fastdecode.core.sequence import CacheUse, Request, SamplingParams, Sequence
from fastdecode.schedule.cache.rates import Rates
from fastdecode.schedule.life.endings import Endings
from fastdecode.schedule.life.handing import Handing
from fastdecode.schedule.life.sequences import SequenceState
from fastdecode.schedule.life.starting import Pace, Starting
from fastdecode.schedule.plan import Chunk
from fastdecode.wire.blocks import Progress

EARLY = {"swap_threshold": 0.5}


def turns(busy: Harness, num_rounds: int, num_conversations: int = 4) -> None:
    """Conversations go on in turns, each with prompts of its own."""
    histories: list[tuple[int, ...]] = [()] * num_conversations
    for number in range(num_rounds):
        for i, history in enumerate(histories):
            new = tuple(1000 * i + 10 * number + j for j in range(6))
            use = CacheUse(turn=max(0, len(history) - 1))
            first = busy.num_arrived
            assert busy.arrive(0, (3,), 3, prompt=history + new, cache=use)
            busy.run_out()
            histories[i] = history + new + tuple(busy.finished[first])


def test_sequences_that_join_early_start_again_without_the_blocks_that_fail() -> None:
    """Whatever is in a block that fails after that, nothing that was attended
    with it is believed."""
    chance = random.Random(3)
    busy = keeping((10,), slots=40, made=EARLY)
    busy.lifecycle.stepped(BLOCK_SIZE, 1e6)
    busy.moves.tell = lambda: chance.random() < 0.7
    busy.moves.fail = lambda: chance.random() < 0.25
    turns(busy, 4, 6)
    counts = busy.lifecycle.scheduler.ledger.cache.stock.counts
    assert counts.num_joined > 4 and counts.num_failed > 0 and counts.num_fetched > 0
    assert busy.num_stepped_early > 4 and busy.num_disbelieved > 0


def test_a_fetch_that_is_slower_than_the_step_is_waited_for() -> None:
    busy = keeping((10,), slots=40, made=EARLY)
    busy.lifecycle.stepped(BLOCK_SIZE, 1e-6)
    told = itertools.cycle((True, False))
    busy.moves.tell = lambda: next(told)
    turns(busy, 3)
    counts = busy.lifecycle.scheduler.ledger.cache.stock.counts
    assert counts.num_fetched > 0 and not counts.num_joined and not busy.num_stepped_early


@pytest.mark.parametrize("policy", POLICIES)
def test_conversations_find_on_disk_what_memory_has_no_room_for(policy: str) -> None:
    busy = keeping((10,), policy=policy, slots=40, made=EARLY)
    turns(busy, 3)
    counts = busy.lifecycle.scheduler.ledger.cache.stock.counts
    assert busy.moves.num_fetched > 0 and counts.num_fetched == busy.moves.num_fetched
    assert counts.num_failed == 0 and busy.num_resumed_tokens > 20


def test_a_full_disk_drops_and_keeps_its_quota() -> None:
    busy = keeping((10,), slots=5, made=EARLY)
    turns(busy, 3)
    counts = busy.lifecycle.scheduler.ledger.cache.stock.counts
    assert counts.num_dropped > 0 and busy.stores[0].num_on_disk <= 5


def test_nothing_goes_down_that_nobody_has_hit() -> None:
    busy = keeping((10,), slots=40, made={"swap_threshold": 1.0})
    for number in range(6):
        busy.arrive(0, (2,), 2, prompt=tuple(range(100 * number, 100 * number + 9)))
        busy.run_out()
    assert busy.lifecycle.scheduler.ledger.cache.stock.counts.num_stored == 0


@pytest.mark.parametrize("fails", [False, True])
def test_copying_ends_once_all_are_copied_or_none_can_be(fails: bool) -> None:
    busy = keeping((100,), slots=100, made={"swap_threshold": 1.0})
    busy.moves.fail = lambda: fails
    turns(busy, 1)
    stock = busy.lifecycle.scheduler.ledger.cache.stock
    assert stock.is_copying or fails
    for _ in range(20):
        if stock.is_copying:
            busy.turn(0)
    assert not stock.is_copying and (stock.counts.num_stored > 0) is not fails


def test_when_a_fetch_comes_in_time() -> None:
    """Of six groups of layers, while a step takes a second."""
    sixth = 1 / 6

    def comes(num_groups: int, fetch_s: float) -> bool:
        share = num_groups * sixth
        return Pace(share, sixth, share * fetch_s).comes_in_time(1.0)

    assert comes(1, 0.99), "both take as long: the first group is ahead"
    assert not comes(1, 1.01), "the second is attended before it is there"
    assert comes(2, 1.2) and not comes(2, 1.3), "the last is"
    assert [n for n in range(1, 6) if comes(n, 3.0)] == [5]
    assert not any(comes(n, 6.0) for n in range(1, 6))


def test_a_step_that_begins_later_has_more_of_what_is_fetched() -> None:
    """Of six groups of layers that take 1.5 s, while a step takes a second."""
    one = Pace(1 / 6, 1 / 6, 0.25)
    assert not one.comes_in_time(1.0), "the last would be late"
    assert [s for s in (0.2, 0.4, 0.45, 1.2, 2.0) if one.comes_in_time(1.0, s)] == [0.45, 1.2, 2.0]
    slow = Pace(1 / 6, 1 / 6, 5.0)
    assert not slow.comes_in_time(1.0, 20.0), "four groups later five seconds are left"
    assert slow.comes_in_time(1.0, 25.0), "by then all are there"
    last = Pace(5 / 6, 1 / 6, 0.25)
    assert not Pace(1 / 6, 1 / 6, 0.3).comes_in_time(0.4, 0.3) and last.comes_in_time(0.4, 0.0)


class Fetched:
    """A sequence of lane 0 that waits for a fetch, of which a sixth is there after
    0.25 s. It has 40 new tokens, which take a second; steps of others alone take
    0.6 s beside a fetch, and 0.2 s else."""

    def __init__(self) -> None:
        self.now_s = 100.0
        rates = Rates(64)
        rates.stepped(40, 1.0)
        rates.stepped(0, 0.2)
        rates.stepped_beside(0, 0.6)
        scheduler = lifecycle().scheduler
        stock: Any = scheduler.ledger.cache.stock
        stock.now_s, stock.rates, stock.jobs = lambda: self.now_s, rates, {7: None}
        stock[HolderId(0)].num_slots = 1
        endings = Endings(scheduler)
        self.starting = Starting(endings, Handing(endings))
        self._life: Any = SimpleNamespace(state=SequenceState.FETCHING, pending=None, lane=0)

    def begin(self) -> None:
        start: Any = SimpleNamespace(awaits=(7,), num_first_tokens=40)
        self.starting.wait(self._life, start)

    def begin_step(self, lane: int, num_in_prompt: int) -> None:
        request = Request("a", tuple(range(num_in_prompt)), SamplingParams(), 1, seed=0)
        chunk = Chunk(Sequence.of(SequenceId(0), request, 0), max(1, num_in_prompt))
        self.starting.begin_step(lane, (chunk,))

    def joins(self) -> bool:
        return bool(self.starting.joining(Progress(0, 7, 1, 6, 0.25)))


@pytest.mark.parametrize(
    ("lane", "num_in_prompt", "passed_s", "joins"),
    [
        (None, 0, 0.0, False),
        (0, 0, 0.1, True),
        (0, 0, 0.3, False),
        (0, 40, 0.3, True),
        (1, 0, 0.1, False),  # its own lane has nothing else to do
    ],
)
@pytest.mark.parametrize("is_before", [False, True])
def test_who_asks_to_join_foresees_when_the_next_step_begins(
    lane: int | None, num_in_prompt: int, passed_s: float, joins: bool, is_before: bool
) -> None:
    """A step that begins now would wait; not one that begins in half a second.
    A step may have begun before anything was fetched."""
    fetched = Fetched()
    if not is_before:
        fetched.begin()
    if lane is not None:
        fetched.begin_step(lane, num_in_prompt)
    if is_before:
        fetched.begin()
    fetched.now_s += passed_s
    assert fetched.joins() == joins


def test_fetching_has_to_pay() -> None:
    """By what both took lately; now and then it is tried again."""
    rates, holder = Rates(block_size=64), HolderId(0)
    assert rates.pays(holder), "nobody knows yet"
    rates.stepped(640, 0.64)  # 1 ms a token
    rates.fetched(holder, 4, 4 * 0.063)
    assert rates.pays(holder)
    for _ in range(20):
        rates.fetched(holder, 4, 4 * 0.2)
    told = [rates.pays(holder) for _ in range(128)]
    assert sum(told) == 2 and rates.pays(HolderId(1))


def test_a_step_of_few_tokens_takes_what_such_took() -> None:
    """And not a share of what a long prompt did: weights and contexts are read
    for few tokens, too."""
    rates = Rates(block_size=64)
    assert rates.step_s(40) is None
    rates.stepped(0, 0.005)
    rates.stepped(2048, 0.517)  # 250 us a token
    assert rates.step_s(40) == pytest.approx(0.005 + 40 * 250e-6), "nothing else is known"
    rates.stepped(40, 0.05)
    assert rates.step_s(40) == pytest.approx(0.05)
    assert rates.step_s(60) == pytest.approx(0.05 + 20 * 250e-6)
    assert rates.step_s(100) == pytest.approx(0.005 + 100 * 250e-6)
    for _ in range(40):
        rates.stepped(48, 0.02)
    assert rates.step_s(48) == pytest.approx(0.02, rel=0.01), "lately"
    few = Rates(block_size=64)
    few.stepped(40, 0.05)
    assert few.step_s(40) == 0.05 and few.step_s(1) is None, "no long prompt has run"
