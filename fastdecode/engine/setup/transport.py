"""How R-workers are reached, by the options alone: without torch."""

from __future__ import annotations

from fastdecode.core.config.engine import EngineConfig
from fastdecode.wire.ranks import launched_size


def transport_of(config: EngineConfig) -> str:
    """How R-workers are reached, before it is known whether a sole one needs a thread."""
    if config.r_part.is_on_device:
        return "local"
    if config.cluster.r_worker_addresses:
        return "zmq"
    return "inproc" if launched_size() is None else "mpi"


def has_one_worker(config: EngineConfig) -> bool:
    """A stage; and nobody asks for more lanes than stages, or for replicas or spare ones, which
    it can't have; or has it wait for a disk, while other stages are waited for, too."""
    r_part = config.r_part
    others = r_part.replicas or config.cluster.spare_r_workers
    others = others or (config.cache.cache_disk is not None and config.s_part.pp > 1)
    return (
        r_part.r_workers == 1
        and not others
        and config.batching.lanes in (None, 1, config.s_part.pp)
    )


def shares_thread(config: EngineConfig) -> bool:
    """Whether a sole R-worker works in the S-worker's own thread, if that computes on a CPU."""
    is_here = config.r_part.kv_placement in ("r", "auto") and transport_of(config) == "inproc"
    return is_here and has_one_worker(config)
