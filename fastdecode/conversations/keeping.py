"""Options of conversations, declared once."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fastdecode.conversations.conversations import ConversationLimits, Conversations
from fastdecode.conversations.store import FILE, ConversationStore, identity_of
from fastdecode.core.config.options import check_options, option
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.os_errors import explained


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
        ConversationLimits().most,
        "most conversations; beyond it the longest idle ones end",
        low=1,
        high=1 << 40,
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
        limits = ConversationLimits(self.max_conversations, self.conversation_ttl_s)
        if self.conversations is None:
            return Conversations(limits)
        directory = Path(self.conversations)
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            os.listdir(directory)
        except OSError as error:
            raise ConfigError(
                f"can't keep conversations in {directory}: {explained(error)}"
            ) from None
        return Conversations(limits, ConversationStore(directory / FILE, identity_of(model)))
