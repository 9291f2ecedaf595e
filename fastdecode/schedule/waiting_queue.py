"""The queue of sequences that don't run."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator

from fastdecode.core.sequence import Sequence

Order = Callable[[Sequence], tuple[int, ...]]


class WaitingQueue:
    """In the order in which they start: sequences that have run before, then
    the new ones.

    Arriving, leaving and looking for a sequence compare it with O(log n) others.

    Args:
        order: the least starts first, among those that have run and among the
            new; unique, and constant while a sequence waits. See ``Admission``.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        # Sorted. An insertion or a removal moves 8 bytes for each sequence behind it.
        self._interrupted: list[Sequence] = []
        self._new: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._interrupted) + len(self._new)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._interrupted
        yield from self._new

    @property
    def head(self) -> Sequence:
        """The sequence that starts next."""
        return self._interrupted[0] if self._interrupted else self._new[0]

    @property
    def has_head_run(self) -> bool:
        """Whether the head has run before."""
        return bool(self._interrupted)

    def arrive(self, sequences: Iterable[Sequence]) -> None:
        """New sequences join the queue."""
        for sequence in sequences:
            if self._new and self._order(sequence) < self._order(self._new[-1]):
                insort(self._new, sequence, key=self._order)
            else:
                self._new.append(sequence)

    def come_back(self, sequence: Sequence) -> None:
        """A sequence that has run waits again, at its old place."""
        insort(self._interrupted, sequence, key=self._order)

    def pop(self) -> None:
        """The head starts."""
        del (self._interrupted or self._new)[0]

    def remove(self, sequence: Sequence) -> None:
        """A sequence of the queue is over.

        Raises:
            ValueError: it doesn't wait.
        """
        for queue in (self._interrupted, self._new):
            place = bisect_left(queue, self._order(sequence), key=self._order)
            if place < len(queue) and queue[place] is sequence:
                del queue[place]
                return
        raise ValueError(f"sequence {sequence.sequence_id} doesn't wait")

    def check_invariants(self) -> None:
        """Every sequence is in order, once."""
        for queue in (self._interrupted, self._new):
            places = [self._order(sequence) for sequence in queue]
            assert places == sorted(set(places)), "the queue is out of order"
