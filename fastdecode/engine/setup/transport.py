"""How R-workers are reached, by the options alone: without torch."""

from __future__ import annotations

from fastdecode.core.config.engine import EngineConfig
from fastdecode.wire.ranks import launched_size


def transport_of(config: EngineConfig) -> str:
    """Return how R-workers are reached. A sole one may need no thread instead of ``inproc``."""
    if config.r_part.is_on_device:
        return "local"
    if config.cluster.r_worker_addresses:
        return "zmq"
    return "inproc" if launched_size() is None else "mpi"


def has_one_worker(config: EngineConfig) -> bool:
    """Return True if each stage has a single R-worker, which can share the S-worker's thread: not
    with more lanes than stages, replicas, spare ones, or a disk beside other stages."""
    r_part = config.r_part
    others = r_part.replicas or config.cluster.spare_r_workers
    others = others or (config.cache.cache_disk is not None and config.s_part.pp > 1)
    return (
        r_part.r_workers == 1
        and not others
        and config.batching.lanes in (None, 1, config.s_part.pp)
    )


def shares_thread(config: EngineConfig) -> bool:
    """Return True if a sole R-worker works in the S-worker's thread, if that uses a CPU."""
    is_here = config.r_part.kv_placement in ("r", "auto") and transport_of(config) == "inproc"
    return is_here and has_one_worker(config)
