"""What a fleet's holders are told and answer before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from fastdecode.core.errors import CapacityError, ConfigError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.wire.blocks import Inventory, UseTier
from fastdecode.wire.messages import Hello, Welcome


def greet(
    fleet: HolderPool,
    hello: Hello,
    max_blocks: Mapping[HolderId, int] | None = None,
    *,
    among: Iterable[HolderId] | None = None,
) -> dict[HolderId, Welcome]:
    """Say Hello to every holder's R-worker and collect the answers of those
    that are there. An R-worker compiles its kernels before it answers, so this
    may take longer than anything that follows.

    Args:
        hello: to all.
        max_blocks: the most that each is to offer; None: as many as it can.
        among: greets these; None: all holders.

    Raises:
        ConfigError: an R-worker hasn't the memory for one KV block, or can't
            hold such a cache.
    """
    with fleet.pending.within(fleet.pending.deadlines.while_greeting()):
        for holder in fleet.holders if among is None else among:
            most = (max_blocks or {}).get(holder, hello.max_blocks)
            fleet.send(holder, replace(hello, max_blocks=most))
        welcomes = _welcomed(fleet)
    return {holder: welcomes[holder] for holder in welcomes if holder not in fleet.lost}


def use_tiers(fleet: HolderPool, identity: str, holders: Iterable[HolderId]) -> tuple[int, int]:
    """Have these open their lower tiers, and later those that come in a lost
    one's place. Waits until they have; what they have is news (``unasked``).

    Args:
        identity: of the blocks that are kept.

    Returns:
        How many blocks they can have, and how many are there, in all.
    """
    message = UseTier(identity)
    fleet.told_first = (message,)
    for holder in holders:
        fleet.send(holder, fleet.tier_of(holder, message))
    while fleet.is_owed:
        fleet.receive()
    told = [news for news in fleet.moves.of_tiers if isinstance(news, Inventory)]
    num_slots = sum(news.num_slots for news in told if news.is_last)
    return num_slots, sum(len(news.keys) for news in told)


def _welcomed(fleet: HolderPool) -> dict[HolderId, Welcome]:
    """What is answered to ``Hello``, which all were told.

    Raises:
        ConfigError: see ``greet``.
    """
    welcomes: dict[HolderId, Welcome] = {}
    while fleet.is_owed:
        received = fleet.receive()
        for error in fleet.gone.values():
            if error.code in (CapacityError.default_code, ConfigError.default_code):
                raise ConfigError(error.message, code=error.code)
        if received is None:
            continue
        holder, welcome = received
        assert isinstance(welcome, Welcome), "nothing else was asked"
        welcomes[holder] = welcome
    return welcomes
