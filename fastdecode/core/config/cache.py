"""What is kept of requests that are over."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.config.options import check_options, option

PREFIX_CACHES = ("auto", "on", "off")
CACHE_POLICIES = ("retention", "lru", "size-idle")


@dataclass(frozen=True)
class Cache:
    """KV that outlives its requests."""

    prefix_cache: str = option(
        "off",
        "keep KV blocks of requests that are over, as long as there is room, and reuse them where "
        "prompts begin alike: on, off; auto: on, but not with KV on both sides or replicas",
        choices=PREFIX_CACHES,
        metavar="MODE",
    )
    cache_policy: str = option(
        "retention",
        "which kept blocks make room first: those that cost least to compute again for the time "
        "since they were used (retention), those used least recently (lru), or the trailing half "
        "of the conversation with most blocks times idle time (size-idle)",
        choices=CACHE_POLICIES,
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        check_options(self)
