"""Tells a session what is known of the sequences that run."""

from __future__ import annotations

from collections.abc import Iterable

from fastdecode.core.holders import PartId
from fastdecode.core.resuming import Session, first_part
from fastdecode.schedule.life.events import Drawn
from fastdecode.schedule.life.lives import Lives
from fastdecode.schedule.plan import Chunk


class Recorder:
    """Of one engine.

    Args:
        session: is told; None: nobody is.
        lives: all sequences that aren't over.
    """

    def __init__(self, session: Session | None, lives: Lives) -> None:
        self._session = session
        self._lives = lives
        self._opened: set[PartId] = set()

    def opened(self, part_id: PartId) -> None:
        """A part has been asked for."""
        if self._session is not None:
            self._opened.add(part_id)

    def stepped(self, chunks: Iterable[Chunk]) -> None:
        """A step is over that some sequences may have been in for the first
        time since their parts were asked for. Its tokens aren't drawn yet."""
        if self._session is None or not self._opened:
            return
        for chunk in chunks:
            part_id = first_part(chunk.sequence)
            # What is there of one with a gap isn't its first so many tokens.
            if part_id in self._opened and not chunk.sequence.behind_gap:
                assert chunk.sequence.residence is not None
                self._opened.difference_update(x.part_id for x in chunk.sequence.residence.parts)
                self._session.place(chunk.sequence)

    def drew(self, drawn: Iterable[Drawn]) -> None:
        """Sequences have more tokens, those that the lifecycle has taken in. What
        ends a text isn't recorded: whoever goes on draws it once more, and so
        knows what it ends."""
        session = self._session
        if session is None:
            return
        session.add([one.sequence for one in drawn if one.finish_reason is None])
        if session.is_long:
            every = self._lives.by_sequence.values()
            session.condense([life.sequence for life in every])
            placed = {x for life in every for x in life.opened}
            self._opened &= placed | {x for life in every for x in life.unanswered}
