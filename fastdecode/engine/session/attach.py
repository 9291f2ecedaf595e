"""R-workers that have kept the caches of a run that was cut off: what they hold
of its sequences becomes kept blocks, with which those start.

So a sequence goes on as any does whose blocks are kept: where it is started,
what it starts with and what makes way when room is short is decided as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np

from fastdecode.core.holders import HolderId, Part, PartId
from fastdecode.core.resuming import HeldSequence, Session
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.stats import AttachedCounts
from fastdecode.schedule.cache.holdings import Holdings
from fastdecode.wire.blocks import TakenOver, TakeOver
from fastdecode.wire.messages import Close

Counts: TypeAlias = "dict[HolderId, dict[PartId, int]]"
"""Tokens of parts, by holder."""


def attach(fleet: HolderPool, cache: Holdings, session: Session) -> AttachedCounts:
    """Ask R-workers what they hold of a resumed session's sequences, keep that
    as blocks, and have the session go on.

    Every R-worker is asked, even about nothing: whatever else it has of the
    session is closed.
    """
    held = session.held
    counts = _keep(fleet, cache, held, _found(fleet, session.number, _wanted(fleet, held)))
    session.begin()
    return counts


def _wanted(fleet: HolderPool, held: Iterable[HeldSequence]) -> Counts:
    """What each holder that is there is asked for."""
    wanted: Counts = {holder: {} for holder in fleet.holders if holder not in fleet.lost}
    for one in held:
        for part in one.parts:
            if part.holder in wanted:
                # The last token that is known runs anyway.
                most = max(0, len(one.token_ids) - 1 - part.first_token)
                wanted[part.holder][part.part_id] = min(part.num_tokens, most)
    return wanted


def _found(fleet: HolderPool, session: int, wanted: Counts) -> Counts:
    """What is there of it. R-workers are told once more what they have said: so
    those that share out the heads have as much as the one of them that had
    least, and nothing of what one of them hadn't."""
    found: Counts = {}
    while wanted:
        answers = _answers(fleet, _ask(fleet, session, wanted))
        wanted = {holder: some for holder, some in answers.items() if some != wanted[holder]}
        found |= answers
    return {holder: some for holder, some in found.items() if holder not in fleet.lost}


def _ask(fleet: HolderPool, session: int, wanted: Counts) -> dict[HolderId, TakeOver]:
    asked = {}
    for holder, counts in wanted.items():
        ids = np.array(list(counts), np.int64)
        asked[holder] = TakeOver(session, ids, np.array(list(counts.values()), np.int32))
        fleet.send(holder, asked[holder])
    return asked


def _answers(fleet: HolderPool, asked: Mapping[HolderId, TakeOver]) -> Counts:
    """Of those that answer, the parts that they have anything of."""
    found: Counts = {}
    while fleet.is_owed:
        received = fleet.receive()
        if received is None:
            continue
        holder, answer = received
        assert isinstance(answer, TakenOver), "nothing else was asked"
        message = asked[holder]
        counts = zip(message.sequence_ids.tolist(), answer.num_tokens.tolist(), strict=True)
        found[holder] = {PartId(part): count for part, count in counts if count >= 0}
    return found


def _keep(
    fleet: HolderPool, cache: Holdings, held: Iterable[HeldSequence], found: Counts
) -> AttachedCounts:
    """Have what was found kept by its keys, and the old sequences closed."""
    num_sequences = num_tokens = num_held = num_held_tokens = 0
    for one in held:
        there: dict[Part, int] = {
            part: found[part.holder][part.part_id]
            for part in one.parts
            if part.part_id in found.get(part.holder, {})
        }
        num_sequences += 1
        num_tokens += len(one.token_ids)
        num_held += any(there.values())
        num_held_tokens += sum(there.values())
        tails = cache.keep_held(one, there)
        for order in cache.stock.take_orders():
            fleet.send(order.holder, order.message)
        for part in there:
            tail = tails.get(part.part_id, b"").hex()
            fleet.send(part.holder, Close(part.part_id, tail=tail))
    return AttachedCounts(num_sequences, num_tokens, num_held, num_held_tokens)
