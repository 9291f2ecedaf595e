"""Kept blocks behind missing ones: what is between is run again, first."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traffic import POLICIES, keeping, turn
from remembering_store import BLOCK_SIZE
from traffic import Harness

from examples import examples
from fastdecode.core.holders import HolderId
from fastdecode.core.sequence import CacheUse
from fastdecode.schedule.cache.blocks import Index
from fastdecode.schedule.cache.retention import Columns, Policy, Values
from fastdecode.schedule.cache.reuse import reuses
from fastdecode.schedule.cache.stock import Stock

A = HolderId(0)


@dataclass(frozen=True)
class Anything:
    """Any block may go, in an order that nobody could guess."""

    seed: int

    def cost_of(self, num_tokens: int) -> float:
        return 1.0

    def values(self, blocks: Columns, now_s: float) -> Values:
        pairs = zip(blocks.last_use.tolist(), blocks.num_tokens.tolist(), strict=True)
        return np.array([hash((self.seed, *pair)) % 1009 for pair in pairs], np.float64)


def talk(chat: Harness, prompt: Seq[int], past: int = 0, length: int = 2) -> tuple[int, ...]:
    """A turn of a conversation, alone; ``past``: tokens that were cached when
    the one before it had ended."""
    return turn(chat, tuple(prompt), length, CacheUse(turn=past))[0]


def drop(chat: Harness, *places: int) -> None:
    """Give up blocks of the only conversation, by where they are in it."""
    index = chat.scheduler.ledger.cache.stock[A]
    wanted = {(place + 1) * BLOCK_SIZE for place in places}
    for block in [block for block in index if block.num_tokens in wanted]:
        index.forget([block])
        chat.stores[0].forget((block.key,))


def test_what_is_missing_runs_together_with_what_is_new() -> None:
    chat = keeping((40,), policy=Anything(0))
    tokens = talk(chat, range(17))
    past = len(tokens) - 1  # 18: four blocks, and a tail of two
    drop(chat, 1, 2)
    assert chat.arrive(0, (2,), 2, prompt=(*tokens, 70, 71), cache=CacheUse(turn=past))
    run = chat.begin(0)
    assert run is not None
    pieces = [(c.first, c.num_tokens, c.is_behind_gap) for c in run.chunks]
    assert pieces == [(4, 5, False)], "a chunk's five tokens"
    chat.complete(0)
    run = chat.begin(0)
    assert run is not None
    assert [(c.first, c.num_tokens, c.is_behind_gap) for c in run.chunks] == [
        (9, 3, False),
        (18, 2, True),
    ]
    chat.complete(0)
    chat.run_out()
    assert chat.num_gaps == 1 and chat.num_resumed_tokens == 4 + 6


def test_a_gap_is_kept_once_it_is_filled_and_the_next_turn_has_none() -> None:
    chat = keeping((40,), policy=Anything(0))
    tokens = talk(chat, range(17))
    drop(chat, 0, 2)
    tokens = talk(chat, (*tokens, 70), past=len(tokens) - 1)
    assert chat.num_gaps == 1
    before = chat.num_resumed_tokens
    talk(chat, (*tokens, 80), past=len(tokens) - 1)
    assert (chat.num_gaps, chat.num_resumed_tokens - before) == (1, len(tokens) - 1)
    leases = {block.num_leases for block in chat.scheduler.ledger.cache.stock[A]}
    assert leases == {1}, "blocks that came back are shared by whom they were shared before"


@given(
    st.data(),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(1, 6)), max_size=16),
    st.integers(1, 2),
    st.integers(0, 99).map(Anything) | st.sampled_from(list(POLICIES)),
    st.sampled_from((None, 8)),
    st.booleans(),
)
@settings(max_examples=examples(600, share=8))
def test_nobody_reads_what_was_not_written_for_it_whatever_is_given_up(
    data: st.DataObject,
    turns: list[tuple[int, int, int]],
    num_lanes: int,
    policy: str | Policy,
    split: int | None,
    lose: bool,
) -> None:
    """Conversations that begin alike, branch, and are cancelled; not all have room, and
    some policies make holes anywhere. Counts are compared after every event."""
    chat = keeping((9, 20, 30), lanes=num_lanes, policy=policy, split_tokens=split)
    histories: dict[int, tuple[int, ...]] = dict.fromkeys(range(4), ())
    running: dict[int, tuple[int, tuple[int, ...]]] = {}
    for who, num_new, length in turns:
        if who not in running:
            past = histories[who]
            if past and data.draw(st.integers(0, 5)) == 0:
                past = past[: data.draw(st.integers(0, len(past)))]  # a branch
            prompt = past + tuple(range(num_new))
            name = chat.num_arrived
            salt = data.draw(st.sampled_from(("", "", "s")))
            cache = CacheUse(turn=max(0, len(past) - 1), salt=salt)
            if chat.arrive(0, (length,), length, prompt=prompt, cache=cache):
                running[who] = name, prompt
        for lane in data.draw(st.lists(st.integers(0, num_lanes - 1), max_size=9)):
            chat.turn(lane)
        if chat.live and data.draw(st.integers(0, 5)) == 0:
            chat.cancel(data.draw(st.sampled_from(list(chat.live.values()))))
        if lose and not chat.lost and data.draw(st.integers(0, 7)) == 0:
            chat.lose(0)
        if data.draw(st.booleans(), "rests"):
            chat.run_out()
        stock = chat.scheduler.ledger.cache.stock
        for holder in chat.scheduler.ledger.holders.open:
            count = data.draw(st.integers(0, 3), "given up")
            stock.evict(holder, min(count, len(stock[holder].idle)))
        for whose, (name, prompt) in list(running.items()):
            if name in chat.finished:
                histories[whose] = prompt + tuple(chat.finished[name])
            if name in chat.finished or name not in chat.live:
                del running[whose]
    chat.run_out()


@given(st.data(), st.integers(0, 99), st.integers(1, 2))
@settings(max_examples=examples(150))
def test_siblings_fork_nobody_with_a_gap(data: st.DataObject, seed: int, num_lanes: int) -> None:
    chat = keeping((16,), lanes=num_lanes, policy=Anything(seed))
    prompt = tuple(range(data.draw(st.integers(9, 20))))
    for _ in range(3):
        n = data.draw(st.integers(1, 3))
        if chat.arrive(0, (3,) * n, 3, prompt=prompt):
            chat.run_out()
        index = chat.scheduler.ledger.cache.stock[A]
        count = data.draw(st.integers(0, len(index.idle)))
        chat.scheduler.ledger.cache.stock.evict(A, count)


@given(st.data(), st.integers(0, 99), st.floats(0.1, 0.5))
@settings(max_examples=examples(150))
def test_who_is_suspended_goes_on_with_what_was_kept_of_it(
    data: st.DataObject, seed: int, quantile: float
) -> None:
    chat = keeping((9,), policy=Anything(seed), length_quantile=quantile)
    for _ in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.integers(1, 12))
        chat.arrive(data.draw(st.integers(1, 16)), (length,), 12)
        for _ in range(data.draw(st.integers(0, 9))):
            chat.turn(0)
    chat.run_out()


def stock_of(there: str, window: int | None = None) -> tuple[Stock, list[bytes]]:
    """A holder that keeps those of a chain's blocks that are marked."""
    stock = Stock(1, BLOCK_SIZE, Anything(0), lambda: 1.0, window=window)
    keys = [bytes([number]) * 16 for number in range(len(there))]
    for number, mark in enumerate(there):
        if mark == "x":
            before = keys[number - 1] if number else None
            stock[A].name(keys[number], before, (number + 1) * BLOCK_SIZE)
    return stock, keys


