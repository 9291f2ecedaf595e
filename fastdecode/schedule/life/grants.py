"""What was asked of holders for sequences, and what they have granted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from fastdecode.core.holders import HolderId, Part, PartId
from fastdecode.schedule.life.sequences import SequenceRecord


@dataclass(frozen=True)
class Asked:
    """A part that is to be opened or enlarged."""

    life: SequenceRecord
    part: Part
    is_alone: bool
    """Nothing of other sequences was open on the holder, or to be opened, when it was asked."""


class Grants:
    """Parts that are open, to be opened, or to be enlarged."""

    def __init__(self) -> None:
        self.asked: Final[dict[PartId, Asked]] = {}
        """Parts of which nothing was heard yet."""
        self._num_parts: Counter[HolderId] = Counter()  # asked for or open, on each holder

    def __len__(self) -> int:
        """Parts of which nothing was heard yet."""
        return len(self.asked)

    def awaits(self, holder: HolderId, part_id: PartId) -> bool:
        """Whether the holder owes an answer about this part."""
        asked = self.asked.get(part_id)
        return asked is not None and asked.part.holder == holder

    def is_awaited(self, holder: HolderId) -> bool:
        """Whether the holder owes any answer about a part."""
        return any(asked.part.holder == holder for asked in self.asked.values())

    def ask(self, life: SequenceRecord, part: Part) -> None:
        """A part is to be opened or enlarged."""
        residence = life.sequence.residence
        assert residence is not None
        own = [one.part_id for one in residence.parts if one.holder == part.holder]
        num_own = len(life.unanswered.intersection(own)) + len(life.opened.keys() & own)
        is_alone = self._num_parts[part.holder] == num_own
        self._num_parts[part.holder] += part.part_id not in life.opened
        self.asked[part.part_id] = Asked(life, part, is_alone)
        life.unanswered.add(part.part_id)

    def forget_asked(self, life: SequenceRecord, holder: HolderId) -> bool:
        """A holder doesn't answer any more what was asked for a sequence.
        Returns whether all of it is open all the same: it was to be enlarged,
        if anything."""
        residence = life.sequence.residence
        assert residence is not None
        if any(part.part_id not in life.opened for part in residence.parts):
            return False
        for part_id in [i for i in life.unanswered if self.asked[i].part.holder == holder]:
            del self.asked[part_id]
            life.unanswered.remove(part_id)
        return True

    def opened(self, part_id: PartId) -> SequenceRecord:
        """The part is open, or enlarged. Returns whose it is."""
        asked = self.asked.pop(part_id)
        asked.life.unanswered.remove(part_id)
        asked.life.opened[part_id] = asked.part
        return asked.life

    def refused(self, part_id: PartId) -> Asked:
        """The part isn't opened, or enlarged."""
        asked = self.asked.pop(part_id)
        asked.life.unanswered.remove(part_id)
        self._num_parts[asked.part.holder] -= part_id not in asked.life.opened
        return asked

    def close(self, life: SequenceRecord) -> list[Part]:
        """All that is open of a sequence isn't any more. Returns what was."""
        parts = list(life.opened.values())
        life.opened.clear()
        self._num_parts.subtract(part.holder for part in parts)
        return parts

    def lose(self, life: SequenceRecord, holder: HolderId) -> bool:
        """A holder is gone. Returns whether it had a part of the sequence, or was to have one."""
        residence = life.sequence.residence
        if residence is None or not residence.is_on(holder):
            return False
        for part in residence.parts:
            if part.holder == holder:
                self._num_parts[holder] -= (
                    part.part_id in life.unanswered or part.part_id in life.opened
                )
                self.asked.pop(part.part_id, None)
                life.unanswered.discard(part.part_id)
                life.opened.pop(part.part_id, None)
        return True

    def check_invariants(self, lives: Iterable[SequenceRecord]) -> None:
        """Recount everything. ``lives``: of all sequences that aren't over."""
        every = list(lives)
        assert {i: life for life in every for i in life.unanswered} == {
            i: one.life for i, one in self.asked.items()
        }
        parts = [part_id for life in every for part_id in life.opened]
        assert len(parts) == len(set(parts)), "two parts with one id"
        held = {i: part.holder for life in every for i, part in life.opened.items()}
        held |= {i: one.part.holder for i, one in self.asked.items()}
        assert Counter(held.values()) == +self._num_parts, "parts are counted that there aren't"
        assert min(self._num_parts.values(), default=0) >= 0
