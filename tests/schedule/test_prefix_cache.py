"""The prefix cache, put to work: on R-workers' real KV stores, with a memory
that remembers what each slot was written for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traffic import POLICIES, Requests, keeping, play, traffic, turn
from remembering_store import BLOCK_SIZE

from examples import examples
from fastdecode.core.errors import RequestError
from fastdecode.core.holders import HolderId, SequenceId
from fastdecode.core.model.block_keys import block_keys, root_key
from fastdecode.core.sequence import COMING, CacheUse, Request, SamplingParams, Sequence
from fastdecode.schedule.cache.chains import Chains
from fastdecode.schedule.life.events import Drawn, StepDone
from fastdecode.schedule.options import MODES
from fastdecode.schedule.reserving.starts import OwnHolders


@settings(max_examples=examples(600, share=8), deadline=None)
@given(
    st.data(),
    traffic(forks=False) | traffic(forks=True),
    st.sampled_from(MODES),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from(list(POLICIES)),
    st.sampled_from((None, None, "split", 1, 3, 4, 5, 9, 14)),
    st.sampled_from((0, 3, 15)),
    st.sampled_from((0.3, 0.9, 1.0)),
    st.sampled_from((0.0, 0.0, 0.3)),
    st.sampled_from((None, None, 0.3)),
)
def test_attention_reads_only_what_was_written_for_it(
    data: st.DataObject,
    requests: Requests,
    mode: str,
    num_lanes: int,
    lose: bool,
    late: bool,
    policy: str,
    reach: int | str | None,
    slots: int,
    threshold: float,
    failing: float,
    quantile: float | None,
) -> None:
    """All prompts begin alike. Counts are compared after every event.

    Some sequences are suspended, some blocks do not arrive, and some sequences step before theirs
    have arrived. ``reach``: a sliding window, or ``"split"``."""
    chance = random.Random(len(requests))
    is_split = reach == "split"
    made = {"opening_steps": int(late), "swap_threshold": threshold}
    more = {} if quantile is None else {"length_quantile": quantile}
    busy = keeping(
        (9, 9, 9) if is_split else (12, 20), mode, num_lanes, policy=policy, slots=slots,
        made=made | {"window": None if is_split else reach},
        split_tokens=8 if is_split else None, **more,
    )  # fmt: skip
    busy.moves.fail = lambda: chance.random() < failing
    busy.moves.tell = lambda: chance.random() < 0.5
    busy.lifecycle.stepped(BLOCK_SIZE, 1e6)  # so that all fetches arrive in time
    play(data, busy, requests, lose=lose)
    assert quantile is not None or busy.num_suspended == 0
    assert failing or all(store.num_on_disk <= slots for store in busy.stores)


def test_a_turn_runs_what_is_no_full_block_of_the_last_one() -> None:
    chat = keeping()
    tokens, spared = turn(chat, tuple(range(9)))
    assert spared == 0
    for new in (1, 6, 2):
        full = (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
        tokens, spared = turn(chat, tokens + (7,) * new)
        assert spared == full, "generated blocks, too; the last token was never run"


def test_a_busy_holder_is_compared_with_those_that_are_for_the_same_lane() -> None:
    """The idle one is another lane's: nothing is spared by leaving blocks for it."""
    busy = keeping((60, 60), made={"places": OwnHolders()})
    prompt = tuple(range(9))
    for _ in range(3):  # prompts come again, so blocks are worth memory
        turn(busy, prompt)
    assert busy.arrive(0, (90,), 90, prompt=(99,) * 9)
    for _ in range(4):
        busy.turn(0)
    before = busy.num_resumed_tokens
    assert busy.arrive(0, (1,), 1, prompt=prompt)
    busy.run_out()
    assert busy.num_resumed_tokens - before == 8