@pytest.mark.parametrize(
    ("there", "most_tokens", "window", "spared", "first", "gap"),
    [
        ("xxxx", 99, None, 16, 0, range(0)),
        ("x..x", 99, None, 8, 0, range(4, 12)),
        ("...x", 99, None, 4, 0, range(12)),
        ("x.x.xx", 99, None, 12, 0, range(4, 16)),  # one gap: what is kept within is run again
        ("x.xx.x", 99, None, 12, 0, range(4, 8)),
        ("xx..", 99, None, 8, 0, range(0)),
        ("x..x", 15, None, 7, 0, range(4, 12)),  # the last token runs in any case
        ("....", 99, None, None, 0, range(0)),
        # A beginning is as good as the nine tokens that are seen of it.
        ("xxxx", 99, 9, 16, 8, range(0)),
        ("..xx", 99, 9, 16, 8, range(0)),
        (".xxx", 15, 9, 15, 4, range(0)),  # the last token runs: it sees one more block
        ("..xx", 15, 9, 3 + 4, 0, range(8)),  # which isn't there
        ("...x", 99, 9, 4, 0, range(12)),
        ("..xx..", 99, 9, 16, 8, range(0)),
        ("..xx.x", 99, 9, 20, 8, range(16, 20)),  # the gap sees what is before it
        ("...x.x", 99, 9, 4, 0, range(12)),  # as here it doesn't: all is run again
        ("x.xx.xxx", 99, 9, 32, 24, range(0)),
        ("x.x...x", 99, 9, 8, 0, range(4, 8)),
    ],
)
def test_of_all_that_is_kept_a_beginning_and_one_stretch_are_reused(
    there: str, most_tokens: int, window: int | None, spared: int | None, first: int, gap: range
) -> None:
    stock, keys = stock_of(there, window)
    found = reuses(stock, keys, (99,), most_tokens)
    expected = [] if spared is None else [(spared, first, gap)]
    assert [(one.num_tokens, one.first_token, one.gap) for one in found] == expected
    for one in found:
        num_blocks = len(there[first // BLOCK_SIZE : one.num_blocks])
        assert len(one.keys[0]) == num_blocks - len(gap) // BLOCK_SIZE


def test_split_sequences_start_with_contiguous_blocks_only() -> None:
    stock, keys = stock_of("x.xx")
    (found,) = reuses(stock, keys, (8, 8), 99)
    assert (found.num_tokens, found.gap) == (4, range(0))


def test_a_turns_end_is_reused_with_what_is_before_it() -> None:
    stock, keys = stock_of("xx.x.xx")
    (found,) = reuses(stock, keys, (99,), 26, with_tail=True)
    assert found.has_tail and found.gap == range(8, 20) and found.num_tokens == 26 - 12
    stock, keys = stock_of("xx.xxx.")
    assert not reuses(stock, keys, (99,), 26, with_tail=True)


def test_who_lacks_what_somebody_is_computing_waits_for_it() -> None:
    """Two that begin alike: the gap is run once."""
    chat = keeping((60,), policy=Anything(0))
    tokens = talk(chat, range(17), length=1)
    drop(chat, 1, 2)
    before = chat.num_resumed_tokens
    for own in (50, 60):
        assert chat.arrive(0, (3,), 3, prompt=(*tokens[:16], own, own, own))
    chat.run_out()
    assert chat.num_gaps == 1 and chat.num_resumed_tokens - before == 8 + 16


def test_blocks_of_a_policys_choice_go_though_others_are_behind_them() -> None:
    index = Index(Anything(3))
    keys = [bytes([number]) * 16 for number in range(9)]
    for number, key in enumerate(keys):
        index.name(key, keys[number - 1] if number else None, (number + 1) * BLOCK_SIZE)
    index.release(keys, 1.0)
    gone = index.evict(4, 2.0)
    left = [key for key in keys if key not in gone]
    assert len(gone) == 4 and gone != keys[:4:-1] and all(key in index for key in left)
    ends = Index(Anything(3), only_ends=True)
    for number, key in enumerate(keys):
        ends.name(key, keys[number - 1] if number else None, (number + 1) * BLOCK_SIZE)
    ends.release(keys, 1.0)
    assert ends.evict(4, 2.0) == keys[:4:-1]
