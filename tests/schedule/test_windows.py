"""Models whose every layer has a sliding window: of kept blocks only those stay
that somebody sees who goes on, and nobody needs any others."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traffic import POLICIES, keeping, turn
from remembering_store import BLOCK_SIZE
from traffic import Harness

from examples import examples
from fastdecode.core.holders import HolderId
from fastdecode.core.sequence import CacheUse, Request, SamplingParams
from fastdecode.core.spec import first_seen
from fastdecode.schedule.cache.blocks import Index
from fastdecode.schedule.life.events import Ask, LaneIdle, Submitted
from fastdecode.wire.blocks import Open

A = HolderId(0)
WINDOWS = (1, 3, 4, 5, 9, 14)
briefly = settings(max_examples=examples(120, share=8), deadline=None)


def windowed(window: int | None, *args: Any, **more: Any) -> Harness:
    return keeping(*args, made={"window": window, "swap_threshold": 0.9}, **more)


def talk(chat: Harness, prompt: Seq[int], past: int | None = 0, length: int = 2) -> tuple[int, ...]:
    """A turn of a conversation, alone; ``past``: tokens that were cached when
    the one before it had ended. None: it is no conversation's."""
    return turn(chat, tuple(prompt), length, CacheUse(turn=past))[0]


def index_of(chat: Harness) -> Index:
    return chat.scheduler.ledger.cache.stock[A]


def ends(chat: Harness) -> list[int]:
    """Of the kept blocks: the tokens up to each."""
    return sorted(block.num_tokens for block in index_of(chat))


@briefly
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 6)), max_size=14),
    st.sampled_from(WINDOWS),
    st.sampled_from(list(POLICIES)),
    st.sampled_from((0, 30)),
    st.sampled_from((0.0, 0.3)),
    st.integers(0, 1 << 32),
)
def test_conversations_that_branch_and_fail_see_what_was_written_for_them(
    turns: list[tuple[int, int, int]],
    window: int,
    policy: str,
    slots: int,
    failing: float,
    seed: int,
) -> None:
    """A conversation goes on from any moment of any other."""
    chance = random.Random(seed)
    chat = windowed(window, (9, 14), lanes=2, policy=policy, slots=slots)
    chat.moves.fail = lambda: chance.random() < failing
    chat.moves.tell = lambda: chance.random() < 0.5
    chat.lifecycle.stepped(BLOCK_SIZE, 1e6)
    histories: list[tuple[int, ...]] = [()]
    running: dict[int, tuple[int, ...]] = {}
    for which, num_new, length in turns:
        past = chance.choice(histories[-3:])
        past = past[: len(past) - chance.choice((0, 0, which * BLOCK_SIZE // 2))]
        prompt = past + tuple(range(num_new))
        name, cache = chat.num_arrived, CacheUse(turn=max(0, len(past) - 1))
        if chat.arrive(0, (length,), length, prompt=prompt, cache=cache):
            running[name] = prompt
        for _ in range(chance.randrange(12)):
            chat.turn(chance.randrange(2))
        for name in [name for name in running if name in chat.finished]:
            histories.append(running.pop(name) + tuple(chat.finished[name]))
    chat.run_out()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("slots", [0, 40])
def test_a_conversation_keeps_what_its_next_turn_sees_and_takes_no_other_room(
    window: int, slots: int
) -> None:
    chat = windowed(window, (40,), slots=slots)
    tokens: tuple[int, ...] = ()
    for number, new in enumerate((17, 3, 9, 1, 6, 12, 2)):
        past = max(0, len(tokens) - 1)
        before = chat.num_resumed_tokens
        seen = first_seen(past, window) // BLOCK_SIZE * BLOCK_SIZE
        tokens = talk(chat, (*tokens, *range(100 * number, 100 * number + new)), past)
        kept = chat.num_resumed_tokens - before
        assert kept == (past - seen if seen < past or not past else kept) and kept <= window + 3
        past, seen = len(tokens) - 1, first_seen(len(tokens) - 1, window)
        wanted = [end for end in range(BLOCK_SIZE, past + 1, BLOCK_SIZE) if end > seen]
        wanted += [past] * (past % BLOCK_SIZE != 0)
        assert set(wanted) <= set(ends(chat)) and len(ends(chat)) <= len(wanted) + 1
        assert chat.stores[0].num_on_disk <= len(wanted) + 1
        copied = sum(block.num_leases > 0 for block in index_of(chat))
        assert copied == max(1, len(wanted)), "the conversation shares what it will see"
    assert chat.stores[0].num_available == 40 - len(ends(chat))


def test_a_sequence_that_starts_with_a_window_reserves_room_for_no_more() -> None:
    chat = windowed(8, (40,))
    tokens = talk(chat, range(33))
    assert chat.arrive(0, (2,), 2, prompt=(*tokens, 70), cache=CacheUse(turn=len(tokens) - 1))
    (resumed,) = [x for x in chat._tell(LaneIdle(0), 0) if isinstance(x, Ask)]
    assert isinstance(resumed.message, Open) and resumed.message.keys is not None
    assert resumed.part.first_token == 24 and resumed.part.end == len(tokens) + 2
    assert resumed.message.num_tokens == 34 - 24 and len(resumed.message.keys) == 3
    chat.run_out()


def test_where_prompts_have_parted_what_both_began_with_stays() -> None:
    """Nobody who goes on from either end sees it."""
    chat = windowed(6, (60,))
    common = tuple(range(12))
    for own in (100, 200, 300):
        talk(chat, (*common, *range(own, own + 20)), None)
    before = chat.num_resumed_tokens
    talk(chat, (*common, *range(400, 420)), None)
    assert chat.num_resumed_tokens - before == 12 - first_seen(12, 6) // BLOCK_SIZE * BLOCK_SIZE
    assert 12 in ends(chat) and 4 not in ends(chat), "but not what isn't seen from there"


def test_what_is_handed_over_is_whole() -> None:
    """Whoever goes on with it fetches all of its tokens."""
    chat = windowed(6, (60,))
    tokens = talk(chat, range(30))
    past = len(tokens) - 1
    params, use = SamplingParams(), CacheUse(turn=past)
    handed = Request("handed", (*tokens, 70), params, 2, seed=0, cache=use, hands_over=True)
    chat.lifecycle.handle(Submitted(handed))
    opened = [x for x in chat.lifecycle.handle(LaneIdle(0)) if isinstance(x, Ask)]
    assert [one.part.first_token for one in opened] == [0]


def test_where_a_layer_sees_all_everything_is_kept() -> None:
    chat = windowed(None, (40,))
    tokens = talk(chat, range(33))
    talk(chat, (*tokens, 70), len(tokens) - 1)
    assert chat.num_resumed_tokens == len(tokens) - 1
    assert ends(chat)[:8] == list(range(4, 36, 4))
