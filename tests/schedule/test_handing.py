"""Sequences that continue elsewhere, and those that come from there: a lifecycle by itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from lifecycles import end, step, tell
from remembering_store import BLOCK_SIZE
from schedule_choices import options

from fastdecode.core.errors import RequestError
from fastdecode.core.holders import HolderId, KVSource
from fastdecode.core.sequence import FinishReason, Request, SamplingParams
from fastdecode.schedule.life import events
from fastdecode.schedule.life.handing import HANDED_OVER_LOST
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.plan import Send
from fastdecode.schedule.prefill import PrefillBudget
from fastdecode.wire.blocks import Close, Done, Fetch, Forget, Name, Open, keys_of, words_of

SOURCES = (KVSource("p-r0", 7, 0, 5, 0, 2, 0, 3, is_held=True),)
TAIL = 5 % BLOCK_SIZE
NUM_BLOCKS = -(-5 // BLOCK_SIZE)


def lifecycle(
    blocks: tuple[int, ...] = (40,), num_lanes: int = 1, *, keeps_blocks: bool = False
) -> Lifecycle:
    chosen = options("greedy", num_lanes)
    kinds = {"keeps_blocks": keeps_blocks, "hands_over": True}
    return Lifecycle(make_scheduler(chosen, blocks, BLOCK_SIZE, opening_steps=1, **kinds))


def request(name: str, n: int = 1, num_tokens: int = 5) -> Request:
    return Request(name, (5,) * num_tokens, SamplingParams(n=n), 1, seed=0, hands_over=True)


def coming(max_tokens: int = 4) -> Request:
    return replace(
        request("a"), max_tokens=max_tokens, hands_over=False, drawn={0: (7,)}, sources=SOURCES
    )


def asked(told: Iterable[events.Instruction], kind: type[object]) -> list[events.Ask]:
    return [x for x in told if isinstance(x, events.Ask) and isinstance(x.message, kind)]


def sent(told: Iterable[events.Instruction], kind: type[object]) -> list[Send]:
    return [x for x in told if isinstance(x, Send) and isinstance(x.message, kind)]


def keys_in(told: Iterable[events.Instruction], kind: type[object]) -> list[bytes]:
    """Return the keys in messages of this kind."""
    return [key for x in sent(told, kind) for key in keys_of(x.message.keys)]  # type: ignore[union-attr]


def done(fetch: Send, *, has_failed: bool = False) -> Done:
    message = fetch.message
    assert isinstance(message, Fetch)
    missing = message.keys if has_failed else message.keys[:0]
    return Done(fetch.holder, message.job, missing, 0, 0.0)


def open_all(life: Lifecycle) -> list[events.Ask]:
    opened = asked(tell(life, events.LaneIdle(0)), Open)
    for one in opened:
        tell(life, events.Opened(one.part.part_id))
    return opened


def test_a_request_is_handed_over_and_kept_until_it_is_cancelled() -> None:
    life = lifecycle()
    tell(life, events.Submitted(request("a")))
    (opened,) = open_all(life)
    told = step(life)
    handed, (close,) = told[-1], asked(told, Close)
    assert isinstance(handed, events.HandOver) and handed.sequence.token_ids == [5] * 5 + [7]
    assert handed.num_tokens == handed.sequence.num_cached == 5 and life.handing.has_exported
    assert close.part == opened.part and isinstance(close.message, Close)
    named = [*keys_in(told, Name), bytes.fromhex(close.message.tail)]
    assert len(set(named)) == NUM_BLOCKS
    assert tell(life, events.LaneIdle(0)) == [] == tell(life, events.LaneReady(0)), (
        "nothing of it runs"
    )
    told = tell(life, events.Cancelled("a"))
    assert sorted(keys_in(told, Forget)) == sorted(named) and not asked(told, Close)
    assert not life.handing.has_exported and not life.sequences.by_sequence


def test_what_two_prompts_hold_stays_until_both_are_cancelled() -> None:
    life = lifecycle(keeps_blocks=True)
    for name in "ab":
        tell(life, events.Submitted(request(name, num_tokens=BLOCK_SIZE - 1)))
    open_all(life)
    told = step(life)
    assert len([x for x in told if isinstance(x, events.HandOver)]) == 2
    tails = [x.message.tail for x in asked(told, Close)]  # type: ignore[union-attr]
    assert sorted(map(bool, tails)) == [False, True], "one block has the key of both"
    assert not sent(tell(life, events.Cancelled("a")), Forget)
    told = tell(life, events.Cancelled("b"))
    assert keys_in(told, Forget) == [bytes.fromhex(max(tails))]


@pytest.mark.parametrize("over", [(), (0,), (1,), (0, 1, 2)])
def test_of_several_sequences_one_is_kept(over: tuple[int, ...]) -> None:
    life = lifecycle()
    tell(life, events.Submitted(request("a", n=3)))
    reasons: dict[int, FinishReason] = dict.fromkeys(over, "stop")
    told: list[events.Instruction] = []
    num_forks = 0
    for _ in range(3):
        num_forks += sum(
            isinstance(one.message, Open) and one.message.num_tokens > 0 for one in open_all(life)
        )
        if life.scheduler.num_running:
            told += step(life, reasons=reasons)
    assert num_forks == 2 or 0 in over, "a parked sequence may be forked"
    assert sum(isinstance(one, events.Finish) for one in told) == len(over)
    handed = [one for one in told if isinstance(one, events.HandOver)]
    assert len(handed) == (len(over) < 3)
    assert len(life.scheduler.parked) == len(handed)
    if handed:
        assert isinstance(told[-1], events.HandOver), "when all have drawn"
        assert handed[0].num_tokens == 5
        assert len(keys_in(tell(life, events.Cancelled("a")), Forget)) == NUM_BLOCKS
    assert not life.sequences.by_sequence


@pytest.mark.parametrize("event", [events.Lost(HolderId(0)), events.Interrupted(HolderId(0))])
def test_who_loses_what_was_to_be_fetched_says_so(event: events.Event) -> None:
    life = lifecycle((40, 40))
    tell(life, events.Submitted(request("a")))
    open_all(life)
    step(life)
    fails = [one for one in tell(life, event) if isinstance(one, events.Fail)]
    assert [fail.error.code for fail in fails] == [HANDED_OVER_LOST]
    assert not life.sequences.by_sequence


def test_a_request_that_arrives_starts_with_the_blocks_that_it_fetches() -> None:
    life = lifecycle()
    tell(life, events.Submitted(coming()))
    told = tell(life, events.LaneIdle(0))
    (fetch,) = sent(told, Fetch)
    assert isinstance(fetch.message, Fetch) and not asked(told, Open)
    assert (fetch.message.source, fetch.message.tail_tokens) == (SOURCES, TAIL)
    told = tell(life, done(fetch))
    (fetched,) = [x for x in told if isinstance(x, events.HasFetched)]
    (opened,) = asked(told, Open)
    assert isinstance(opened.message, Open) and opened.message.num_tokens == 5
    assert keys_of(opened.message.keys) == keys_of(fetch.message.keys) and not fetched.failed
    tell(life, events.Opened(opened.part.part_id))
    (run,) = tell(life, events.LaneReady(0))
    assert isinstance(run, events.Run) and run.chunks[0].first == 5
    told = end(life, run, {0: "stop"})
    assert sorted(keys_in(told, Forget)) == sorted(keys_of(fetch.message.keys))
    assert not life.sequences.by_sequence


def test_what_is_offered_is_needed_until_all_siblings_have_begun() -> None:
    """The first may be over before the last has room."""
    life = lifecycle((4,))
    drawn = {0: (7,), 1: (7,), 2: (7,)}
    submitted = replace(coming(max_tokens=2), params=SamplingParams(n=3), drawn=drawn)
    tell(life, events.Submitted(submitted))
    told: list[events.Instruction] = []
    while life.sequences.by_sequence:
        news = tell(life, events.LaneIdle(0))
        for fetch in sent(news, Fetch):
            news += tell(life, done(fetch))
        for one in asked(news, Open):
            tell(life, events.Opened(one.part.part_id))
        told += news
        if any(run.is_open for run in life.scheduler.lanes[0].running.values()):
            told += step(life)
    places = [place for place, one in enumerate(told) if isinstance(one, events.HasFetched)]
    begun = [told.index(one) for one in asked(told, Open)]
    assert len(places) == 1 and len(begun) == 3 and places[0] >= begun[-1] - 1
    assert sent(told, Fetch) and life.sequences.counts.num_recomputed == 0


def test_a_prompt_that_cannot_be_fetched_is_run_again() -> None:
    life = lifecycle()
    tell(life, events.Submitted(coming()))
    (fetch,) = sent(tell(life, events.LaneIdle(0)), Fetch)
    told = tell(life, done(fetch, has_failed=True))
    assert [x.failed for x in told if isinstance(x, events.HasFetched)] == [True]
    assert isinstance(fetch.message, Fetch)
    assert sorted(keys_in(told, Forget)) == sorted(keys_of(fetch.message.keys))
    open_all(life)
    (run,) = tell(life, events.LaneReady(0))
    assert isinstance(run, events.Run) and run.chunks[0].first == 0, "from its beginning"


def test_siblings_wait_for_the_same_blocks() -> None:
    """Where a prompt is too short to be forked. The end of both is reported once."""
    life = lifecycle()
    sources = (replace(SOURCES[0], num_tokens=1),)
    one = replace(coming(), prompt_token_ids=(5,), params=SamplingParams(n=2), sources=sources)
    tell(life, events.Submitted(replace(one, drawn={0: (7,), 1: (7,)})))
    (fetch,) = sent(tell(life, events.LaneIdle(0)), Fetch)
    told = tell(life, done(fetch, has_failed=True))
    assert [x.failed for x in told if isinstance(x, events.HasFetched)] == [True]
    assert len(open_all(life)) == 2


def test_who_is_cancelled_or_lost_while_it_is_fetched() -> None:
    life = lifecycle((40, 40))
    tell(life, events.Submitted(coming()))
    (fetch,) = sent(tell(life, events.LaneIdle(0)), Fetch)
    assert tell(life, events.Lost(fetch.holder)) == []
    (again,) = sent(tell(life, events.LaneIdle(0)), Fetch)
    assert again.holder != fetch.holder, "it is fetched again"
    assert tell(life, done(fetch, has_failed=True)) == []
    assert tell(life, events.Cancelled("a")) == []
    (forget,) = sent(tell(life, done(again)), Forget)
    assert len(forget.message.keys) == len(again.message.keys), (
        "no other sequence may start with what arrives"
    )
    assert not life.sequences.by_sequence


def test_a_prompt_names_its_block_when_a_fetch_of_the_same_block_fails() -> None:
    life = lifecycle(num_lanes=2, keeps_blocks=True)
    prompt = tuple(range(3 * BLOCK_SIZE))
    tell(life, events.Submitted(replace(request("own"), prompt_token_ids=prompt)))
    open_all(life)
    (run,) = tell(life, events.LaneReady(0))
    sources = (replace(SOURCES[0], num_tokens=2 * BLOCK_SIZE, is_held=False),)
    borrower = replace(coming(), request_id="b", prompt_token_ids=prompt, drawn={}, sources=sources)
    tell(life, events.Submitted(borrower))
    (fetch,) = sent(tell(life, events.LaneIdle(1)), Fetch)
    told = end(life, run)
    tell(life, done(fetch, has_failed=True))
    while not (handed := [x for x in told if isinstance(x, events.HandOver)]):
        tell(life, events.LaneIdle(0))
        (run,) = tell(life, events.LaneReady(0))
        told = end(life, run)
    assert [x.num_tokens for x in handed] == [len(prompt)]


def test_a_prompt_whose_blocks_are_doubted_is_not_handed_over() -> None:
    life = lifecycle(keeps_blocks=True)
    prompt = (5,) * 2 * BLOCK_SIZE
    tell(life, events.Submitted(Request("x", (*prompt, 1), SamplingParams(), 3, seed=0)))
    open_all(life)
    while life.sequences.by_sequence:
        step(life)
    tell(life, events.Submitted(Request("b", (*prompt, 2, 2), SamplingParams(), 3, seed=0)))
    tell(life, events.Submitted(replace(request("c"), prompt_token_ids=(*prompt, 3, 3))))
    open_all(life)
    (run,) = tell(life, events.LaneReady(0))
    spoilt, drawn = RequestError("logits are not finite"), []
    for sequence in (chunk.sequence for chunk in run.chunks):
        sequence.is_spoilt = sequence.request.request_id == "b"
        draw = events.Drawn(sequence, error=spoilt) if sequence.is_spoilt else None
        drawn.append(draw or events.Drawn(sequence, 7))
    told = tell(life, events.StepDone(0, tuple(drawn)))
    assert not [x for x in told if isinstance(x, events.HandOver)]
    failed = {x.request_id: x.error.code for x in told if isinstance(x, events.Fail)}
    assert failed == {"b": spoilt.code, "c": HANDED_OVER_LOST}


def test_tokens_that_are_to_be_drawn_again_are_not_fetched() -> None:
    """Of a sequence that has drawn nothing, all but the last of its prompt."""
    life = lifecycle()
    tell(life, events.Submitted(replace(coming(), drawn={})))
    (fetch,) = sent(tell(life, events.LaneIdle(0)), Fetch)
    (opened,) = asked(tell(life, done(fetch)), Open)
    assert isinstance(opened.message, Open) and opened.message.num_tokens == 4


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "evicted"])
def test_borrowed_blocks_need_not_be_there(is_there: bool) -> None:
    """Whole blocks that another instance keeps are used, and others run."""
    life = lifecycle(keeps_blocks=True)
    sources = (replace(SOURCES[0], num_tokens=2 * BLOCK_SIZE + 1, is_held=False),)
    prompt = tuple(range(3 * BLOCK_SIZE))
    asks = replace(coming(), prompt_token_ids=prompt, drawn={}, sources=sources)
    tell(life, events.Submitted(asks))
    (fetch,) = sent(tell(life, events.LaneIdle(0)), Fetch)
    assert isinstance(fetch.message, Fetch)
    assert (len(fetch.message.keys), fetch.message.tail_tokens) == (2, 0)
    missing = [] if is_there else keys_of(fetch.message.keys)[1:]
    told = tell(life, Done(fetch.holder, fetch.message.job, words_of(missing), 0, 0.0))
    told += tell(life, events.LaneIdle(0))
    (opened,) = asked(told, Open)
    assert isinstance(opened.message, Open)
    assert opened.message.num_tokens == (2 if is_there else 1) * BLOCK_SIZE


def test_prompts_run_whole_or_alone() -> None:
    budget = PrefillBudget(100, 100, whole_prompts=True)
    assert budget.chunks(60) == (60,)
    budget.book((60,))
    assert budget.chunks(41) == () and budget.chunks(40) == (40,)
    budget.next_step()
    assert budget.chunks(250) == (100, 100, 50)
    budget.book((100, 100, 50))
    assert budget.chunks(1) == ()
    budget.next_step()
    budget.next_step()
    assert budget.chunks(50) == (50,) and budget.chunks(51) == ()


def test_an_exported_prompt_does_not_move_with_a_holder_that_is_given_back() -> None:
    """A neighbour has taken a holder over, and a replacement has a copy of it: what is
    on offer there is run again elsewhere."""
    life = lifecycle((40, 40))
    tell(life, events.Submitted(request("a")))
    (opened,) = open_all(life)
    holder = opened.part.holder
    (order,) = tell(life, events.Interrupted(holder))
    assert isinstance(order, events.TakeOver)
    for extend in tell(life, events.TakenOver(holder, order.num_tokens)):
        assert isinstance(extend, events.Ask)
        tell(life, events.Opened(extend.part.part_id))
    tell(life, events.LaneIdle(0))
    assert isinstance(step(life)[-1], events.HandOver)
    told = tell(life, events.Leaving(holder))
    (failed,) = [x for x in told if isinstance(x, events.Fail)]
    assert failed.error.code == HANDED_OVER_LOST
    (taken,) = [x for x in told if isinstance(x, events.TakeOver)]
    assert not taken.parts, "nothing of it continues"
    assert not life.handing.has_exported and not life.sequences.by_sequence
