"""Chunked prefill beside decoding: how many tokens of which prompt a step runs, fixed when the
prompt starts.

Every step has room for a number of prompt tokens beside the decoding sequences, which are never
held up. Prompts book that room in order of their start, each at most one chunk per step. What is
booked stays booked. So a sequence's last prefill step, and its load at every later step, is known
when it starts, and load control can count on it.

A prompt that books when the present step has room gets room in every step until its last:
bookings made earlier take less and less of the later steps. So a sequence advances by at least one
token in every step. A prefill of q steps that ends with c cached tokens never has more than
c - q + 1 in its first step, c - q + 2 in its second, and so on: no more than a sequence that
decodes from there. Chunks of split sequences end where a part does, so a larger one may follow. A
prompt that finds a later step full because of that waits.

The queries of a split sequence also go to the holders of its **closed** parts, once for each of
them, and so take room in messages: to each holder chunk · closed parts there **closed-part rows**.
These are booked, too, and chunks get smaller as a holder has more of the parts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field


@dataclass
class _Booked:
    """Room of one step that is booked."""

    tokens: int = 0
    closed_rows: Counter[int] = field(default_factory=Counter)


class PrefillBudget:
    """The prompt tokens booked in this step and in later ones.

    Args:
        max_step_tokens: most tokens of all prompts in one step.
        max_chunk: most tokens of one prompt in one step.
        max_closed_rows: most rows of all prompts in one step, on one holder. No prompt has more
            closed parts there than this.
        part_tokens: tokens of the parts of split sequences.
        whole_prompts: see ``ScheduleOptions``.
    """

    def __init__(
        self,
        max_step_tokens: int,
        max_chunk: int,
        max_closed_rows: int = 1 << 40,
        part_tokens: int | None = None,
        whole_prompts: bool = False,
    ) -> None:
        assert max_step_tokens >= 1 and max_chunk >= 1 and max_closed_rows >= 1
        self._max_step_tokens = max_step_tokens
        self._max_chunk = max_chunk
        self._max_closed_rows = max_closed_rows
        self._part_tokens = part_tokens
        self.whole_prompts = whole_prompts
        self.booked: deque[_Booked] = deque()
        """Room that is booked in this step, the next one, and so on."""

    def next_step(self) -> None:
        """Begin the next step. Something is booked."""
        self.booked.popleft()

    def clear(self) -> None:
        """Remove all bookings."""
        self.booked.clear()

    def chunks(
        self, num_tokens: int, first: int = 0, *, parts: Seq[int] | None = None, ahead: int = 0
    ) -> tuple[int, ...]:
        """Return how many of a prompt's tokens would run in a step, the next one, and so on. Empty
        if the step has no room left.

        Args:
            num_tokens: tokens of the prompt, from its ``first`` on.
            parts: holder of each known part of a split sequence. A chunk does not go beyond its
                part, and its queries find room on the holders of those before.
            ahead: number of the step. 0 for the present one.
        """
        chunks: list[int] = []
        taken = self.booked[ahead].tokens if ahead < len(self.booked) else 0
        if self.whole_prompts and taken and taken + num_tokens > self._max_step_tokens:
            return ()
        while num_tokens:
            step = ahead + len(chunks)
            booked = self.booked[step] if step < len(self.booked) else _Booked()
            chunk = min(num_tokens, self._max_chunk, self._max_step_tokens - booked.tokens)
            if parts is not None:
                assert self._part_tokens is not None
                chunk = min(chunk, self._part_tokens - first % self._part_tokens)
                for holder, num_closed in self._closed(parts, first).items():
                    chunk = min(
                        chunk, (self._max_closed_rows - booked.closed_rows[holder]) // num_closed
                    )
            if chunk <= 0:
                return ()  # now; or later, where lanes were regrouped and bookings came together
            chunks.append(chunk)
            num_tokens -= chunk
            first += chunk
        return tuple(chunks)

    def book(
        self,
        chunks: Iterable[int],
        first: int = 0,
        *,
        parts: Seq[int] | None = None,
        ahead: int = 0,
    ) -> None:
        """Book chunks, whether or not there is room."""
        self._count(chunks, first, parts, ahead, 1)

    def unbook(
        self,
        chunks: Iterable[int],
        first: int = 0,
        *,
        parts: Seq[int] | None = None,
        ahead: int = 0,
    ) -> None:
        self._count(chunks, first, parts, ahead, -1)

    def _count(
        self, chunks: Iterable[int], first: int, parts: Seq[int] | None, ahead: int, sign: int
    ) -> None:
        for step, chunk in enumerate(chunks, ahead):
            while step >= len(self.booked):
                self.booked.append(_Booked())
            booked = self.booked[step]
            booked.tokens += sign * chunk
            for holder, num_closed in self._closed(parts or (), first).items():
                booked.closed_rows[holder] += sign * chunk * num_closed
            first += chunk

    def _closed(self, parts: Seq[int], first: int) -> Counter[int]:
        """Count the closed parts of a sequence with ``first`` tokens, by holder."""
        return Counter(parts[: first // self._part_tokens] if parts and self._part_tokens else ())
