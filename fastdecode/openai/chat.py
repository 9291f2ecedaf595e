"""A conversation as a request gives it, before it is a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fastdecode.core.sequence import Prompt


@dataclass(frozen=True)
class Chat:
    """A conversation, to become a prompt by the model's chat template."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    """More names for the template."""
    tools: Sequence[Mapping[str, Any]] = ()
    """That the model may call, as the template takes them."""


Turn: TypeAlias = "Prompt | Chat"
