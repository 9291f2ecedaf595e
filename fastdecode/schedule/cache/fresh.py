"""How much memory cached blocks may take that was never touched before.

A holder's blocks cost no memory until they are first written. Without a cache no more are ever
touched than were full at the busiest moment, as freed blocks are taken first. Cached blocks would
make a job with nothing to reuse touch all of them. So blocks that were never hit may only fill what
the busiest moment has touched, until it shows that prompts are repeated: then there is no limit.
Blocks of conversations count as hit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

_WORTH_IT: Final = 16
"""One prompt token in ``_WORTH_IT`` must be a hit, or missed because it was evicted to save memory:
then all memory may be used."""
_MOST_GHOSTS: Final = 1 << 14


class FreshMemory:
    """See the module.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._peak_tokens = 0
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()  # evicted to save memory
        self._num_asked = 0
        self._num_worth = 0

    def started(self, keys: Iterable[bytes], num_tokens: int, num_hit: int) -> None:
        """Note a sequence that has started.

        Args:
            keys: keys of its full blocks that were missing.
            num_tokens: its tokens.
            num_hit: tokens that are not run again.
        """
        missed = [key for key in keys if key in self._ghosts]
        for key in missed:
            del self._ghosts[key]
        self._num_asked += num_tokens
        self._num_worth += num_hit + len(missed) * self._block_size

    def most_unhit(self, num_cached_tokens: int, num_running: int) -> int | None:
        """Return how many blocks that were never hit may be cached beside the running sequences,
        each of which may have a block that is not full. None for any number."""
        self._peak_tokens = max(self._peak_tokens, num_cached_tokens)
        if self._num_worth and self._num_worth * _WORTH_IT >= self._num_asked:
            return None
        most = self._peak_tokens // self._block_size
        return max(0, most - num_cached_tokens // self._block_size - num_running)

    def evicted(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._ghosts[key] = None
        while len(self._ghosts) > _MOST_GHOSTS:
            self._ghosts.popitem(last=False)
