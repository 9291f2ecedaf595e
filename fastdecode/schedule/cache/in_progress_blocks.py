"""Blocks that are being computed, for which those wait that begin alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fastdecode.core.holders import SequenceId
from fastdecode.schedule.cache.parts import Sharing


class InProgressBlocks:
    """Of all running sequences: the blocks that each is to compute before it
    draws."""

    def __init__(self) -> None:
        self._count: Counter[bytes] = Counter()
        self.computing: set[SequenceId] = set()
        """Sequences that haven't computed all of theirs yet."""

    def __bool__(self) -> bool:
        return bool(self._count)

    def __contains__(self, key: bytes) -> bool:
        return key in self._count

    def expect(self, sequence_id: SequenceId, sharing: Sharing, keys: Iterable[bytes]) -> None:
        """A sequence is going to compute these blocks."""
        sharing.coming.update(keys)
        self._count.update(sharing.coming)
        if sharing.coming:
            self.computing.add(sequence_id)

    def arrived(self, sequence_id: SequenceId, sharing: Sharing, keys: Iterable[bytes]) -> None:
        """It has computed these blocks, or won't."""
        for key in keys:
            if key in sharing.coming:
                sharing.coming.remove(key)
                self._count[key] -= 1
                if not self._count[key]:
                    del self._count[key]
        if not sharing.coming:
            self.computing.discard(sequence_id)

    def check_invariants(self, every: Iterable[tuple[SequenceId, Sharing]]) -> None:
        """Recount. ``every``: running sequence that shares its blocks."""
        sharings = dict(every)
        count: Counter[bytes] = Counter()
        for sharing in sharings.values():
            count.update(sharing.coming)
        assert count == self._count, "blocks that come are miscounted"
        assert self.computing == {i for i, sharing in sharings.items() if sharing.coming}
