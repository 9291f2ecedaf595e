"""The queue of sequences that don't run."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator

from fastdecode.core.sequence import Sequence

Order = Callable[[Sequence], tuple[int, ...]]


class WaitingQueue:
    """Waiting sequences in the order in which they start: those that have run before, then the new
    ones. To arrive, leave and look for a sequence takes O(log n) comparisons.

    Args:
        order: unique key of a sequence, constant while it waits. See ``Admission.order``.
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
        """Return the sequence that starts next."""
        return self._interrupted[0] if self._interrupted else self._new[0]

    @property
    def has_head_run(self) -> bool:
        """True if the head has run before."""
        return bool(self._interrupted)

    def arrive(self, sequences: Iterable[Sequence]) -> None:
        """Queue new sequences."""
        for sequence in sequences:
            if self._new and self._order(sequence) < self._order(self._new[-1]):
                insort(self._new, sequence, key=self._order)
            else:
                self._new.append(sequence)

    def come_back(self, sequence: Sequence) -> None:
        """Queue a sequence that has run at its old place."""
        insort(self._interrupted, sequence, key=self._order)

    def pop(self) -> None:
        """Remove the head, which starts."""
        del (self._interrupted or self._new)[0]

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Raises: ValueError: If it does not wait."""
        for queue in (self._interrupted, self._new):
            place = bisect_left(queue, self._order(sequence), key=self._order)
            if place < len(queue) and queue[place] is sequence:
                del queue[place]
                return
        raise ValueError(f"sequence {sequence.sequence_id} doesn't wait")

    def check_invariants(self) -> None:
        for queue in (self._interrupted, self._new):
            places = [self._order(sequence) for sequence in queue]
            assert places == sorted(set(places)), "the queue is out of order"
