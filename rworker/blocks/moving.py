"""Cached blocks on their way from or to a lower tier or other R-workers. Bookkeeping only."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.blocks import MOST_MOVED, Fetch, Retain
from rworker.blocks.kv_store import KVStore
from rworker.checks import checked_keys
from rworker.tiers.lower_tier import MoveJob


class Moving:
    """Of one cache. Every method that raises changes nothing.

    Args:
        store: whose kept blocks they are.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self.moves: Final[dict[int, MoveJob]] = {}
        """Jobs that aren't over, by number."""

    def fetches_of(self, blocks: NDArray[np.int64]) -> list[MoveJob]:
        """Jobs that fetch any of these blocks."""
        fetches = [move for move in self.moves.values() if move.is_fetch]
        return [move for move in fetches if np.isin(move.blocks, blocks).any()]

    def __len__(self) -> int:
        """Jobs that aren't over."""
        return len(self.moves)

    def begin(self, message: Retain | Fetch) -> MoveJob:
        """Kept blocks begin to move.

        Raises:
            ProtocolError: the job's number is in use, a block isn't there to be
                stored, or is to be fetched and there; or there is no room.
        """
        number = message.job
        keys = checked_keys(message.keys)
        if number in self.moves or not 1 <= len(keys) <= MOST_MOVED:
            raise ProtocolError(f"job {number} of {len(keys)} blocks: its number or size is wrong")
        cached = self._store.cached
        num_tokens: tuple[int, ...] = ()
        if isinstance(message, Retain):
            if (message.num_tokens < 1).any():
                raise ProtocolError("num_tokens of blocks to be stored must be at least 1")
            num_tokens = tuple(message.num_tokens.tolist())
            blocks = cached.begin_store(keys)
        else:
            if message.tail_tokens >= self._store.block_size:
                raise ProtocolError(f"tail_tokens={message.tail_tokens} fill a block")
            blocks = cached.begin_fetch(keys)
            if message.tail_tokens:
                cached.tails[keys[-1]] = message.tail_tokens
        move = MoveJob(number, not num_tokens, tuple(keys), tuple(blocks.tolist()), num_tokens)
        self.moves[number] = move
        return move

    def end(self, number: int, failed: set[int]) -> MoveJob:
        """A job is over; of its blocks these have failed, by their place."""
        move = self.moves.pop(number)
        bad = [key for place, key in enumerate(move.keys) if move.is_fetch and place in failed]
        self._store.cached.end_move(move.keys, bad)
        return move

    def give_up(self) -> None:
        """All jobs are over; what was to come hasn't."""
        for number, move in list(self.moves.items()):
            self.end(number, set(range(len(move.keys))))
