"""What is kept of requests that are over."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.config.options import check_options, option
from fastdecode.core.errors import ConfigError, Given

PREFIX_CACHES = ("auto", "on", "off")
CACHE_RESTORES = ("pipelined", "whole")
CACHE_POLICIES = ("retention", "lru", "size-idle")


@dataclass(frozen=True)
class Cache:
    """KV that outlives its requests."""

    prefix_cache: str = option(
        "auto",
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
    cache_costs: str | None = option(
        None,
        "a profile of fastdecode calibrate s: what computing a block again costs by the prompts "
        "measured there; default: by the model's floating-point operations. For retention",
        metavar="FILE",
    )
    cache_disk: str | None = option(
        None,
        "a directory of your own where R-workers keep a copy of blocks that may come again, which "
        "are read instead of being computed again; also after a restart",
        metavar="DIR",
    )
    cache_disk_gb: float | None = option(
        None, "how much of it each R-worker takes", low=1e-6, high=1e6, unit="GB", metavar="GB"
    )
    cache_memory_gb: float | None = option(
        None,
        "with --kv-placement gpu, how much of the host's memory keeps a copy of blocks that may "
        "come again",
        low=1e-6,
        high=1e6,
        unit="GB",
        metavar="GB",
    )
    cache_restore: str = option(
        "pipelined",
        "a request whose blocks are on disk starts when the rest is due in time, and each layer "
        "waits for its own (pipelined), or when all are there (whole)",
        choices=CACHE_RESTORES,
        metavar="MODE",
    )
    swap_threshold: float = option(
        0.25,
        "while less than this share of an R-worker's blocks is free, or on its disk, too, blocks "
        "are copied there ahead of time",
        low=0.0,
        high=1.0,
        unit="blocks",
        metavar="SHARE",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.cache_disk == "":
            raise ConfigError(Given("cache_disk"), " is empty: give a directory")
        if (self.cache_disk is None) != (self.cache_disk_gb is None):
            raise ConfigError(
                Given("cache_disk"),
                " and ",
                Given("cache_disk_gb"),
                " belong together: give both, or neither",
            )
        for name in ("cache_disk", "cache_memory_gb"):
            value = getattr(self, name)
            if value is not None and self.prefix_cache == "off":
                raise ConfigError(Given(name, value), " needs ", Given("prefix_cache", "on"))
