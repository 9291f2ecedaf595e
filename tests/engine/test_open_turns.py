"""Turns of many clients in one event loop: one after another in a conversation,
and what comes to those that wait for one that fails or is given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastdecode.conversations.conversations import Conversations
from fastdecode.conversations.order import OpenTurn, OpenTurns
from fastdecode.conversations.store import ConversationStore
from fastdecode.conversations.turns import History, HistoryStep, Turn, TurnPrompter
from fastdecode.core.delta import Delta
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.sequence import SamplingParams
from fastdecode.text.codec import TextCodec

WITHIN_S = 30


class FullDisk(ConversationStore):
    """Has no room for a turn."""

    def append(
        self, conversation_id: str, name: str, history: History, step: HistoryStep, now_s: float
    ) -> None:
        assert threading.current_thread() is not threading.main_thread()
        raise FastDecodeError("no room", code="output_failed")


def run(
    test: Callable[[OpenTurns], Awaitable[None]], store: ConversationStore | None = None
) -> None:
    """A test in a loop of its own, with an end to it."""
    thread = ThreadPoolExecutor(1)
    try:
        turns = OpenTurns(Conversations(store=store), thread)
        asyncio.run(asyncio.wait_for(test(turns), WITHIN_S))
    finally:
        thread.shutdown()


def arrive(turns: OpenTurns, *new: int, whose: str = "c") -> OpenTurn:
    prompter = TurnPrompter(new, TextCodec(None))
    return turns.arrive(Turn("r", whose, prompter, SamplingParams()))


async def begun(opened: OpenTurn) -> tuple[int, ...]:
    """The prompt of a turn, once it may begin."""
    assert await opened.is_due is None
    history = await opened.begin()
    asked = opened.turn.prompter(history)
    request = opened.asks(history, asked)
    assert request.cache.turn == max(0, len(history.token_ids) - 1)
    return asked.token_ids


async def answer(opened: OpenTurn) -> None:
    await opened.add([Delta("r", 0, "x", (9,)), Delta("r", 0, "y", (9,), None, "stop")])


def test_each_begins_when_the_one_before_it_is_over_and_others_go_on() -> None:
    async def test(turns: OpenTurns) -> None:
        first, second, third = (arrive(turns, token) for token in (1, 2, 3))
        other = arrive(turns, 7, whose="other")
        assert await begun(first) == (1,) and await begun(other) == (7,)
        assert not second.is_due.done()
        await answer(first)
        assert await begun(second) == (1, 9, 9, 2)
        second.leave(has_failed=False)  # its client has gone
        assert await begun(third) == (1, 9, 9, 3)
        await answer(third)
        third.leave(has_failed=False)  # which is over already
        assert await begun(arrive(turns, 4)) == (1, 9, 9, 3, 9, 9, 4)

    run(test)


def test_those_that_wait_for_one_that_fails_do_so_and_later_ones_do_not() -> None:
    async def test(turns: OpenTurns) -> None:
        first, second, third = (arrive(turns, token) for token in (1, 2, 3))
        assert await begun(first) == (1,)
        second.leave(has_failed=True)  # it has waited for too long
        failed = await third.is_due
        assert failed is not None and failed.code == "previous_turn_failed"
        fourth = arrive(turns, 4)
        third.leave(has_failed=True)
        assert not fourth.is_due.done(), "the first one is still under way"
        first.leave(has_failed=True)
        failed = await fourth.is_due
        assert failed is not None and failed.code == "previous_turn_failed"
        later = arrive(turns, 5)
        fourth.leave(has_failed=True)
        assert await begun(later) == (5,), "nothing of what failed is there"

    run(test)


def test_who_leaves_while_he_waits_or_begins_holds_up_nobody() -> None:
    async def test(turns: OpenTurns) -> None:
        first, waits, last = (arrive(turns, token) for token in (1, 2, 3))
        assert await first.is_due is None
        first.begin().cancel()
        waits.is_due.cancel()
        waits.leave(has_failed=False)
        first.leave(has_failed=False)
        assert await begun(last) == (3,)

    run(test)


def test_a_turn_that_can_not_be_kept_has_failed(tmp_path: Path) -> None:
    async def test(turns: OpenTurns) -> None:
        first, second = arrive(turns, 1), arrive(turns, 2)
        assert await begun(first) == (1,)
        with pytest.raises(FastDecodeError, match="no room"):
            await answer(first)
        failed = await second.is_due
        assert failed is not None and failed.code == "previous_turn_failed"
        assert await begun(arrive(turns, 3)) == (3,)

    run(test, FullDisk(tmp_path / "turns.log", bytes(32)))
