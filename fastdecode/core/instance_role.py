"""What instances are given to do."""

from __future__ import annotations

from enum import Enum


class InstanceRole(Enum):
    """What an instance is given; nothing else tells it from others."""

    PREFILL = "prefill"
    """Prompts, with which others go on."""
    DECODE = "decode"
    """Requests whose prompts others have run."""
    BOTH = "both"
    """Whole requests; prompts alone where it has no room for more."""

    @property
    def prefills(self) -> bool:
        return self is not InstanceRole.DECODE

    @property
    def decodes(self) -> bool:
        return self is not InstanceRole.PREFILL
