"""Reasons for which turns of a conversation reuse no KV of earlier turns."""

from __future__ import annotations

from fastdecode.core.cache_use import CacheUse
from fastdecode.core.config.engine import EngineConfig


def why_none(config: EngineConfig) -> str:
    """Return why every turn computes its whole conversation again, and what to do.

    Returns: "" if turns reuse KV blocks.
    """
    reason = why_no_kv(config)
    return f"{_NOTHING}{reason}" if reason else ""


def why_no_kv(config: EngineConfig) -> str:
    """Return why no turn reuses KV blocks, and what to do. "" if turns reuse them."""
    if config.cache.prefix_cache == "off":
        return "prefix_cache is off. To reuse KV, remove prefix_cache=off"
    return ""


def why_none_of(cache: CacheUse, of_all: str) -> str:
    """Return the same for a turn with this ``cache``, where ``of_all`` is ``why_none``."""
    if of_all or not cache.is_off:
        return of_all
    return f"{_NOTHING}this request's cache is off. To reuse KV, leave cache out"


_NOTHING = (
    "conversation_id is given, but this turn computes the whole conversation again, and so will "
    "the next: "
)
