"""The ring of R-workers, each of which keeps a replica of the one before it, and the KV blocks that
each may offer."""

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
    """Return the blocks of each holder's own cache: half of what both its R-worker and the
    neighbour have, so that the replica has room for all of it.

    Args:
        num_blocks: blocks that each R-worker could offer without replicas.

    Raises:
        ConfigError: If there is a single R-worker, or one without two blocks.
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
    """Return the blocks of each cache where all have the same tokens, each other heads of them: as
    many as every R-worker has room for beside a replica.

    Args:
        num_blocks: blocks that each could offer without replicas.
        block_bytes: bytes of each one's block, by its share of the heads.

    Raises:
        ConfigError: If there is a single R-worker, or one without memory for both blocks.
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
