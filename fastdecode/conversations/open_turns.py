"""Order of turns: each begins when the one before it in its conversation is over.

``Talk`` orders the turns of one reader, ``OpenTurns`` those of many clients of an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from fastdecode.conversations.conversations import Conversations
from fastdecode.conversations.history import History
from fastdecode.conversations.turns import Turn, TurnPrompt, after_a_failed_turn
from fastdecode.core.delta import Delta, OutputFold
from fastdecode.core.errors import CapacityError, FastDecodeError, RequestError
from fastdecode.core.sequence import Completion, PromptRequest, RequestOutput

T = TypeVar("T")


class TurnOrder(Generic[T]):
    """Turns of each conversation in the order of arrival. Only the first may begin."""

    def __init__(self) -> None:
        self._lines: dict[str, list[T]] = {}
        self._num_turns = 0

    @property
    def num_waiting(self) -> int:
        """Turns that wait for another one."""
        return self._num_turns - len(self._lines)

    def arrive(self, conversation_id: str, turn: T) -> bool:
        """Add a turn. Returns: True if it may begin."""
        line = self._lines.setdefault(conversation_id, [])
        line.append(turn)
        self._num_turns += 1
        return len(line) == 1

    def leave(
        self, conversation_id: str, turn: T, *, with_later: bool = False
    ) -> tuple[T | None, list[T]]:
        """Remove a turn, and those after it if ``with_later``.

        Returns: The turn that may begin now, if there is one, and those after it that were removed.
        """
        line = self._lines.get(conversation_id, [])
        place = next((i for i, each in enumerate(line) if each is turn), None)
        if place is None:
            return None, []  # it was removed with one before it
        later = self.cut(conversation_id, place + 1) if with_later else []
        del line[place]
        self._num_turns -= 1
        if not line:
            del self._lines[conversation_id]
            return None, later
        return (line[0] if place == 0 else None), later

    def cut(self, conversation_id: str, count: int) -> list[T]:
        """Keep the first ``count`` turns of a conversation. Returns: Those that were removed."""
        line = self._lines[conversation_id]
        removed = line[count:]
        del line[count:]
        self._num_turns -= len(removed)
        if not line:
            del self._lines[conversation_id]
        return removed

    def conversations(self) -> list[str]:
        return list(self._lines)


@dataclass(frozen=True)
class BegunTurn:
    """A turn that has begun."""

    turn: Turn
    history: History
    """Before it."""
    asked: TurnPrompt

    @property
    def request(self) -> PromptRequest:
        turn = self.turn
        # The last token of a history was drawn, and never run.
        cache = replace(turn.cache, turn=max(0, self.asked.num_past - 1))
        return PromptRequest(turn.request_id, self.asked.token_ids, turn.params, cache)

    def end(self, conversations: Conversations, completion: Completion | None) -> None:
        """End the turn with an answer, or without one."""
        step = None if completion is None else self.asked.answered(completion)
        turn = self.turn
        conversations.end(turn.conversation_id, turn.name, self.history, step, turn.cache.salt)


class Talk:
    """Turns of one reader."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._order: TurnOrder[Turn] = TurnOrder()
        self._begun: dict[str, BegunTurn] = {}
        """By conversation."""
        self._due: deque[Turn] = deque()
        """Turns that waited, and may begin."""
        self._failed: dict[str, FastDecodeError] = {}
        """Conversation → why no more turns of it begin."""

    @property
    def num_waiting(self) -> int:
        """Turns that wait for another one."""
        return self._order.num_waiting

    @property
    def has_due(self) -> bool:
        return bool(self._due)

    def next_due(self) -> Turn | None:
        """Return a turn that waited, and may begin."""
        return self._due.popleft() if self._due else None

    def waits(self, turn: Turn) -> bool:
        """Add a turn. Returns: True if it has to wait."""
        return not self._order.arrive(turn.conversation_id, turn)

    def begin(self, turn: Turn) -> PromptRequest:
        """Return the request of a turn that may begin.

        Raises:
            FastDecodeError: If an earlier turn failed, the conversation is over, or there is no
                such turn.
        """
        failed = self._failed.get(turn.conversation_id)
        if failed is not None:
            raise failed
        history = self._conversations.begin(turn.conversation_id)
        try:
            asked = turn.prompter(history)
        except BaseException:
            self._conversations.end(turn.conversation_id, turn.name, history)
            raise
        begun = self._begun[turn.conversation_id] = BegunTurn(turn, history, asked)
        return begun.request

    def end(self, turn: Turn, output: RequestOutput) -> FastDecodeError | None:
        """End a turn with its output. Returns: Why it failed all the same: it can't be kept."""
        conversation_id = turn.conversation_id
        begun = self._begun.get(conversation_id)
        error: FastDecodeError | None = output.error
        not_kept: FastDecodeError | None = None
        if begun is not None and begun.turn is turn:
            del self._begun[conversation_id]
            try:
                begun.end(self._conversations, None if error else output.completions[0])
            except FastDecodeError as failed:
                # Only this turn fails, so it isn't the engine's error.
                error = not_kept = RequestError(
                    f"the turn can't be kept, so the conversation is as it was before it: {failed}",
                    code="conversation_not_kept",
                )
        if error is not None:
            # Turns whose R-workers were lost may all be asked again.
            is_its_own = isinstance(error, (RequestError, CapacityError))
            self._failed.setdefault(conversation_id, after_a_failed_turn() if is_its_own else error)
        due, _ = self._order.leave(conversation_id, turn)
        if due is not None:
            self._due.append(due)
        return not_kept

    def cancel_waiting(self) -> None:
        """Remove turns that have not begun. Those that arrive later in their conversations fail."""
        for conversation_id in self._order.conversations():
            if self._order.cut(conversation_id, conversation_id in self._begun):
                self._failed.setdefault(conversation_id, after_a_failed_turn())
        self._due.clear()

    def leave(self) -> None:
        """End all turns that have begun without an answer."""
        for begun in self._begun.values():
            begun.end(self._conversations, None)
        self._begun.clear()

    def text_of(self, turn: Turn) -> str | None:
        """Return the prompt of a turn that has begun, if it was given as text."""
        begun = self._begun.get(turn.conversation_id)
        return None if begun is None else begun.asked.text


