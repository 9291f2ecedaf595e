"""The queue of sequences that don't run."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from fastdecode.core.sequence import Sequence


class Waiting:
    """In the order in which they start: those that have run before, and after
    them the others.

    Args:
        order: of each of both, whose value is least comes first; see
            ``Admission``.
    """

    def __init__(self, order: Callable[[Sequence], tuple[int, ...]]) -> None:
        self.order = order
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
        for sequence in sequences:
            if self._new and self.order(sequence) < self.order(self._new[-1]):
                insort(self._new, sequence, key=self.order)
            else:
                self._new.append(sequence)

    def come_back(self, sequence: Sequence) -> None:
        """One that has run waits again, at its old place."""
        insort(self._interrupted, sequence, key=self.order)

    def pop(self) -> None:
        """The head starts."""
        del (self._interrupted or self._new)[0]

    def remove(self, sequence: Sequence) -> None:
        """One of them is over."""
        if sequence in self._interrupted:
            self._interrupted.remove(sequence)
        else:
            self._new.remove(sequence)

    def check_invariants(self) -> None:
        """Everybody is in order, once."""
        for queue in (self._interrupted, self._new):
            places = [self.order(sequence) for sequence in queue]
            assert places == sorted(set(places)), "the queue is out of order"
