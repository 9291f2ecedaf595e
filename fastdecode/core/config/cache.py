"""What is kept of requests that are over."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.config.options import check_options, option
from fastdecode.core.errors import ConfigError, Given

PREFIX_CACHES = ("auto", "on", "off")


@dataclass(frozen=True)
class Cache:
    """KV that outlives its requests."""

    prefix_cache: str = option(
        "auto",
        "keep KV blocks of finished requests while there is room, and reuse them for equal "
        "prefixes: on, off; auto: on where the other features allow it",
        choices=PREFIX_CACHES,
        metavar="MODE",
        common=True,
    )
    cache_disk: str | None = option(
        None, "directory where R-workers keep copies of blocks, also across restarts", metavar="DIR"
    )
    cache_disk_gb: float | None = option(
        None, "disk space for each R-worker", low=1e-6, high=1e6, unit="GB", metavar="GB"
    )
    cache_memory_gb: float | None = option(
        None,
        "with --kv-placement gpu: host memory for copies of kept blocks, of each S-worker",
        low=1e-6,
        high=1e6,
        unit="GB",
        metavar="GB",
    )
    swap_threshold: float = option(
        0.25,
        "copy blocks to the lower tier ahead of time while less than this share of blocks is free"
        " or copied",
        low=0.0,
        high=1.0,
        unit="blocks",
        metavar="SHARE",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.cache_disk == "":
            raise ConfigError(Given("cache_disk"), " is empty: give a directory")
        for name in ("cache_disk", "cache_memory_gb"):
            value = getattr(self, name)
            if value is not None and self.prefix_cache == "off":
                raise ConfigError(Given(name, value), " needs ", Given("prefix_cache", "on"))
