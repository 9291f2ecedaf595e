"""All conversations of an engine by id: those that continue, and those that are over."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from fastdecode.conversations.store import FILE, ConversationStore, Kept, identity_of
from fastdecode.conversations.turns import History, HistoryStep, digest_of
from fastdecode.core.config.options import check_options, option
from fastdecode.core.errors import ConfigError, FastDecodeError, Given, RequestError
from fastdecode.core.os_errors import explained

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keeping:
    """How conversations are kept, and for how long."""

    conversations: str | None = option(
        None,
        "directory that keeps conversations for the next process; default: they end with this "
        "process",
        metavar="DIR",
        common=True,
    )
    conversation_ttl_s: float | None = option(
        None,
        "end a conversation that was idle this long; default: never",
        low=1e-3,
        high=1e9,
        unit="s",
        metavar="S",
    )
    max_conversations: int = option(
        10_000, "most conversations; beyond it the longest idle ones end", low=1, high=1 << 40
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.conversations == "":
            raise ConfigError(Given("conversations"), " is empty: give a directory")

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> Keeping:
        """Take the options of conversations out of ``options``."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: options.pop(name) for name in names if name in options})

    def open(self, model: Path) -> Conversations:
        """Raises: ConfigError: If the directory can't be used, or another process uses it."""
        if self.conversations is None:
            return Conversations(self)
        directory = Path(self.conversations)
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            os.listdir(directory)
        except OSError as error:
            text = f"can't keep conversations in {directory}: {explained(error)}"
            raise ConfigError(text) from None
        return Conversations(self, ConversationStore(directory / FILE, identity_of(model)))


class Conversations:
    """Histories of conversations. Thread-safe. In a conversation, callers begin a turn only when
    the one before it has ended. ``store`` keeps them beyond the process. ``now`` is the date for
    the templates of a conversation that begins."""

    def __init__(
        self,
        limits: Keeping | None = None,
        store: ConversationStore | None = None,
        clock: Callable[[], float] = time.time,
        now: Callable[[], datetime] = lambda: datetime.now().replace(microsecond=0),
    ) -> None:
        self._limits = limits or Keeping()
        self._store = store
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        # Those idle for longest come first.
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._over: set[bytes] = set()
        self._running: set[str] = set()
        self.on_over: Callable[[Sequence[int], str], None] = lambda token_ids, salt: None
        """Called with the tokens and the salt of each conversation that is over. Must not block."""
        self._unrecorded: list[str] = []
        """Conversations that are over, but could not be removed from the store."""
        if store is not None:
            self._over, found = store.over, sorted(store.kept.items(), key=lambda x: x[1].active_s)
            self._kept.update(found)
            store.kept = {}
        self._expire()

    def begin(self, conversation_id: str) -> History:
        """Begin a turn. Return the history before it, which is empty for a new id. Raises
        RequestError: (code ``conversation_expired``) If the conversation is over."""
        with self._lock:
            self._expire()
            if digest_of(conversation_id) in self._over:
                raise RequestError(
                    "the conversation is over: it was forgotten, idle for too long, or one of too "
                    "many (conversation_ttl_s, max_conversations); begin another one under another "
                    "conversation_id",
                    code="conversation_expired",
                )
            self._running.add(conversation_id)
            kept = self._kept.get(conversation_id)
        return History(self._now()) if kept is None else kept.history

    def leave(self, conversation_id: str) -> None:
        """End a turn that failed: the conversation is as it was before."""
        with self._lock:
            self._running.discard(conversation_id)

    def end(
        self, conversation_id: str, name: str, history: History, step: HistoryStep, salt: str = ""
    ) -> None:
        """End a turn that has added ``step`` to ``history``. ``salt`` is that of its KV blocks.
        Raises FastDecodeError: (code ``output_failed``) If it can't be kept. Then the conversation
        is as it was."""
        with self._lock:
            self._running.discard(conversation_id)
            if digest_of(conversation_id) in self._over:
                self.on_over(history.then(step).token_ids, salt)
                return
            now_s = self._clock()
            if self._store is not None:
                try:
                    self._store.append(conversation_id, name, history, step, now_s)
                except FastDecodeError as error:
                    logger.warning("a turn fails, since it can't be kept: %s", error)
                    raise
            self._kept[conversation_id] = Kept(history.then(step), now_s, salt)
            self._kept.move_to_end(conversation_id)
            self._expire()

    def forget(self, conversation_id: str) -> bool:
        """End a conversation whose first turn has begun, and remove its content. Return True if
        there is one. A new id stays new."""
        with self._lock:
            self._expire()
            is_known = conversation_id in self._kept or (
                conversation_id in self._running and digest_of(conversation_id) not in self._over
            )
            if is_known:
                self._end_for_good([conversation_id])
            return is_known

    def close(self) -> None:
        """Close the store. Safe to call twice."""
        with self._lock:
            if self._store is not None:
                self._store.close()

    def _end_for_good(self, conversation_ids: Sequence[str]) -> None:
        for conversation_id in conversation_ids:
            kept = self._kept.pop(conversation_id, None)
            if kept is not None:
                self.on_over(kept.history.token_ids, kept.salt)
            self._over.add(digest_of(conversation_id))
        if self._store is not None:
            self._store.forget(conversation_ids)

    def _expire(self) -> None:
        """End conversations that were idle for too long, or are too many."""
        ttl_s, now_s = self._limits.conversation_ttl_s, self._clock()
        excess = len(self._kept) - self._limits.max_conversations
        over: list[str] = []
        for conversation_id, kept in self._kept.items():
            is_stale = ttl_s is not None and now_s - kept.active_s > ttl_s
            if not is_stale and len(over) >= excess:
                break
            if conversation_id not in self._running:
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
