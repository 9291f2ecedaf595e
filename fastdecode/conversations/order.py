"""Order of turns: each begins when the one before it in its conversation is over."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import TypeVar

from fastdecode.conversations.conversations import Conversations
from fastdecode.conversations.turns import History, Turn, TurnPrompt, after_a_failed_turn
from fastdecode.core.delta import Delta, OutputFold
from fastdecode.core.errors import CapacityError, FastDecodeError, RequestError
from fastdecode.core.sequence import Completion, PromptRequest, RequestOutput

T = TypeVar("T")


@dataclass(frozen=True)
class BegunTurn:
    turn: Turn
    history: History
    asked: TurnPrompt

    @property
    def request(self) -> PromptRequest:
        turn = self.turn
        # The last token of a history was drawn, and never run.
        cache = replace(turn.cache, turn=max(0, self.asked.num_past - 1))
        return PromptRequest(turn.request_id, self.asked.token_ids, turn.params, cache)

    def end(self, conversations: Conversations, completion: Completion) -> None:
        turn, step = self.turn, self.asked.answered(completion)
        conversations.end(turn.conversation_id, turn.name, self.history, step, turn.cache.salt)


class ReaderTurns:
    """Turns of one reader. After a failed turn no later one of its conversation begins."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._lines: dict[str, deque[Turn]] = {}
        """Turns of each conversation that aren't over. The first one may begin."""
        self._begun: dict[str, BegunTurn] = {}
        self._failed: dict[str, FastDecodeError] = {}
        """Conversation → why no more turns of it begin."""
        self.due: deque[Turn] = deque()
        """Turns that waited, and may begin."""
        self.num_waiting = 0

    def waits(self, turn: Turn) -> bool:
        """Add a turn. Returns: True if it has to wait."""
        line = self._lines.setdefault(turn.conversation_id, deque())
        line.append(turn)
        self.num_waiting += len(line) > 1
        return len(line) > 1

    def begin(self, turn: Turn) -> BegunTurn:
        """Begin a turn. Raises FastDecodeError: If an earlier one failed, or it can't follow."""
        conversation_id = turn.conversation_id
        if (failed := self._failed.get(conversation_id)) is not None:
            raise failed
        history = self._conversations.begin(conversation_id)
        try:
            asked = turn.prompter(history)
        except BaseException:
            self._conversations.leave(conversation_id)
            raise
        self._begun[conversation_id] = BegunTurn(turn, history, asked)
        return self._begun[conversation_id]

    def end(self, turn: Turn, output: RequestOutput) -> FastDecodeError | None:
        """End a turn with its output. Returns: Why it failed all the same: it can't be kept."""
        conversation_id, error = turn.conversation_id, output.error
        not_kept: FastDecodeError | None = None
        begun = self._begun.get(conversation_id)
        if begun is not None and begun.turn is turn:
            del self._begun[conversation_id]
            try:
                if error is None:
                    begun.end(self._conversations, output.completions[0])
                else:
                    self._conversations.leave(conversation_id)
            except FastDecodeError as failed:
                # Only this turn fails, so it isn't the engine's error.
                why = f"the turn can't be kept, so the conversation is as before it: {failed}"
                error = not_kept = RequestError(why, code="conversation_not_kept")
        if error is not None:
            # Turns whose R-workers were lost may all be asked again.
            is_its_own = isinstance(error, (RequestError, CapacityError))
            self._failed.setdefault(conversation_id, after_a_failed_turn() if is_its_own else error)
        line = self._lines.get(conversation_id)
        if line and line[0] is turn:
            line.popleft()
            if line:
                self.due.append(line[0])
                self.num_waiting -= 1
            else:
                del self._lines[conversation_id]
        return not_kept

    def cancel_waiting(self) -> None:
        """Remove turns that have not begun. Those that arrive later in their conversations fail."""
        for conversation_id, line in list(self._lines.items()):
            begun = self._begun.get(conversation_id)
            if begun is None or len(line) > 1:
                self._failed.setdefault(conversation_id, after_a_failed_turn())
            if begun is None:
                del self._lines[conversation_id]
            else:
                self._lines[conversation_id] = deque([begun.turn])
        self.num_waiting = 0
        self.due.clear()

    def leave(self) -> None:
        """End all turns that have begun without an answer."""
        for conversation_id in self._begun:
            self._conversations.leave(conversation_id)
        self._begun.clear()


