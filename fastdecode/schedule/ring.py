"""Who keeps whose replica, and what happens when holders are lost.

R-workers form a ring: the neighbour of one is the next, of the last the first.
A neighbour keeps a replica of the holder's cache, and says up to which step of
each lane it has it (**acked**). Nothing here talks to anybody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.holders import HolderId


@dataclass(frozen=True)
class Copy:
    """One cache, sent whole to whoever comes in a lost holder's place."""

    source: HolderId
    """Where it is sent from."""
    target: HolderId
    owner: HolderId
    """Whose cache it is: the target's own, whose replica the source keeps; or
    the source's own, whose replica the target is to keep."""


@dataclass(frozen=True)
class ResumePoint:
    """The first step of a lane that has to run again, in the order in which
    lanes take turns."""

    lane: int
    step: int


@dataclass(frozen=True)
class RecoveryPlan:
    """What becomes of lost holders."""

    adopted: dict[HolderId, HolderId]
    """Lost holders whose neighbour goes on with the replica, and that neighbour."""
    recomputed: tuple[HolderId, ...]
    """Those whose cache is nowhere: its sequences are recomputed from their tokens."""
    copies: tuple[Copy, ...]
    """That replacements of all lost holders need before the ring is closed again."""
    resume: ResumePoint | None
    """None: nothing goes on from a replica."""
    tell: tuple[HolderId, ...]
    """Holders that have to agree on it, once there is somebody for each: all of
    them, or none."""


def neighbour(holder: HolderId, num_holders: int) -> HolderId:
    """Who keeps its replica.

    Raises:
        ConfigError: nobody else is there.
    """
    if num_holders < 2:
        raise ConfigError(
            Given("replicas", 1),
            " needs a second R-worker, which keeps the copies: add ",
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


def plan_recovery(
    num_holders: int,
    failed: Collection[HolderId],
    acked: Sequence[int],
    without_replica: Collection[HolderId] = (),
) -> RecoveryPlan:
    """What becomes of the holders that are lost, all of them looked at together.

    Args:
        failed: all that are lost and were not recovered yet.
        acked: of each lane, the last step that every neighbour of a failed
            holder has; -1: none.
        without_replica: holders whose neighbour has no whole copy at the
            moment.

    Raises:
        ConfigError: there is a single holder.
    """
    lost = sorted(set(failed))
    adopted: dict[HolderId, HolderId] = {}
    recomputed = []
    for holder in lost:
        keeper = neighbour(holder, num_holders)
        if keeper in failed or holder in without_replica:
            recomputed.append(holder)
        else:
            adopted[holder] = keeper
    copies = [copy for holder in lost for copy in _copies(holder, num_holders, failed, adopted)]
    resume = _resume_point(acked) if adopted else None
    everybody = tuple(HolderId(holder) for holder in range(num_holders))
    return RecoveryPlan(
        adopted, tuple(recomputed), tuple(copies), resume, everybody if adopted else ()
    )


def _copies(
    holder: HolderId,
    num_holders: int,
    failed: Collection[HolderId],
    adopted: dict[HolderId, HolderId],
) -> list[Copy]:
    """For the replacement of a lost holder: its own cache, and the one whose
    replica it is to keep."""
    copies = []
    if holder in adopted:
        copies.append(Copy(adopted[holder], holder, holder))
    before = HolderId((holder - 1) % num_holders)
    if before not in failed:
        copies.append(Copy(before, holder, before))
    return copies


def _resume_point(acked: Sequence[int]) -> ResumePoint:
    """Of all (step, lane) in the order in which they run, the first that wasn't acked."""
    step, lane = min((last + 1, lane) for lane, last in enumerate(acked))
    return ResumePoint(lane, step)
