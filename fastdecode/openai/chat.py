"""A conversation as a request gives it, before it is a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fastdecode.core.sequence import Prompt
from fastdecode.text.chat_template import PLAIN
from fastdecode.text.chats import Rendering


@dataclass(frozen=True)
class Chat:
    """A conversation, to become a prompt by the model's chat template."""

    messages: Sequence[Mapping[str, Any]]
    how: Rendering = PLAIN


Turn: TypeAlias = "Prompt | Chat"
