"""Records the tokens and places of running sequences, so that another process can
go on with them."""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode.core.holders import Part, PartId
from fastdecode.core.resuming import Session, first_part
from fastdecode.engine.extensions import Extension
from fastdecode.schedule.life.events import Drawn
from fastdecode.schedule.life.sequences import SequenceTable
from fastdecode.schedule.plan import Chunk


class Recorder(Extension):
    """Of one engine.

    Args:
        session: where it is recorded.
        lives: all sequences that aren't over.
    """

    def __init__(self, session: Session, lives: SequenceTable) -> None:
        self._session = session
        self._lives = lives
        self._opened: set[PartId] = set()

    def opened(self, part: Part) -> None:
        """See ``Extension``."""
        self._opened.add(part.part_id)

    def ran(self, chunks: Sequence[Chunk]) -> None:
        """Record where sequences are that ran for the first time since their
        parts were opened."""
        for chunk in chunks if self._opened else ():
            part_id = first_part(chunk.sequence)
            # What is there of one with a gap isn't its first so many tokens.
            if part_id in self._opened and not chunk.sequence.behind_gap:
                assert chunk.sequence.residence is not None
                self._opened.difference_update(x.part_id for x in chunk.sequence.residence.parts)
                self._session.place(chunk.sequence)

    def drew(self, drawn: Sequence[Drawn]) -> None:
        """Record new tokens. The token that ends a text isn't recorded: the process
        that goes on draws it once more, and so knows that it ends there."""
        session = self._session
        session.add([one.sequence for one in drawn if one.finish_reason is None])
        if session.is_long:
            every = self._lives.by_sequence.values()
            session.condense([life.sequence for life in every])
            placed = {x for life in every for x in life.opened}
            self._opened &= placed | {x for life in every for x in life.unanswered}
