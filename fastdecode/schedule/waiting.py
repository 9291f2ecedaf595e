"""The queue of sequences that don't run."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator

from fastdecode.core.sequence import Sequence


class Waiting:
    """In the order in which they start: those that have run before, and after
    them the others, each in order of arrival. All that have run came before all
    that wait for their first start."""

    def __init__(self) -> None:
        self._interrupted: list[Sequence] = []
        self._new: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._interrupted) + len(self._new)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._interrupted
        yield from self._new

    @property
    def head(self) -> Sequence:
        """Who starts next."""
        return self._interrupted[0] if self._interrupted else self._new[0]

    @property
    def has_head_run(self) -> bool:
        """Whether that one has run before."""
        return bool(self._interrupted)

    def arrive(self, sequences: Iterable[Sequence]) -> None:
        """They have never run."""
        self._new.extend(sequences)

    def come_back(self, sequence: Sequence) -> None:
        """One that has run waits again, at its old place."""
        insort(self._interrupted, sequence, key=lambda s: s.sequence_id)

    def pop(self) -> None:
        """The head starts."""
        del (self._interrupted or self._new)[0]

    def remove(self, sequence: Sequence) -> None:
        """One of them is over."""
        if sequence in self._interrupted:
            self._interrupted.remove(sequence)
        else:
            self._new.remove(sequence)
