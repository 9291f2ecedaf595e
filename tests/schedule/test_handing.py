"""Sequences that go on elsewhere, and those that come from there: a lifecycle by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lifecycles import closing, lifecycle, step, tell
from remembering_store import BLOCK_SIZE
from schedule_choices import options

from fastdecode.core.holders import HolderId, KVSource, Part, num_offered
from fastdecode.core.sequence import FinishReason, Request, SamplingParams
from fastdecode.schedule.life import events
from fastdecode.schedule.life.handing import HANDED_OVER_LOST
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.plan import Send
from fastdecode.schedule.prefill import PrefillBudget
from fastdecode.wire.blocks import Close, Open, Pulled

SOURCES = (KVSource("p-r0", "ab" * 16, 0, 5, 0, 2),)


def pulled(part: Part, reason: str = "") -> Pulled:
    return Pulled(part.holder, part.part_id, 0, 0.0, reason)


def request(name: str, n: int = 1, num_tokens: int = 5) -> Request:
    return Request(name, (5,) * num_tokens, SamplingParams(n=n), 1, seed=0, hands_over=True)


def open_all(life: Lifecycle) -> list[events.Ask]:
    asked = [x for x in tell(life, events.LaneIdle(0)) if isinstance(x, events.Ask)]
    for one in asked:
        tell(life, events.Opened(one.part.part_id))
    return asked


def test_a_request_is_handed_over_and_kept_until_it_is_cancelled() -> None:
    life = lifecycle(num_lanes=1)
    tell(life, events.Submitted(request("a")))
    (opened,) = open_all(life)
    (handed,) = step(life)
    assert isinstance(handed, events.HandOver) and handed.sequence.token_ids == [5] * 5 + [7]
    assert handed.sequence.num_cached == 5 and life.handing.has_exported
    assert tell(life, events.LaneIdle(0)) == [] == tell(life, events.LaneReady(0)), (
        "nothing of it runs"
    )
    assert isinstance(opened, events.Ask)
    assert tell(life, events.Cancelled("a")) == [closing(opened)]
    assert not life.handing.has_exported and not life.sequences.by_sequence


@pytest.mark.parametrize("over", [(), (0,), (1,), (0, 1, 2)])
def test_of_several_sequences_one_is_kept(over: tuple[int, ...]) -> None:
    life = lifecycle(num_lanes=1)
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
    assert len(life.scheduler.parked.runs) == len(handed)
    if handed:
        assert isinstance(told[-1], events.HandOver), "when all have drawn"
        (close,) = tell(life, events.Cancelled("a"))
        assert isinstance(close, events.Ask) and isinstance(close.message, Close)
    assert not life.sequences.by_sequence


@pytest.mark.parametrize("event", [events.Lost(HolderId(0)), events.Interrupted(HolderId(0))])
def test_who_loses_what_was_to_be_fetched_says_so(event: events.Event) -> None:
    life = lifecycle((40, 40), 1)
    tell(life, events.Submitted(request("a")))
    open_all(life)
    step(life)
    fails = [one for one in tell(life, event) if isinstance(one, events.Fail)]
    assert [fail.error.code for fail in fails] == [HANDED_OVER_LOST]
    assert not life.sequences.by_sequence


def coming(max_tokens: int = 4) -> Request:
    return replace(
        request("a"), max_tokens=max_tokens, hands_over=False, drawn={0: (7,)}, sources=SOURCES
    )


def test_what_is_offered_is_needed_until_all_siblings_have_begun() -> None:
    """The first may be over before the last has room."""
    life = lifecycle((3,), 1)
    drawn = {0: (7,), 1: (7,), 2: (7,)}
    asked = replace(coming(max_tokens=2), params=SamplingParams(n=3), drawn=drawn)
    tell(life, events.Submitted(asked))
    told: list[events.Instruction] = []
    pulls = 0
    while life.sequences.by_sequence:
        for one in tell(life, events.LaneIdle(0)):
            if isinstance(one, events.Ask):
                for then in tell(life, events.Opened(one.part.part_id)):
                    pulls += isinstance(then, events.Pull)
                    assert isinstance(then, events.Pull)
                    told += tell(life, pulled(then.part))
            told.append(one)
        if any(run.is_open for run in life.scheduler.lanes[0].running.values()):
            told += step(life)
    fetched = [place for place, one in enumerate(told) if isinstance(one, events.HasFetched)]
    begun = [
        place
        for place, one in enumerate(told)
        if isinstance(one, events.Ask) and isinstance(one.message, Open)
    ]
    assert len(fetched) == 1 and len(begun) == 3 and fetched[0] >= begun[-1] - 1
    assert pulls >= 1 and life.sequences.counts.num_recomputed == 0


def test_who_cannot_be_fetched_is_recomputed() -> None:
    life = lifecycle(num_lanes=1)
    tell(life, events.Submitted(coming()))
    (asked,) = tell(life, events.LaneIdle(0))
    assert isinstance(asked, events.Ask)
    tell(life, events.Opened(asked.part.part_id))
    close, fetched = tell(life, pulled(asked.part, "gone"))
    assert close == closing(asked) and isinstance(fetched, events.HasFetched)
    open_all(life)
    (run,) = tell(life, events.LaneReady(0))
    assert isinstance(run, events.Run) and run.chunks[0].first == 0, "from its beginning"
    assert life.sequences.counts.num_recomputed == 1


@pytest.mark.parametrize("second", ["", "gone"], ids=["fetched", "failed"])
@pytest.mark.parametrize("is_open", [True, False], ids=["importing", "reserving"])
def test_a_failed_import_leaves_the_prompt_to_a_sibling_that_imports_it(
    is_open: bool, second: str
) -> None:
    """Each has its own import, where a prompt is too short to be forked. The end of both is
    reported once."""
    life = lifecycle(num_lanes=1)
    sources = (replace(SOURCES[0], num_tokens=1),)
    asked = replace(coming(), prompt_token_ids=(5,), params=SamplingParams(n=2), sources=sources)
    tell(life, events.Submitted(replace(asked, drawn={0: (7,), 1: (7,)})))
    one, other = tell(life, events.LaneIdle(0))
    assert isinstance(one, events.Ask) and isinstance(other, events.Ask)
    assert isinstance(*tell(life, events.Opened(one.part.part_id)), events.Pull)
    if is_open:
        assert isinstance(*tell(life, events.Opened(other.part.part_id)), events.Pull)
    told = tell(life, pulled(one.part, "gone"))
    assert not [each for each in told if isinstance(each, events.HasFetched)]
    if not is_open:
        assert isinstance(*tell(life, events.Opened(other.part.part_id)), events.Pull)
    told = tell(life, pulled(other.part, second))
    assert [each.failed for each in told if isinstance(each, events.HasFetched)] == [True]
    assert life.sequences.counts.num_recomputed == 1 + bool(second)


def test_who_is_cancelled_or_lost_while_it_is_fetched() -> None:
    life = lifecycle((40, 40), 1)
    tell(life, events.Submitted(coming()))
    (asked,) = tell(life, events.LaneIdle(0))
    assert isinstance(asked, events.Ask)
    tell(life, events.Opened(asked.part.part_id))
    assert tell(life, events.Lost(asked.part.holder)) == []
    (again,) = tell(life, events.LaneIdle(0))
    assert isinstance(again, events.Ask) and again.part.holder != asked.part.holder
    assert tell(life, events.Opened(again.part.part_id)) == [events.Pull(again.part, 5, SOURCES)]
    assert tell(life, pulled(asked.part, "it is lost")) == []
    assert tell(life, events.Cancelled("a")) == [closing(again)]
    assert tell(life, pulled(again.part, "it was closed")) == []
    assert not life.sequences.by_sequence and not life.handing.is_importing


def test_tokens_that_are_to_be_drawn_again_are_not_fetched() -> None:
    """Of a sequence that has drawn nothing, all but the last of its prompt."""
    life = lifecycle(num_lanes=1)
    tell(life, events.Submitted(replace(coming(), drawn={})))
    (asked,) = tell(life, events.LaneIdle(0))
    assert isinstance(asked, events.Ask)
    assert tell(life, events.Opened(asked.part.part_id)) == [events.Pull(asked.part, 4, SOURCES)]
    assert num_offered(SOURCES) == 5


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


@pytest.mark.parametrize("when", ["opening", "fetching", "failing"])
def test_what_was_to_be_fetched_and_has_not_come_is_kept_for_nobody(when: str) -> None:
    life = Lifecycle(
        make_scheduler(options("greedy", 1), (40,), BLOCK_SIZE, opening_steps=1, keeps_blocks=True)
    )
    prompt = tuple(range(5 * BLOCK_SIZE + 3))
    asked = Request("a", prompt, SamplingParams(), 4, seed=0)
    sources = (replace(SOURCES[0], num_tokens=len(prompt)),)
    tell(life, events.Submitted(replace(asked, sources=sources)))
    (opened,) = [one for one in tell(life, events.LaneIdle(0)) if isinstance(one, events.Ask)]
    told: list[events.Instruction] = []
    if when == "opening":
        told += tell(life, events.Cancelled("a"))
    told += tell(life, events.Opened(opened.part.part_id))
    if when == "fetching":
        told += tell(life, events.Cancelled("a"))
    elif when == "failing":
        told += tell(life, pulled(opened.part, "gone"))
    assert any(isinstance(one, events.Ask) and isinstance(one.message, Close) for one in told)
    assert not any(isinstance(one, Send) for one in told), "unwritten blocks would be others'"
    if when == "failing":
        assert any(isinstance(one, events.Ask) for one in tell(life, events.LaneIdle(0))), (
            "from its beginning"
        )


def test_an_exported_prompt_does_not_move_with_a_holder_that_is_given_back() -> None:
    """A neighbour has taken a holder over, and a replacement has a copy of it: what is
    on offer there is run again elsewhere."""
    life = lifecycle((40, 40), 1)
    tell(life, events.Submitted(request("a")))
    (opened,) = open_all(life)
    assert isinstance(opened, events.Ask)
    holder = opened.part.holder
    (order,) = tell(life, events.Interrupted(holder))
    assert isinstance(order, events.TakeOver)
    for extend in tell(life, events.TakenOver(holder, order.num_tokens)):
        assert isinstance(extend, events.Ask)
        tell(life, events.Opened(extend.part.part_id))
    tell(life, events.LaneIdle(0))
    (handed,) = step(life)
    assert isinstance(handed, events.HandOver)
    failed, asked = tell(life, events.Leaving(holder))
    assert isinstance(failed, events.Fail) and failed.error.code == HANDED_OVER_LOST
    assert asked == events.TakeOver(holder, (), ()), "nothing of it goes on"
    assert not life.handing.has_exported and not life.sequences.by_sequence
