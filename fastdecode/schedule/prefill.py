"""Chunked prefill beside decoding: which step runs how many tokens of which prompt, fixed when the prompt starts.

Every step has room for so many prompt tokens beside the decoding sequences, which are never held up. Prompts book that
room in order of their start, each at most one chunk a step. What is booked stays booked, so a sequence's last prefill
step, and with it its load at every later step, is known when it starts, and load control can count on it.

Whoever books when the present step has room gets room in every step that follows, up to their last: bookings made
earlier take less and less of the later steps. So from its start on a sequence gets at least one token further in every
step; a prefill of q steps that ends with c cached tokens never has more than c - q + 1 in its first step, c - q + 2 in
its second, and so on: no more than a sequence that decodes from there. (Chunks of split sequences end where a part
does, so a larger one may follow; who finds a later step full because of that waits.)

The queries of a split sequence also go to the R-workers of its **closed** parts, once for each of them, and so take
room in messages: chunk · closed parts **guest rows**. These are booked, too, and chunks get smaller as parts get more.
How many of the parts are on which R-worker isn't known yet; that all are on one is taken for granted.
"""

from __future__ import annotations

from collections import deque


class PrefillBudget:
    """The prompt tokens booked in this step and in those to come.

    Args:
        max_step_tokens: of all prompts in one step.
        max_chunk: of one prompt in one step.
        max_guest_rows: of all prompts in one step. No prompt has more closed parts than this.
        part_tokens: sequences that are split have parts of so many tokens.
    """

    def __init__(
        self, max_step_tokens: int, max_chunk: int, max_guest_rows: int = 1 << 40, part_tokens: int | None = None
    ) -> None:
        assert max_step_tokens >= 1 and max_chunk >= 1 and max_guest_rows >= 1
        self._max_step_tokens = max_step_tokens
        self._max_chunk = max_chunk
        self._max_guest_rows = max_guest_rows
        self._part_tokens = part_tokens
        self._booked: deque[tuple[int, int]] = deque()  # tokens and guest rows, this step's first

    def next_step(self) -> None:
        if self._booked:
            self._booked.popleft()

    def clear(self) -> None:
        """Nobody holds a booking any more."""
        self._booked.clear()

    def chunks(self, num_tokens: int, first: int = 0, *, is_split: bool = False) -> tuple[int, ...]:
        """How many of a prompt's tokens would run in this step, the next, …; empty if this step has no room left.

        Args:
            num_tokens: of the prompt, from its ``first`` on.
            is_split: a chunk doesn't go beyond its part.
        """
        chunks: list[int] = []
        while num_tokens:
            booked, booked_rows = self._booked[len(chunks)] if len(chunks) < len(self._booked) else (0, 0)
            chunk = min(num_tokens, self._max_chunk, self._max_step_tokens - booked)
            if is_split:
                assert self._part_tokens is not None
                num_closed, filled = divmod(first, self._part_tokens)
                chunk = min(chunk, self._part_tokens - filled)
                if num_closed:
                    chunk = min(chunk, (self._max_guest_rows - booked_rows) // num_closed)
            if chunk <= 0:
                return ()  # now; or later, where lanes were regrouped and bookings came together
            chunks.append(chunk)
            num_tokens -= chunk
            first += chunk
        return tuple(chunks)

    def book_ahead(self, chunks: tuple[int, ...], first: int = 0, *, is_split: bool = False) -> None:
        """Take room in the steps that follow this one, whether or not there is so much."""
        self.book((0, *chunks), first, is_split=is_split)

    def book(self, chunks: tuple[int, ...], first: int = 0, *, is_split: bool = False) -> None:
        """Take what ``chunks`` offered."""
        for step, chunk in enumerate(chunks):
            if step == len(self._booked):
                self._booked.append((0, 0))
            tokens, rows = self._booked[step]
            num_closed = first // self._part_tokens if is_split and self._part_tokens else 0
            self._booked[step] = tokens + chunk, rows + chunk * num_closed
            first += chunk
