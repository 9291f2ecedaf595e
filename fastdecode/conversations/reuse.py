"""Whether a turn of a conversation can go on with KV that its earlier turns left."""

from __future__ import annotations

from dataclasses import replace

from fastdecode.core.cache_use import CacheUse
from fastdecode.core.config.engine import EngineConfig


def why_none(config: EngineConfig) -> str:
    """Why every turn computes its whole conversation again, and what to do;
    empty: turns reuse KV blocks."""
    if config.r_part.kv_placement == "auto":  # it will be one of these, which are alike here
        config = replace(config, r_part=replace(config.r_part, kv_placement="r"))
    if config.keeps_blocks:
        return ""
    if config.cache.prefix_cache == "off":
        reason, mend = "prefix_cache is off", "leave prefix_cache=off out"
    elif config.r_part.replicas:
        reason, mend = "replicas are kept, and no KV blocks beside them", "leave replicas out"
    elif config.s_part.prompt_pp:
        reason, mend = "prompt stages keep no KV blocks", "leave prompt_pp out"
    else:
        reason = f"kv_placement={config.r_part.kv_placement} keeps no KV blocks"
        mend = "use another kv_placement"
    return f"{_NOTHING}{reason}. To reuse KV, {mend}"


def why_none_of(cache: CacheUse, of_all: str) -> str:
    """The same of one turn.

    Args:
        cache: of its request.
        of_all: what ``why_none`` says.
    """
    if of_all or not cache.is_off:
        return of_all
    return f"{_NOTHING}this request's cache is off. To reuse KV, leave cache out"


_NOTHING = (
    "conversation_id is given, but this turn computes the whole conversation again, and so will "
    "the next: "
)
