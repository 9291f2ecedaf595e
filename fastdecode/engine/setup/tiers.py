"""Kept blocks: what they depend on, and their lower tiers, which are opened
before the first request."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from fastdecode.core.config.cache import Cache
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.holders import HolderId
from fastdecode.core.host.machine import free_memory_bytes
from fastdecode.core.model.block_keys import tier_identity
from fastdecode.core.model.checkpoint import Checkpoint
from fastdecode.core.model.weights_hash import weights_hash
from fastdecode.engine.fleet.greeting import use_tiers
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.setup.resolve import ResolvedConfig


def open_tiers(
    tell: Callable[[str], None],
    fleet: HolderPool,
    holders: Seq[HolderId],
    identity: str,
    checkpoint: Checkpoint,
    *,
    is_memory: bool,
) -> None:
    """Have holders open what they keep beside their caches, for this very model.

    Args:
        tell: told what is being done.
        holders: those that have a lower tier.
        identity: what K and V depend on beside tokens and weights.
        is_memory: it is this process's memory, which ends with it, and need not
            know of weights; else a disk.

    Raises:
        CheckpointError: the weights can't be read.
    """
    if is_memory:
        num_slots, _ = use_tiers(fleet, tier_identity(identity), holders)
        tell(f"kept blocks go to the host's memory, too: room for {num_slots}")
        return
    tell("kept blocks go to disk, too: reading all weights, which they depend on")
    found = tier_identity(f"{identity}/{weights_hash(checkpoint)}")
    num_slots, num_blocks = use_tiers(fleet, found, holders)
    tell(f"kept blocks on disk: {num_blocks} found, room for {num_slots}")


def check_disk(resolved: ResolvedConfig, with_tier: Seq[HolderId]) -> None:
    """Whether a disk that was asked for is anybody's.

    Args:
        with_tier: R-workers that have said that they have a lower tier.

    Raises:
        ConfigError: a disk was asked for, and no rank of the job has one.
    """
    asks = resolved.config.cache.cache_disk is not None
    if resolved.transport == "mpi" and asks and not with_tier:
        raise ConfigError(
            Given("cache_disk"),
            " was given here, and no R-worker has a disk: those of a command of their own "
            "(fastdecode r-worker) are given --cache-disk, --cache-disk-gb and --kv-memory-gb "
            "there",
        )


def host_tier_bytes(cache: Cache, num_s_workers: int) -> int:
    """Of this host's memory, for kept blocks of one device.

    Args:
        num_s_workers: on this host, each of which takes as much.

    Raises:
        ConfigError: the host lacks the memory.
    """
    num_bytes, free_bytes = int((cache.cache_memory_gb or 0) * 1e9), free_memory_bytes()
    if num_bytes * num_s_workers > free_bytes:
        raise ConfigError(
            Given("cache_memory_gb", cache.cache_memory_gb),
            f" for {num_s_workers} S-worker(s) is more than the {free_bytes} bytes that are free "
            "here: lower it",
        )
    return num_bytes


def cache_identity(resolved: ResolvedConfig, checkpoint: Checkpoint) -> str:
    """What K and V of a token depend on beside the tokens.

    The S-worker's kind of device is among it, since blocks on disk may be of
    another run: a GPU rounds otherwise than a CPU, in float32, too. What isn't:
    threads, kernels of one kind of device, and who attends prompts. They add
    the same numbers in another order, as a prompt does that is cut into other
    chunks, and in float32 a request's tokens don't depend on them.
    """
    options = resolved.config
    device = resolved.device.type
    kv = f"{resolved.kv_dtype}{'' if resolved.kv_dtype.is_float else ', keys evened out'}"
    parts = (checkpoint.model_hash, resolved.dtype, kv, device)
    layers = [f"{each.start}:{each.stop}" for each in resolved.layers] * (len(resolved.layers) > 1)
    return "/".join(map(str, (*parts, resolved.max_model_len, options.r_part.block_size, *layers)))
