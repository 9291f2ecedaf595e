"""Greetings of a fleet's holders before the first step, and the KV blocks that they offer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from fastdecode.core.errors import CapacityError, ConfigError, Given
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.fleet.replacements import limited
from fastdecode.engine.fleet.ring import DISK
from fastdecode.schedule.ring import num_offered
from fastdecode.wire.blocks import Inventory, UseTier
from fastdecode.wire.messages import Hello, Welcome


def greet(
    fleet: HolderPool,
    hello: Hello,
    max_blocks: Mapping[HolderId, int] | None = None,
    *,
    among: Iterable[HolderId] | None = None,
) -> dict[HolderId, Welcome]:
    """Send ``Hello`` to every holder's R-worker and return the answers of those that are not lost.
    An R-worker compiles its kernels before it answers, so this may take longer than anything that
    follows.

    Args:
        max_blocks: The most KV blocks that each is to offer.
        among: Holders to greet. All if None.

    Raises:
        ConfigError: If an R-worker lacks the memory for one KV block, or can't hold such a cache.
    """
    welcomes: dict[HolderId, Welcome] = {}
    with fleet.pending.within(fleet.pending.deadlines.while_greeting()):
        for holder in fleet.holders if among is None else among:
            fleet.send(holder, limited(hello, max_blocks or {}, holder))
        while fleet.is_owed:
            received = fleet.receive()
            for error in fleet.gone.values():
                if error.code in (CapacityError.default_code, ConfigError.default_code):
                    raise ConfigError(error.message, code=error.code)
            if received is not None:
                holder, welcome = received
                assert isinstance(welcome, Welcome), "nothing else was asked"
                welcomes[holder] = welcome
    return {x: each for x, each in welcomes.items() if x not in fleet.lost}


def use_tiers(fleet: HolderPool, identity: str, holders: Iterable[HolderId]) -> tuple[int, int]:
    """Open the lower tiers of these holders, and later of their replacements. Wait until all have
    reported; the reports stay in the fleet's moves. Return the blocks that they have room for, and
    that they have, in all."""
    fleet.tier = UseTier(identity)
    for holder in holders:
        fleet.open_tier(holder)
    while fleet.is_owed:
        fleet.receive()
    reports = [news for news in fleet.moves if isinstance(news, Inventory)]
    num_slots = sum(news.num_slots for news in reports if news.is_last)
    return num_slots, sum(len(news.keys) for news in reports)


def offer_for_replicas(
    fleet: HolderPool,
    hello: Hello,
    welcomes: Mapping[HolderId, Welcome],
    keepers: Mapping[HolderId, HolderId],
) -> dict[HolderId, Welcome]:
    """Ask every R-worker that is present to offer what leaves room for the replicas. Replicas on
    disk take no room. ``keepers``: See ``LinkOptions``.

    Raises:
        ConfigError: If an R-worker or a keeper lacks the memory, or the disk, for a replica.
        WorkerError: If a keeper is lost, or does not answer.
    """
    if DISK in keepers.values():
        check_disks(fleet, welcomes)
        return dict(welcomes)
    if keepers:
        return _offer_as_kept(fleet, hello, welcomes, keepers)
    return _offer_halves(fleet, hello, welcomes)


def check_disks(fleet: HolderPool, welcomes: Mapping[HolderId, Welcome]) -> None:
    for holder, welcome in welcomes.items():
        if not welcome.has_tier:
            raise ConfigError(
                Given("replicas", "disk"),
                f" needs a disk, and {fleet.members.peer(holder)} has none: add ",
                Given("cache_disk"),
                " and ",
                Given("cache_disk_gb"),
                " where it is started (R-workers of a command of their own: there)",
            )


def _offer_as_kept(
    fleet: HolderPool,
    hello: Hello,
    welcomes: Mapping[HolderId, Welcome],
    keepers: Mapping[HolderId, HolderId],
) -> dict[HolderId, Welcome]:
    """Limit each holder's KV blocks to the room of its keeper, an R-worker without a holder."""
    members = fleet.members
    rooms = greet(members, hello, among=keepers.values())
    for keeper in keepers.values():
        if keeper not in rooms:
            raise members.gone[members.placement[keeper]]
    # A keeper's own cache, which the session needs, has one block.
    offered = {
        holder: min(welcome.num_blocks, rooms[keepers[holder]].num_blocks - 1)
        for holder, welcome in welcomes.items()
    }
    if min(offered.values()) < 1:
        raise ConfigError(
            "the host has no memory for a replica of a KV block: raise ", Given("kv_memory_gb")
        )
    greet(members, replace(hello, max_blocks=1), among=keepers.values())
    return greet(fleet, hello, offered)


def _offer_halves(
    fleet: HolderPool, hello: Hello, welcomes: Mapping[HolderId, Welcome]
) -> dict[HolderId, Welcome]:
    """Ask every R-worker that is present to offer half of its KV blocks. In the other half it keeps
    its neighbour's replica. One whose cache is resumed has offered half before, and keeps that."""
    present = sorted(welcomes)
    if len(present) == 1 < len(fleet):
        return dict(welcomes)  # all others are lost, and it continues alone
    wholes = [welcomes[x].num_blocks * (1 + welcomes[x].is_resumed) for x in present]
    offered = dict(zip(present, num_offered(wholes), strict=True))
    resumed = {x: welcomes[x].num_blocks for x in present if welcomes[x].is_resumed}
    return greet(fleet, hello, offered | resumed)


def limits(num_blocks: Mapping[HolderId, int], num_workers: int) -> dict[int, int]:
    """Return the most KV blocks that each R-worker may offer when it is greeted later: what it has
    offered, or the smallest offer if it was absent. Return no limits if all were. ``num_workers``:
    Number of R-workers, which are the first holders."""
    offered = {index: num_blocks.get(HolderId(index), 0) for index in range(num_workers)}
    least = min(filter(None, offered.values()), default=0)
    return {index: number or least for index, number in offered.items()} if least else {}