class OpenTurns:
    """Turns of many clients. Belongs to the event loop. ``conversations`` are used in ``thread``,
    an executor of one thread: a slow disk doesn't hold up the loop."""

    def __init__(self, conversations: Conversations, thread: Executor) -> None:
        self.conversations = conversations
        self._thread = thread
        self._lines: dict[str, list[OpenTurn]] = {}
        """Turns of each conversation that aren't over. The first one may begin."""

    def arrive(self, turn: Turn) -> OpenTurn:
        """Add a turn. Its caller must leave it."""
        line = self._lines.setdefault(turn.conversation_id, [])
        line.append(OpenTurn(turn, self))
        if len(line) == 1:
            line[0].is_due.set_result(None)
        return line[-1]

    def act(self, do: Callable[..., T], *given: object) -> Future[T]:
        """Call ``do`` in the thread of the conversations."""
        return self._thread.submit(do, *given)

    def leave(self, turn: OpenTurn, *, has_failed: bool) -> None:
        """Remove a turn, and let the next one begin. Those after one that has failed fail."""
        conversation_id = turn.turn.conversation_id
        line = self._lines.get(conversation_id, [])
        if turn not in line:
            return  # it was removed with one before it
        place = line.index(turn)
        if has_failed:
            for each in line[place + 1 :]:
                each.notify(after_a_failed_turn())
            del line[place + 1 :]
        del line[place]
        if not line:
            del self._lines[conversation_id]
        elif place == 0:
            line[0].notify(None)


class OpenTurn:
    """A turn of a client, from its arrival on. Belongs to the event loop."""

    is_due: asyncio.Future[FastDecodeError | None]
    """Gets None when the turn may begin, or why it never will."""

    def __init__(self, turn: Turn, turns: OpenTurns) -> None:
        self.turn, self._turns = turn, turns
        self.is_due = asyncio.get_running_loop().create_future()
        self._has_begun = False
        self._begun: BegunTurn | None = None
        self._fold = OutputFold(turn.request_id, None, (), 1)
        self._is_over = False

    def begin(self) -> asyncio.Future[History]:
        """Return the history before the turn. Raises RequestError: If the conversation is over."""
        self._has_begun = True
        begin = self._turns.conversations.begin
        return asyncio.wrap_future(self._turns.act(begin, self.turn.conversation_id))

    def asks(self, history: History, asked: TurnPrompt) -> PromptRequest:
        """Return the turn's request, once its prompt has been made."""
        self._begun = BegunTurn(self.turn, history, asked)
        return self._begun.request

    async def add(self, deltas: Sequence[Delta]) -> None:
        """Add to the answer. The turn is kept when the call with its last delta returns. Raises
        FastDecodeError: If it can't be kept. Then the conversation is as it was."""
        assert self._begun is not None, "a turn without a request has no answer"
        for delta in deltas:
            output = self._fold.add(delta)
            if output is None:
                continue
            self._is_over = True
            end = self._begun.end, self._turns.conversations, output.completions[0]
            kept = asyncio.wrap_future(self._turns.act(*end))
            try:
                await asyncio.wait({kept})
            except asyncio.CancelledError:  # a client that leaves during this leaves after it
                await asyncio.wait({kept})
                raise
            finally:
                has_failed = not kept.done() or kept.cancelled() or kept.exception() is not None
                self._turns.leave(self, has_failed=has_failed)
            kept.result()

    def leave(self, *, has_failed: bool) -> None:
        """End a turn without an answer: it failed, or its client left. No effect once over."""
        if self._is_over:
            return
        self._is_over = True
        if self._has_begun:
            with contextlib.suppress(RuntimeError):  # the thread has ended
                # It runs after ``begin`` did, if that ever will.
                self._turns.act(self._turns.conversations.leave, self.turn.conversation_id)
        self._turns.leave(self, has_failed=has_failed)

    def notify(self, why_not: FastDecodeError | None) -> None:
        if not self.is_due.done():
            self.is_due.set_result(why_not)
