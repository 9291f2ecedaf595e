"""Sequences that start: what each begins with, and the kept blocks for which it
waits before it is opened."""

from __future__ import annotations

from msgspec.structs import replace

from fastdecode.core.sequence import shifted
from fastdecode.schedule.life.endings import Endings
from fastdecode.schedule.life.events import Ask, Instruction
from fastdecode.schedule.life.grants import Grants
from fastdecode.schedule.life.handing import Handing
from fastdecode.schedule.life.restores import Restores
from fastdecode.schedule.life.sequences import (
    PendingAction,
    SequenceRecord,
    SequenceState,
    SequenceTable,
)
from fastdecode.schedule.plan import Start
from fastdecode.wire.blocks import Done, Open, Progress, words_of


class Starting:
    """See the module.

    Args:
        restores: who waits for blocks that are fetched, and for how long.
        table, grants, endings: of all sequences.
        handing: of those that come from elsewhere.
        out: where instructions go.
    """

    def __init__(
        self,
        restores: Restores,
        table: SequenceTable,
        grants: Grants,
        endings: Endings,
        handing: Handing,
        out: list[Instruction],
    ) -> None:
        self.restores = restores
        self._handing = handing
        self._table = table
        self._grants = grants
        self._endings = endings
        self._out = out

    def start(self, life: SequenceRecord, start: Start) -> None:
        """A sequence has its place: it is opened, or waits for blocks."""
        sequence = life.sequence
        life.sources = start.sources
        if start.parent is not None and sequence.sources:
            self._handing.started(life)
        if start.parent is None and not start.sources:
            self._table.counts.num_cached_prompt_tokens += start.num_shared_tokens
            self._table.counts.num_gap_tokens += len(start.gap)
            if life.state is SequenceState.WAITING:
                sequence.num_reused = min(start.num_shared_tokens, sequence.num_prompt_tokens)
        num_leading = start.num_shared_tokens - len(start.behind_gap)
        self._table.cache(life, num_leading, start.behind_gap)
        sequence.residence = start.residence
        if not start.awaits:
            self._open(life, start)
            return
        self._table.move(life, SequenceState.FETCHING)
        self.restores.begin(life, start)
        self._table.tell(life, "waits for kept blocks")

    def hear(self, event: Progress | Done) -> None:
        """Whoever waits for blocks goes on, or starts again without those that
        didn't come."""
        outcome = self.restores.hear(event)
        for life, start in outcome.failed:
            self._start_again(life, start)
        for life, start in outcome.ready:
            self._open(life, start)

    def _open(self, life: SequenceRecord, start: Start) -> None:
        """All that it starts with is there, or due."""
        self._table.move(life, SequenceState.RESERVING)
        parent = start.parent
        for index, part in enumerate(start.residence.parts):
            self._grants.ask(life, part)
            num_shared = min(start.num_shared_tokens - part.first_token, part.num_tokens)
            opened = Open(part.part_id, part.num_tokens)
            if parent is not None and parent.residence is not None and num_shared > 0:
                parent_id = parent.residence.parts[index].part_id
                opened = replace(opened, num_tokens=num_shared, parent_id=parent_id)
            elif parent is None and num_shared > 0 and not start.sources:
                gap = shifted(start.gap, -part.first_token)
                opened = replace(
                    opened,
                    num_tokens=num_shared + len(gap),
                    keys=words_of(start.kept[index]),
                    gap_start=gap.start,
                    gap_stop=gap.stop,
                )
            self._out.append(Ask(part, opened))
        self._table.tell(life, f"opening on {', '.join(map(str, start.residence.holders))}")

    def _start_again(self, life: SequenceRecord, start: Start) -> None:
        self._table.tell(life, "blocks that it waited for didn't come")
        self._table.counts.num_cached_prompt_tokens -= start.num_shared_tokens
        self._table.counts.num_gap_tokens -= len(start.gap)
        life.sequence.num_reused = 0
        self._table.set_pending(life, PendingAction.REQUEUE)
        self._endings.settle(life)
