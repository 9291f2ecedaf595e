"""What a conversation has come to: its tokens, as they were run and drawn, and
of chats its messages and what text the tokens spell."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b

from fastdecode.text.chats import Message


@dataclass(frozen=True)
class Spelled:
    """The text that a chat's tokens spell: enough to find out whether another
    text goes on from it."""

    num_chars: int
    digest: bytes
    end: str = ""
    """The special token that the model ended with, which the text lacks."""

    @classmethod
    def of(cls, text: str, end: str = "") -> Spelled:
        return cls(len(text), _digest(text), end)

    def rest_of(self, text: str) -> str | None:
        """What comes in a text after all that the tokens spell; None: it doesn't
        begin like that."""
        said, rest = text[: self.num_chars], text[self.num_chars :]
        if len(said) < self.num_chars or _digest(said) != self.digest:
            return None
        return rest[len(self.end) :] if rest.startswith(self.end) else None


@dataclass(frozen=True)
class HistoryStep:
    """What one turn has added to a conversation."""

    num_kept: int
    """Leading tokens of the history before it that stay."""
    token_ids: tuple[int, ...]
    """That follow them: the rest of its prompt, and what was drawn."""
    messages: tuple[Message, ...] = ()
    """Of chats: the new ones, and the answer."""
    spelled: Spelled | None = None
    """Of chats: what all tokens spell; None: it isn't known."""


@dataclass(frozen=True)
class History:
    """Of a conversation whose turns so far are over. It isn't changed: who goes
    on gets another one."""

    begun: datetime
    """What chat templates are told, whenever a turn comes."""
    token_ids: Sequence[int] = field(default_factory=lambda: array("i"))
    messages: tuple[Message, ...] = ()
    spelled: Spelled | None = None

    def then(self, step: HistoryStep) -> History:
        """With one turn more."""
        token_ids = array("i", self.token_ids[: step.num_kept])
        token_ids.extend(step.token_ids)
        return History(self.begun, token_ids, self.messages + step.messages, step.spelled)


def _digest(text: str) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
