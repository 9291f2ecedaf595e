"""Tokens that are drawn, and known only later.

A sequence steps with a token that is **coming**. If that is the last one, the step was in vain.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastdecode.core.sequence import COMING, Sequence
from fastdecode.schedule.life.endings import Endings
from fastdecode.schedule.life.events import Drawn
from fastdecode.schedule.life.handing import Handing
from fastdecode.schedule.life.sequences import PendingAction, SequenceRecord, SequenceState


class ComingTokens:
    """Takes in drawn tokens."""

    def __init__(self, endings: Endings, handing: Handing) -> None:
        self._endings, self._handing = endings, handing
        self._scheduler, self._table = endings.scheduler, endings.table

    def expect(self, sequence: Sequence) -> None:
        """Note that a sequence's token is coming. After its last one its cache is not needed."""
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
        """Take tokens that were coming. Their sequences may have been interrupted since."""
        for one in drawn:
            if one.sequence.is_coming:
                one.sequence.token_ids.pop()
                life = self._table.by_sequence.get(one.sequence.sequence_id)
                if life is not None and life.pending is not PendingAction.DROP:
                    self._take(life, one)

    def take_drawn(self, drawn: Iterable[Drawn]) -> None:
        """Take the tokens of an ended step. A sequence whose sibling failed in it takes none."""
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
