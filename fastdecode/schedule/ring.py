"""Who keeps whose replica, and how many KV blocks each R-worker may offer.

R-workers form a ring: the neighbour of one is the next, of the last the first.
A neighbour keeps a replica of the holder's cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.holders import HolderId


def neighbour(
    holder: HolderId, num_holders: int, *, on_disk: bool = False, num_spares: int = 0
) -> HolderId:
    """Return the holder that keeps the replica of ``holder``, or restores it from its file.

    Raises:
        ConfigError: If there is no second holder. Standby R-workers hold nothing.
    """
    if num_holders < 2:
        role = "restores a lost one's KV from its file" if on_disk else "keeps the copies"
        standby = ", and a standby R-worker does not" if num_spares else ""
        raise ConfigError(
            Given("replicas", "disk") if on_disk else Given("replicas"),
            f" needs a second R-worker, which {role}{standby}: add ",
            Given("r_workers", 2),
            " (or a second R-worker's address or rank), or choose ",
            Given("replicas", 0),
        )
    return HolderId((holder + 1) % num_holders)


def num_offered(num_blocks: Sequence[int]) -> tuple[int, ...]:
    """Blocks of each holder's own cache, where each R-worker could offer
    ``num_blocks`` without replicas: half of what both it and its neighbour have,
    so that the replica takes all that the cache does.

    Raises:
        ConfigError: a single R-worker, or one that hasn't two blocks.
    """
    offered = []
    for index, blocks in enumerate(num_blocks):
        other = num_blocks[neighbour(HolderId(index), len(num_blocks))]
        offered.append(min(blocks, other) // 2)
        if not offered[-1]:
            raise ConfigError(
                f"R-worker {index} and its neighbour have {min(blocks, other)} KV block(s), too "
                "few for a cache and a replica: give R-workers more memory (",
                Given("kv_memory_gb"),
                ")",
            )
    return tuple(offered)


def num_shared(num_blocks: Sequence[int], block_bytes: Sequence[int]) -> int:
    """Blocks of everybody's own cache, where all have the same tokens, each
    other heads of them: as many as every R-worker has room for beside its
    neighbour's replica.

    Args:
        num_blocks: that each could offer without replicas.
        block_bytes: of each one's blocks, by its share of the heads.

    Raises:
        ConfigError: a single R-worker, or one that hasn't the memory for a
            block of its own and one of its neighbour's.
    """
    neighbour(HolderId(0), len(num_blocks))
    guests = [block_bytes[-1], *block_bytes[:-1]]  # whose replica each keeps: the one before it
    sizes = zip(num_blocks, block_bytes, guests, strict=True)
    least = min(blocks * own // (own + guest) for blocks, own, guest in sizes)
    if not least:
        raise ConfigError(
            "an R-worker has no memory for a KV block and a replica of its neighbour's: give "
            "R-workers more memory (--kv-memory-gb)"
        )
    return least
