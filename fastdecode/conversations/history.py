"""History of a conversation: its tokens, as they were run and drawn. Of chats also the messages,
and which text the tokens spell."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b

from fastdecode.text.chats import Message


@dataclass(frozen=True)
class Spelled:
    """Length and digest of the text that a chat's tokens spell."""

    num_chars: int
    digest: bytes
    end: str = ""
    """The special token that the model ended with, which the text lacks."""

    @classmethod
    def of(cls, text: str, end: str = "") -> Spelled:
        return cls(len(text), _digest(text), end)

    def rest_of(self, text: str) -> str | None:
        """Return what follows in ``text`` after all that the tokens spell. None if it begins
        otherwise."""
        said, rest = text[: self.num_chars], text[self.num_chars :]
        if len(said) < self.num_chars or _digest(said) != self.digest:
            return None
        return rest[len(self.end) :] if rest.startswith(self.end) else None


@dataclass(frozen=True)
class HistoryStep:
    """Addition of one turn."""

    num_kept: int
    """Leading tokens of the history before it that stay."""
    token_ids: tuple[int, ...]
    """Tokens after them: the rest of the prompt, and what was drawn."""
    messages: tuple[Message, ...] = ()
    """New messages of a chat, and the answer."""
    spelled: Spelled | None = None
    """Text of all of a chat's tokens. None if it isn't known."""


@dataclass(frozen=True)
class History:
    """A conversation after a turn. It is never changed."""

    begun: datetime
    """Date for the chat template in all of its turns."""
    token_ids: Sequence[int] = field(default_factory=lambda: array("i"))
    messages: tuple[Message, ...] = ()
    spelled: Spelled | None = None

    def then(self, step: HistoryStep) -> History:
        """Return the history with one more turn."""
        token_ids = array("i", self.token_ids[: step.num_kept])
        token_ids.extend(step.token_ids)
        return History(self.begun, token_ids, self.messages + step.messages, step.spelled)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
