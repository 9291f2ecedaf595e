"""Tokens that are drawn, and known only later.

A sequence steps on with a token that is **coming**. If it turns out to be the
last, that step was for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastdecode.core.sequence import COMING, Sequence
from fastdecode.schedule.life.endings import Endings
from fastdecode.schedule.life.events import Drawn
from fastdecode.schedule.life.handing import Handing
from fastdecode.schedule.life.sequences import (
    PendingAction,
    SequenceRecord,
    SequenceState,
)


class ComingTokens:
    """Takes in what is drawn, or to be known later."""

    def __init__(self, endings: Endings, handing: Handing) -> None:
        self._endings, self._handing = endings, handing
        self._scheduler, self._table = endings.scheduler, endings.table

    def expect(self, sequence: Sequence) -> None:
        """Its token is coming. After its last it doesn't step any more, and
        nobody needs its cache."""
        life = self._table.by_sequence.get(sequence.sequence_id)
        if life is None or life.pending is not None:
            return
        sequence.token_ids.append(COMING)
        if len(sequence.token_ids) >= life.longest and sequence.request.hands_over:
            self._handing.hold(life)
        elif len(sequence.token_ids) >= life.longest:
            self._scheduler.finish(sequence)
            self._endings.set_aside(life)
            self._table.move(life, SequenceState.DONE)

    def take_awaited(self, drawn: Iterable[Drawn]) -> None:
        """Tokens are known of sequences that may have been interrupted since."""
        for one in drawn:
            if one.sequence.is_coming:
                one.sequence.token_ids.pop()
                life = self._table.by_sequence.get(one.sequence.sequence_id)
                if life is not None and life.pending is not PendingAction.DROP:
                    self._take(life, one)

    def take_drawn(self, drawn: Iterable[Drawn]) -> None:
        """A step's tokens are known as it ends. A sequence whose sibling has
        failed in this very step takes none."""
        for one in drawn:
            life = self._table.by_sequence.get(one.sequence.sequence_id)
            if life is not None and life.pending is None:
                self._take(life, one)

    def _take(self, life: SequenceRecord, drawn: Drawn) -> None:
        sequence = life.sequence
        if drawn.error is not None:
            self._endings.drop(sequence.request.request_id, drawn.error)
        else:
            sequence.token_ids.append(drawn.token_id)
            is_last = len(sequence.token_ids) >= life.longest
            if is_last and drawn.finish_reason is None and sequence.request.hands_over:
                self._handing.park(life)
            elif is_last or drawn.finish_reason is not None:
                self._endings.finish(life, drawn.finish_reason or "length")
            if sequence.request.hands_over:
                self._handing.look(sequence.request.request_id)
