"""The turns of one reading: each begins when the one before it in its
conversation is over, and others go on meanwhile."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from fastdecode.conversations.conversations import Conversations
from fastdecode.conversations.history import History
from fastdecode.conversations.turns import Turn, TurnPrompt, after_a_failed_turn
from fastdecode.core.errors import CapacityError, FastDecodeError, RequestError
from fastdecode.core.sequence import Completion, PromptRequest, RequestOutput


@dataclass(frozen=True)
class BegunTurn:
    """A turn that has begun."""

    turn: Turn
    history: History
    """Before it."""
    asked: TurnPrompt

    @property
    def request(self) -> PromptRequest:
        """What is asked of the engine."""
        turn = self.turn
        # The last token of a history was drawn, and never run.
        cache = replace(turn.cache, turn=max(0, self.asked.num_past - 1))
        return PromptRequest(turn.request_id, self.asked.token_ids, turn.params, cache)

    def end(self, conversations: Conversations, completion: Completion | None) -> None:
        """It is over, with this answer or with none."""
        step = None if completion is None else self.asked.answered(completion)
        turn = self.turn
        conversations.end(turn.conversation_id, turn.name, self.history, step, turn.cache.salt)


class Talk:
    """See the module.

    Args:
        conversations: what they go on from, and are kept in.
    """

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._talking: dict[str, BegunTurn] = {}  # by conversation
        self._busy: dict[str, deque[Turn]] = {}
        """Conversation → its turns that wait for the one that has begun."""
        self._due: deque[Turn] = deque()
        self._failed: dict[str, FastDecodeError] = {}
        """Conversation → why its turns can't go on in this reading."""
        self.num_waiting = 0
        """Turns that wait for another one."""

    def next_due(self) -> Turn | None:
        """A turn that needn't wait any more."""
        return self._due.popleft() if self._due else None

    @property
    def has_due(self) -> bool:
        """Whether there is one."""
        return bool(self._due)

    def waits(self, turn: Turn) -> bool:
        """A turn has arrived. Returns whether it has to wait."""
        waiting = self._busy.get(turn.conversation_id)
        if waiting is None:
            self._busy[turn.conversation_id] = deque()
            return False
        waiting.append(turn)
        self.num_waiting += 1
        return True

    def begin(self, turn: Turn) -> PromptRequest:
        """A turn that has arrived, or was due, as a request.

        Raises:
            FastDecodeError: it comes to nothing: an earlier one did, the
                conversation is over, or there is no such turn.
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
        begun = self._talking[turn.conversation_id] = BegunTurn(turn, history, asked)
        return begun.request

    def end(self, turn: Turn, output: RequestOutput) -> FastDecodeError | None:
        """A turn is over, as this output says. Returns why it comes to nothing
        all the same: it can't be kept."""
        whose = turn.conversation_id
        talking = self._talking.get(whose)
        error, not_kept = output.error, None
        if talking is not None and talking.turn is turn:
            del self._talking[whose]
            try:
                talking.end(self._conversations, None if error else output.completions[0])
            except FastDecodeError as failed:
                error = not_kept = _not_kept(failed)
        if error is not None:
            self._failed.setdefault(whose, _for_later_turns(error))
        waiting = self._busy.pop(whose)
        if waiting:
            self.num_waiting -= 1
            self._due.append(waiting.popleft())
            self._busy[whose] = waiting
        return not_kept

    def cancel_waiting(self) -> None:
        """Forget the turns that haven't begun; those that come after them in
        their conversations fail."""
        for whose, waiting in self._busy.items():
            if waiting:
                self._failed.setdefault(whose, after_a_failed_turn())
            waiting.clear()
        for turn in self._due:
            self._failed.setdefault(turn.conversation_id, after_a_failed_turn())
            del self._busy[turn.conversation_id]
        self._due.clear()
        self.num_waiting = 0

    def leave(self) -> None:
        """Nobody hears any more how turns end: what has begun comes to nothing."""
        for talking in self._talking.values():
            talking.end(self._conversations, None)
        self._talking.clear()

    def text_of(self, turn: Turn) -> str | None:
        """What the prompt of a turn that has begun was given as, if that is text."""
        talking = self._talking.get(turn.conversation_id)
        return None if talking is None else talking.asked.text


def _not_kept(error: FastDecodeError) -> RequestError:
    """What a turn comes to that can't be kept. It alone does, so it isn't the
    engine's error."""
    return RequestError(
        f"the turn can't be kept, so the conversation is as it was before it: {error}",
        code="conversation_not_kept",
    )


def _for_later_turns(error: FastDecodeError) -> FastDecodeError:
    """What a turn's error is to the turns after it. Those whose R-workers were
    lost may all be asked again."""
    if not isinstance(error, (RequestError, CapacityError)):
        return error
    return after_a_failed_turn()