def test_a_conversations_turn_runs_what_is_new_and_the_last_drawn_token() -> None:
    chat = keeping()
    tokens, spared = turn(chat, tuple(range(9)), cache=CacheUse(turn=0))
    assert spared == 0
    for new in (1, 6, 2, 5):
        past = len(tokens) - 1
        tokens, spared = turn(chat, tokens + (7,) * new, cache=CacheUse(turn=past))
        assert spared == past
    stock = chat.scheduler.ledger.cache.stock
    kept = len(stock[HolderId(0)]) + len(stock[HolderId(1)])
    assert kept == -(-(len(tokens) - 1) // BLOCK_SIZE), "ends of earlier turns are given up"


def test_conversations_lease_what_they_share_until_their_next_turn_has_ended() -> None:
    chat = keeping((40,))
    system = tuple(range(2 * BLOCK_SIZE))
    first, _ = turn(chat, (*system, 50, 51), 2, cache=CacheUse(turn=0))
    turn(chat, (*system, 60, 61), 3, cache=CacheUse(turn=0))
    index = chat.scheduler.ledger.cache.stock[HolderId(0)]

    def leases() -> list[int]:
        return sorted(block.num_leases for block in index)

    assert leases() == [1, 1, 2, 2], "two ends, one of them full, behind two blocks that both have"
    turn(chat, (*first, 52, 53), 3, cache=CacheUse(turn=len(first) - 1))
    assert leases() == [1, 1, 1, 2, 2], "that end has moved on"


def test_a_turn_that_fails_leaves_what_the_next_one_starts_with() -> None:
    chat = keeping()
    tokens, _ = turn(chat, tuple(range(9)), cache=CacheUse(turn=0))
    past = len(tokens) - 1
    assert chat.arrive(0, (9,), 9, prompt=(*tokens, 5), cache=CacheUse(turn=past))
    for _ in range(4):
        chat.turn(0)
    chat.cancel(next(iter(chat.live.values())))
    chat.run_out()
    assert turn(chat, (*tokens, 6), cache=CacheUse(turn=past))[1] >= past


def test_of_a_wholly_cached_prompt_one_token_runs() -> None:
    chat = keeping()
    for expected in (0, 7, 7):
        _, spared = turn(chat, tuple(range(8)))
        assert spared == expected


def test_equal_prefixes_that_arrive_together_run_once() -> None:
    crowd = keeping((60,))
    common = tuple(range(12))
    for own in range(5):
        assert crowd.arrive(0, (2,), 2, prompt=(*common, 100 + own, 0, 1))
    crowd.run_out()
    assert crowd.num_resumed_tokens == 4 * 12


def test_who_waits_for_a_prefix_does_so_only_until_it_is_there() -> None:
    crowd = keeping((60,))
    assert crowd.arrive(0, (24,), 24, prompt=tuple(range(13)))
    assert crowd.arrive(0, (1,), 1, prompt=(*range(12), 5, 5, 5))
    for _ in range(8):
        crowd.turn(0)
    assert 1 in crowd.finished and 0 in crowd.live


def test_salts_and_private_requests_share_nothing() -> None:
    chat = keeping()
    prompt = tuple(range(9))
    assert turn(chat, prompt, cache=CacheUse(is_off=True))[1] == 0
    assert turn(chat, prompt)[1] == 0, "it left nothing behind"
    assert turn(chat, prompt, cache=CacheUse(salt="a"))[1] == 0
    assert turn(chat, prompt, cache=CacheUse(salt="a"))[1] == 8
    assert turn(chat, prompt, cache=CacheUse(salt="a", is_off=True))[1] == 0


def test_a_salt_is_a_string_that_is_not_too_long() -> None:
    for salt in (3, "x" * 1025):
        with pytest.raises(RequestError, match="cache_salt"):
            CacheUse.of(None, salt)
    with pytest.raises(RequestError, match='"on" or "off"'):
        CacheUse.of("maybe", None)
    assert CacheUse.of("off", "a") == CacheUse(True, "a")


def test_what_was_used_least_recently_makes_room_first_and_its_end_before_its_beginning() -> None:
    chat = keeping((6,), policy="lru")
    first, second = tuple(range(8)), tuple(range(50, 58))
    turn(chat, first, 1)
    turn(chat, second, 1)
    turn(chat, second, 1)  # prompts come again: memory is no reason to give up blocks
    turn(chat, first, 1)
    assert turn(chat, tuple(range(80, 91)), 1)[1] == 0, "three blocks, where two are free"
    assert turn(chat, first, 1)[1] == 7
    assert turn(chat, second, 1)[1] == 4


def test_blocks_that_nobody_has_hit_take_no_memory_that_was_never_touched() -> None:
    chat = keeping((20,))
    for start in range(0, 500, 50):
        turn(chat, tuple(range(start, start + 11)), 1)
    ledger = chat.scheduler.ledger
    assert len(ledger.cache.stock[HolderId(0)]) <= 3
    for _ in range(2):  # what was given up for it is asked for again: it is worth the memory
        for start in range(0, 500, 50):
            turn(chat, tuple(range(start, start + 11)), 1)
    assert len(ledger.cache.stock[HolderId(0)]) > 15


@pytest.mark.parametrize("lanes", [1, 2])
def test_waves_of_prompts_touch_no_more_memory_than_without_a_cache(lanes: int) -> None:
    touched = []
    for keeps in (False, True):
        waves = keeping((60,), lanes=lanes, keeps_blocks=keeps)
        for wave in range(4):
            for start in range(5):
                own = 1000 * wave + 100 * start
                assert waves.arrive(0, (4,), 4, prompt=tuple(range(own, own + 12)))
            waves.run_out()
        touched.append(waves.stores[0].num_touched)
    assert touched[1] <= touched[0]


def test_a_holder_that_is_much_busier_than_others_is_left_alone() -> None:
    crowd = keeping((60, 60))
    for own in range(7):
        assert crowd.arrive(0, (20,), 20, prompt=(*range(8), 100 + own))
    for _ in range(24):
        crowd.turn(0)
    load = crowd.scheduler.lanes[0].reserved_tokens
    assert load[HolderId(0)] and load[HolderId(1)]
    crowd.run_out()


def test_what_came_to_no_finite_logits_is_used_by_nobody_again() -> None:
    chat = keeping()
    prompt = tuple(range(9))
    turn(chat, prompt)
    assert chat.arrive(0, (2,), 2, prompt=prompt)
    run = chat.begin(0)
    assert run is not None and chat.num_resumed_tokens == 8
    (chunk,) = run.chunks
    chat.in_flight.clear()
    chunk.sequence.is_spoilt = True
    error = RequestError("not finite", code="non_finite_logits")
    chat._tell(StepDone(0, (Drawn(chunk.sequence, error=error),)))
    chat.run_out()
    assert turn(chat, prompt)[1] == 0


def test_a_token_that_is_not_known_is_part_of_no_key() -> None:
    chains = Chains(BLOCK_SIZE, are_on=True)
    request = Request("a", tuple(range(7)), SamplingParams(), 9, seed=0)
    sequence = Sequence.of(SequenceId(0), request, 0)
    sequence.token_ids.append(COMING)
    keys = block_keys(root_key(""), range(8), BLOCK_SIZE)
    assert chains.keys(sequence) == keys[:1], "two sequences may have drawn different tokens"
    sequence.token_ids[-1] = 7
    assert chains.keys(sequence) == keys
