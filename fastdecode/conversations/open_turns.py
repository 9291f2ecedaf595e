"""Turns that come from many clients at once, to one event loop: each begins when
the one before it in its conversation is over, and others go on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import TypeVar

from fastdecode.conversations.conversations import Conversations
from fastdecode.conversations.history import History
from fastdecode.conversations.talk import BegunTurn
from fastdecode.conversations.turns import Turn, TurnPrompt, after_a_failed_turn
from fastdecode.core.delta import Delta, OutputFold
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.sequence import Completion, PromptRequest

T = TypeVar("T")


class OpenTurns:
    """See the module. Belongs to the event loop.

    Args:
        conversations: what turns go on from, and are kept in.
        thread: an executor of one thread, where all that is asked of them goes
            on: what is asked later is done later, and a slow disk holds up no
            loop.
    """

    def __init__(self, conversations: Conversations, thread: Executor) -> None:
        self.conversations = conversations
        self._thread = thread
        self._lines: dict[str, list[OpenTurn]] = {}
        """Conversation → the turn that may begin or has begun, and those that
        wait for it."""

    def arrive(self, turn: Turn) -> OpenTurn:
        """A turn at the end of its conversation's line. It has to be left."""
        line = self._lines.setdefault(turn.conversation_id, [])
        arrived = OpenTurn(turn, self)
        line.append(arrived)
        if len(line) == 1:
            arrived.is_due.set_result(None)
        return arrived

    async def forget(self, conversation_id: str) -> bool:
        """A conversation is over at once: a turn under way is answered, but not
        kept. Returns whether there is such a conversation."""
        forget = partial(self.conversations.forget_known, conversation_id)
        return await asyncio.wrap_future(self.act(forget))

    def act(self, do: Callable[[], T]) -> Future[T]:
        """Have something done with the conversations."""
        return self._thread.submit(do)

    def leave(self, turn: OpenTurn, *, has_failed: bool) -> None:
        """A turn is over, or waits no longer: the next one may begin. Those that
        waited for one that has failed do so, too."""
        whose = turn.turn.conversation_id
        line = self._lines.get(whose, [])
        if turn not in line:
            return  # one before it has failed
        place = line.index(turn)
        behind = line[place + 1 :]
        line[place:] = [] if has_failed else behind
        if has_failed:
            for each in behind:
                each.tell(after_a_failed_turn())
        if not line:
            del self._lines[whose]
        elif place == 0:
            line[0].tell(None)


class OpenTurn:
    """One of them, from its arrival on. Belongs to the event loop."""

    def __init__(self, turn: Turn, turns: OpenTurns) -> None:
        self.turn = turn
        self.is_due: asyncio.Future[FastDecodeError | None]
        """Comes when it may begin, or with why it never will."""
        self.is_due = asyncio.get_running_loop().create_future()
        self._turns = turns
        self._history: Future[History] | None = None
        self._begun: BegunTurn | None = None
        self._fold = OutputFold(turn.request_id, None, (), 1)
        self._is_over = False

    def begin(self) -> asyncio.Future[History]:
        """What it goes on from; the turn is due. Raises RequestError: the
        conversation is over."""
        begin = partial(self._turns.conversations.begin, self.turn.conversation_id)
        self._history = self._turns.act(begin)
        return asyncio.wrap_future(self._history)

    def asks(self, history: History, asked: TurnPrompt) -> PromptRequest:
        """The request that it is, once its prompt has been made."""
        self._begun = BegunTurn(self.turn, history, asked)
        return self._begun.request

    async def hear(self, deltas: Sequence[Delta]) -> None:
        """What has been answered. With the last of it the turn is over, and
        kept when this returns.

        Raises:
            FastDecodeError: it can't be kept, and comes to nothing.
        """
        assert self._begun is not None, "what wasn't asked has no answer"
        for delta in deltas:
            output = self._fold.add(delta)
            if output is not None:
                await self._keep(self._begun, output.completions[0])

    async def _keep(self, begun: BegunTurn, completion: Completion) -> None:
        self._is_over = True
        kept = self._turns.act(partial(begun.end, self._turns.conversations, completion))
        has_failed = True
        try:
            # Whoever leaves from now on leaves after it.
            await asyncio.shield(asyncio.wrap_future(kept))
            has_failed = False
        finally:
            self._turns.leave(self, has_failed=has_failed)

    def leave(self, *, has_failed: bool) -> None:
        """It has failed, or nobody waits for it any more: unless it is over, it
        comes to nothing."""
        if self._is_over:
            return
        self._is_over = True
        if self._history is not None:
            with contextlib.suppress(RuntimeError):  # all of it ends
                self._turns.act(partial(self._give_up, self._history))
        self._turns.leave(self, has_failed=has_failed)

    def _give_up(self, history: Future[History]) -> None:
        """In the thread, where it has begun by now if it ever will."""
        if not history.cancelled() and history.exception() is None:
            turn = self.turn
            self._turns.conversations.end(turn.conversation_id, turn.name, history.result())

    def tell(self, why_not: FastDecodeError | None) -> None:
        """It may begin, or never will."""
        if not self.is_due.done():
            self.is_due.set_result(why_not)
