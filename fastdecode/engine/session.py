"""Sessions: what a run records of its sequences, and what R-workers have kept of a run that was
cut off. That becomes kept blocks, with which sequences start as any do whose blocks are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TypeAlias

import numpy as np

from fastdecode.core.holders import HolderId, Part, PartId
from fastdecode.core.resuming import HeldSequence, Session, first_part
from fastdecode.engine.extensions import Extension
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.stats import AttachedCounts
from fastdecode.schedule.cache.holdings import Holdings
from fastdecode.schedule.life.events import Drawn
from fastdecode.schedule.life.sequences import SequenceTable
from fastdecode.schedule.plan import Chunk
from fastdecode.wire.blocks import TakenOver, TakeOver
from fastdecode.wire.messages import Close

Counts: TypeAlias = "dict[HolderId, dict[PartId, int]]"
"""Tokens of parts, by holder."""


def attach(fleet: HolderPool, cache: Holdings, session: Session) -> AttachedCounts:
    """Ask R-workers what they hold of a resumed session's sequences, keep that as blocks, and
    continue the session.

    Every R-worker is asked, even about nothing: whatever else it has of the session is closed.
    """
    wanted: Counts = {holder: {} for holder in fleet.holders if holder not in fleet.lost}
    for one in session.held:
        for part in one.parts:
            if part.holder in wanted:
                # The last token that is known runs anyway.
                most = max(0, len(one.token_ids) - 1 - part.first_token)
                wanted[part.holder][part.part_id] = min(part.num_tokens, most)
    counts = _keep(fleet, cache, session.held, _found(fleet, session.number, wanted))
    session.begin()
    return counts


def _found(fleet: HolderPool, session: int, wanted: Counts) -> Counts:
    """Return what R-workers have of it. They are asked once more for what they answered: so
    those that share out the heads keep what the least of them had."""
    found: Counts = {}
    while wanted:
        for holder, asked in wanted.items():
            ids, most = np.array(list(asked), np.int64), np.array(list(asked.values()), np.int32)
            fleet.send(holder, TakeOver(session, ids, most))
        answers: Counts = {}
        while fleet.is_owed:
            if (received := fleet.receive()) is not None:
                holder, answer = received
                assert isinstance(answer, TakenOver), "nothing else was asked"
                counts = zip(wanted[holder], answer.num_tokens.tolist(), strict=True)
                answers[holder] = {part: count for part, count in counts if count >= 0}
        wanted = {holder: some for holder, some in answers.items() if some != wanted[holder]}
        found |= answers
    return {holder: some for holder, some in found.items() if holder not in fleet.lost}


def _keep(
    fleet: HolderPool, cache: Holdings, held: Iterable[HeldSequence], found: Counts
) -> AttachedCounts:
    """Keep what was found by its keys, and close the old sequences."""
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


class Recorder(Extension):
    """Records the tokens and places of running sequences, so that another process can
    continue them.
    """

    def __init__(self, session: Session, lives: SequenceTable) -> None:
        self._session = session
        self._lives = lives
        self._opened: set[PartId] = set()

    def opened(self, part: Part) -> None:
        self._opened.add(part.part_id)

    def ran(self, chunks: Seq[Chunk]) -> None:
        """Record where sequences are that ran for the first time since their parts were opened."""
        for chunk in chunks if self._opened else ():
            part_id = first_part(chunk.sequence)
            # What one with a gap has cached isn't its first tokens.
            if part_id in self._opened and not chunk.sequence.behind_gap:
                assert chunk.sequence.residence is not None
                self._opened.difference_update(x.part_id for x in chunk.sequence.residence.parts)
                self._session.place(chunk.sequence)

    def drew(self, drawn: Seq[Drawn]) -> None:
        """Record new tokens. The token that ends a text isn't recorded: the process
        that continues draws it once more, and so knows that it ends there."""
        session = self._session
        session.add([one.sequence for one in drawn if one.finish_reason is None])
        if session.is_long:
            every = self._lives.by_sequence.values()
            session.condense([life.sequence for life in every])
            placed = {x for life in every for x in life.opened}
            self._opened &= placed | {x for life in every for x in life.unanswered}
