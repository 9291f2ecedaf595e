"""How much memory kept blocks may take that was never touched before.

A holder's blocks cost no memory until they are first written. What runs takes
them one after the other, those given back first, so without a cache no more are
ever touched than were full at the busiest moment. Kept blocks would make a job
that has nothing to reuse touch all of them. So those that nobody has hit may
only fill what the busiest moment has touched, until it shows that prompts do
come again: then there is no limit. Blocks of conversations are as good as hit:
somebody has said that there will be another turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

_WORTH_IT: Final = 16
"""Of so many prompt tokens one must be a hit, or one missed for having been
given up, for all memory to be worth it."""
_MOST_GHOSTS: Final = 1 << 14


class FreshMemory:
    """See the module.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._peak_tokens = 0
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()  # given up to save memory
        self._num_asked = 0
        self._num_worth = 0

    def started(self, keys: Iterable[bytes], num_tokens: int, num_hit: int) -> None:
        """A sequence has started.

        Args:
            keys: of its full blocks that weren't there.
            num_tokens: that it has.
            num_hit: of them, those that needn't run.
        """
        missed = [key for key in keys if key in self._ghosts]
        for key in missed:
            del self._ghosts[key]
        self._num_asked += num_tokens
        self._num_worth += num_hit + len(missed) * self._block_size

    def most_unhit(self, num_cached_tokens: int, num_running: int) -> int | None:
        """How many blocks that nobody has hit may be kept beside so many tokens
        of so many running sequences, each of which may have a block that isn't
        full. None: any number."""
        self._peak_tokens = max(self._peak_tokens, num_cached_tokens)
        if self._num_worth and self._num_worth * _WORTH_IT >= self._num_asked:
            return None
        most = self._peak_tokens // self._block_size
        return max(0, most - num_cached_tokens // self._block_size - num_running)

    def gave_up(self, keys: Iterable[bytes]) -> None:
        """These blocks were given up for it."""
        for key in keys:
            self._ghosts[key] = None
        while len(self._ghosts) > _MOST_GHOSTS:
            self._ghosts.popitem(last=False)
