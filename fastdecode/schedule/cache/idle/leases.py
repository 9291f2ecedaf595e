"""Which kept blocks conversations may come back to."""

from __future__ import annotations

from collections.abc import Iterator

from fastdecode.core.spec import first_seen
from fastdecode.schedule.cache.kept import KeptBlock


class Leases:
    """Of the conversations whose last turns ended with kept blocks.

    Args:
        window: of the layer that sees most tokens; None: it sees all.
    """

    def __init__(self, window: int | None) -> None:
        self._window = window
        self.num_turns = 0
        """Conversations, of all blocks."""

    def add(self, block: KeptBlock, count: int) -> list[KeptBlock]:
        """So many conversations more, or fewer, had their last turn end with
        this block. Returns the blocks that they share."""
        block.num_turns += count
        self.num_turns += count
        shared = list(self.shared_with(block))
        for each in shared:
            each.num_leases += count
        return shared

    def shared_with(self, block: KeptBlock) -> Iterator[KeptBlock]:
        """A block, and of those before it what tokens behind it see."""
        seen_from = first_seen(block.num_tokens, self._window)
        yield block
        before = block.parent
        while before is not None and before.num_tokens > seen_from:
            yield before
            before = before.parent