class OpenTurns:
    """Turns of many clients. Belongs to the event loop.

    Args:
        thread: An executor of one thread, where ``conversations`` are used: in the order of
            calls, and a slow disk doesn't hold up the loop.
    """

    def __init__(self, conversations: Conversations, thread: Executor) -> None:
        self.conversations = conversations
        self._thread = thread
        self._order: TurnOrder[OpenTurn] = TurnOrder()

    def arrive(self, turn: Turn) -> OpenTurn:
        """Add a turn. Its caller must leave it."""
        arrived = OpenTurn(turn, self)
        if self._order.arrive(turn.conversation_id, arrived):
            arrived.is_due.set_result(None)
        return arrived

    async def forget(self, conversation_id: str) -> bool:
        """End a conversation. A turn under way is answered, but not kept.

        Returns: True if there is such a conversation.
        """
        forget = partial(self.conversations.forget_known, conversation_id)
        return await asyncio.wrap_future(self.act(forget))

    def act(self, do: Callable[[], T]) -> Future[T]:
        """Call ``do`` in the thread of the conversations."""
        return self._thread.submit(do)

    def leave(self, turn: OpenTurn, *, has_failed: bool) -> None:
        """Remove a turn, and let the next one begin. Those after one that has failed fail."""
        due, later = self._order.leave(turn.turn.conversation_id, turn, with_later=has_failed)
        for each in later:
            each.tell(after_a_failed_turn())
        if due is not None:
            due.tell(None)


class OpenTurn:
    """A turn of a client, from its arrival on. Belongs to the event loop."""

    def __init__(self, turn: Turn, turns: OpenTurns) -> None:
        self.turn = turn
        self.is_due: asyncio.Future[FastDecodeError | None]
        """Gets None when the turn may begin, or why it never will."""
        self.is_due = asyncio.get_running_loop().create_future()
        self._turns = turns
        self._history: Future[History] | None = None
        self._begun: BegunTurn | None = None
        self._fold = OutputFold(turn.request_id, None, (), 1)
        self._is_over = False

    def begin(self) -> asyncio.Future[History]:
        """Return the history before the turn, which is due.

        Raises:
            RequestError: If the conversation is over.
        """
        begin = partial(self._turns.conversations.begin, self.turn.conversation_id)
        self._history = self._turns.act(begin)
        return asyncio.wrap_future(self._history)

    def asks(self, history: History, asked: TurnPrompt) -> PromptRequest:
        """Return the turn's request, once its prompt has been made."""
        self._begun = BegunTurn(self.turn, history, asked)
        return self._begun.request

    async def hear(self, deltas: Sequence[Delta]) -> None:
        """Add to the answer. The turn is kept when the call with its last delta returns.

        Raises:
            FastDecodeError: If it can't be kept. Then the conversation is as it was.
        """
        assert self._begun is not None, "a turn without a request has no answer"
        for delta in deltas:
            output = self._fold.add(delta)
            if output is None:
                continue
            self._is_over = True
            end = partial(self._begun.end, self._turns.conversations, output.completions[0])
            kept, has_failed = self._turns.act(end), True
            try:
                # A client that leaves during this leaves after it.
                await asyncio.shield(asyncio.wrap_future(kept))
                has_failed = False
            finally:
                self._turns.leave(self, has_failed=has_failed)

    def leave(self, *, has_failed: bool) -> None:
        """End a turn that failed, or whose client left, without an answer. No effect once over."""
        if self._is_over:
            return
        self._is_over = True
        if self._history is not None:
            with contextlib.suppress(RuntimeError):  # the thread has ended
                self._turns.act(partial(self._give_up, self._history))
        self._turns.leave(self, has_failed=has_failed)

    def _give_up(self, history: Future[History]) -> None:
        """Runs in the thread, after ``begin`` did if it ever will."""
        if not history.cancelled() and history.exception() is None:
            turn = self.turn
            self._turns.conversations.end(turn.conversation_id, turn.name, history.result())

    def tell(self, why_not: FastDecodeError | None) -> None:
        """Let the turn begin, or fail."""
        if not self.is_due.done():
            self.is_due.set_result(why_not)
