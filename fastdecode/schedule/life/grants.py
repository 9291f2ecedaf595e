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
    """True if nothing of other sequences was open there, or asked for."""


class Grants:
    """Parts that are open, to be opened, or to be enlarged."""

    def __init__(self) -> None:
        self.asked: Final[dict[PartId, Asked]] = {}
        """Parts without an answer."""
        self._num_parts: Counter[HolderId] = Counter()  # asked for or open, on each holder

    def awaits(self, holder: HolderId, part_id: PartId) -> bool:
        """Return True if the holder owes an answer about this part."""
        asked = self.asked.get(part_id)
        return asked is not None and asked.part.holder == holder

    def is_awaited(self, holder: HolderId) -> bool:
        """Return True if the holder owes any answer about a part."""
        return any(asked.part.holder == holder for asked in self.asked.values())

    def ask(self, life: SequenceRecord, part: Part) -> None:
        residence = life.sequence.residence
        assert residence is not None
        own = [one.part_id for one in residence.parts if one.holder == part.holder]
        num_own = len(life.unanswered.intersection(own)) + len(life.opened.keys() & own)
        is_alone = self._num_parts[part.holder] == num_own
        self._num_parts[part.holder] += part.part_id not in life.opened
        self.asked[part.part_id] = Asked(life, part, is_alone)
        life.unanswered.add(part.part_id)

    def forget_asked(self, life: SequenceRecord, holder: HolderId) -> bool:
        """Forget what a lost holder was asked for a sequence. Return True if all parts of that are
        open all the same."""
        residence = life.sequence.residence
        assert residence is not None
        if any(part.part_id not in life.opened for part in residence.parts):
            return False
        for part_id in [i for i in life.unanswered if self.asked[i].part.holder == holder]:
            del self.asked[part_id]
            life.unanswered.remove(part_id)
        return True

    def opened(self, part_id: PartId) -> SequenceRecord:
        """Note that a part is open, or enlarged. Return its sequence."""
        asked = self.asked.pop(part_id)
        asked.life.unanswered.remove(part_id)
        asked.life.opened[part_id] = asked.part
        return asked.life

    def refused(self, part_id: PartId) -> Asked:
        asked = self.asked.pop(part_id)
        asked.life.unanswered.remove(part_id)
        self._num_parts[asked.part.holder] -= part_id not in asked.life.opened
        return asked

    def close(self, life: SequenceRecord) -> list[Part]:
        """Forget the open parts of a sequence. Return them."""
        parts = list(life.opened.values())
        life.opened.clear()
        self._num_parts.subtract(part.holder for part in parts)
        return parts

    def lose(self, life: SequenceRecord, holder: HolderId) -> bool:
        """Forget a sequence's parts on a lost holder. Return True if it had any, or was asked."""
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
        """Recount. ``lives``: of all sequences that are not over."""
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
