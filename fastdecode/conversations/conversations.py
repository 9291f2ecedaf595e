"""All conversations of an engine by id: those that continue, and those that are over."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from typing import Protocol

from fastdecode.conversations.history import History, HistoryStep
from fastdecode.core.errors import FastDecodeError, RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConversationLimits:
    """Limits of how many conversations are kept, and for how long."""

    most: int = 10_000
    """Beyond it, those that were idle for longest are over."""
    ttl_s: float | None = None
    """A conversation that was idle this long is over. None if none is."""


@dataclass(frozen=True)
class Kept:
    """A conversation between two turns."""

    history: History
    active_s: float
    """End of its last turn, in seconds since 1970."""
    salt: str = ""
    """Salt of its last turn's KV blocks, if that ran in this process."""


class TurnStore(Protocol):
    """Keeps conversations beyond the process."""

    def recovered(self) -> tuple[dict[str, Kept], set[bytes]]:
        """Return conversations by their ids, and the digests of ids that are over."""

    def append(
        self, conversation_id: str, name: str, history: History, step: HistoryStep, now_s: float
    ) -> None: ...
    def forget(self, conversation_ids: Sequence[str]) -> None: ...
    def close(self) -> None: ...


class Conversations:
    """Histories of conversations. Thread-safe. In a conversation, callers begin a turn only when
    the one before it has ended.

    Args:
        store: Keeps them beyond the process.
        clock: Seconds since 1970.
        now: Date for the templates of a conversation that begins.
    """

    def __init__(
        self,
        limits: ConversationLimits | None = None,
        store: TurnStore | None = None,
        clock: Callable[[], float] = time.time,
        now: Callable[[], datetime] = lambda: datetime.now().replace(microsecond=0),
    ) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._limits = limits or ConversationLimits()
        self._store = store
        self._clock = clock
        # Those idle for longest come first.
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._over: set[bytes] = set()
        self._talking: set[str] = set()
        self.on_over: Callable[[Sequence[int], str], None] = lambda token_ids, salt: None
        """Called with the tokens and the salt of each conversation that is over. Must not block."""
        self._unrecorded: list[str] = []
        """Conversations that are over, but could not be removed from the store."""
        if store is not None:
            found, self._over = store.recovered()
            self._kept.update(sorted(found.items(), key=lambda item: item[1].active_s))
        self._expire()

    def begin(self, conversation_id: str) -> History:
        """Begin a turn. Return the history before it, which is empty for a new id.

        Raises:
            RequestError: If the conversation is over (code ``conversation_expired``).
        """
        with self._lock:
            self._expire()
            if digest_of(conversation_id) in self._over:
                raise RequestError(
                    "the conversation is over: it was forgotten, idle for too long, or one of too "
                    "many (conversation_ttl_s, max_conversations); begin another one under another "
                    "conversation_id",
                    code="conversation_expired",
                )
            self._talking.add(conversation_id)
            kept = self._kept.get(conversation_id)
        return History(self._now()) if kept is None else kept.history

    def end(
        self,
        conversation_id: str,
        name: str,
        history: History,
        step: HistoryStep | None = None,
        salt: str = "",
    ) -> None:
        """End a turn.

        Args:
            step: What it has added. None if it failed: then the conversation is as it was.
            salt: Salt of its KV blocks.

        Raises:
            FastDecodeError: If it can't be kept (code ``output_failed``). Then the conversation is
                as it was.
        """
        with self._lock:
            self._talking.discard(conversation_id)
            if step is None:
                return
            if digest_of(conversation_id) in self._over:
                self.on_over(history.then(step).token_ids, salt)
                return
            now_s = self._clock()
            if self._store is not None:
                self._store.append(conversation_id, name, history, step, now_s)
            self._kept[conversation_id] = Kept(history.then(step), now_s, salt)
            self._kept.move_to_end(conversation_id)
            self._expire()

    def forget(self, conversation_id: str) -> None:
        """End a conversation and remove its content. A new id stays new."""
        if self.forget_known(conversation_id):
            return
        with self._lock:
            is_over = digest_of(conversation_id) in self._over
        if not is_over:
            logger.warning("conversation %r is unknown: nothing is forgotten", conversation_id)

    def forget_known(self, conversation_id: str) -> bool:
        """End a conversation whose first turn has begun. Returns: True if there is one."""
        with self._lock:
            self._expire()
            is_known = conversation_id in self._kept or (
                conversation_id in self._talking and digest_of(conversation_id) not in self._over
            )
            if is_known:
                self._end_for_good([conversation_id])
            return is_known

    def _end_for_good(self, conversation_ids: Sequence[str]) -> None:
        for conversation_id in conversation_ids:
            kept = self._kept.pop(conversation_id, None)
            if kept is not None:
                self.on_over(kept.history.token_ids, kept.salt)
            self._over.add(digest_of(conversation_id))
        if self._store is not None:
            self._store.forget(conversation_ids)

    def close(self) -> None:
        """Close the store. Safe to call twice."""
        with self._lock:
            if self._store is not None:
                self._store.close()

    def _expire(self) -> None:
        """End conversations that were idle for too long, or are too many."""
        ttl_s, now_s = self._limits.ttl_s, self._clock()
        excess = len(self._kept) - self._limits.most
        over: list[str] = []
        for conversation_id, kept in self._kept.items():
            is_stale = ttl_s is not None and now_s - kept.active_s > ttl_s
            if not is_stale and len(over) >= excess:
                break
            if conversation_id not in self._talking:
                over.append(conversation_id)
        if not over and not self._unrecorded:
            return
        # Other turns must continue though a disk is full.
        try:
            self._end_for_good([*self._unrecorded, *over])
            self._unrecorded = []
        except FastDecodeError as error:
            self._unrecorded += over
            logger.warning("conversations that are over are still kept: %s", error)


def digest_of(conversation_id: str) -> bytes:
    """Return what is kept of an id once its conversation is over."""
    return blake2b(conversation_id.encode(errors="surrogatepass"), digest_size=16).digest()
