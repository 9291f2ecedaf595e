"""Sequences whose tokens come as chunks: what has come of each so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import KVSpec


class ArrivingSequences:
    """Arriving sequences, by id: how many tokens each layer and head has.

    Args:
        kv: of the cache.
    """

    def __init__(self, kv: KVSpec) -> None:
        self._shape = kv.num_layers, kv.num_kv_heads
        self._arrived: dict[int, NDArray[np.int32]] = {}  # tokens, [num_layers, num_kv_heads]
        self._lacking: dict[int, int] = {}  # tokens, of all layers and heads together
        self.ends: Final[dict[int, int]] = {}
        """Tokens that there will be of each."""

    def __contains__(self, sequence: int) -> bool:
        return sequence in self.ends

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ends)

    def expect(self, sequence: int, num_present: int, num_more: int) -> None:
        """``num_more`` tokens are to come behind ``num_present``, which are
        there or to come, too."""
        if sequence not in self.ends:
            self._arrived[sequence] = np.full(self._shape, num_present, np.int32)
        self.ends[sequence] = num_present + num_more
        self._count(sequence)

    def fork(self, parent: int, child: int, num_shared: int) -> None:
        """A sequence begins with tokens of an arriving one."""
        arrived = np.minimum(self._arrived[parent], num_shared)
        if arrived.min() < num_shared:
            self._arrived[child] = arrived
            self.ends[child] = num_shared
            self._count(child)

    def truncate(self, sequence: int, num_tokens: int) -> None:
        """An arriving sequence will have so many tokens, and no more."""
        np.minimum(self._arrived[sequence], num_tokens, out=self._arrived[sequence])
        self.ends[sequence] = num_tokens
        self._count(sequence)
        self._settle(sequence)

    def forget(self, sequence: int) -> None:
        """It is closed, or no arriving one."""
        for known in (self._arrived, self._lacking, self.ends):
            known.pop(sequence, None)

    def num_settled(self, sequence: int) -> int:
        """Tokens of an arriving sequence that are there in every layer and head."""
        return int(self._arrived[sequence].min())

    def num_tokens(self, sequence: int) -> int:
        """That there will be."""
        return self.ends[sequence]

    def check(
        self, sequence: int, layers: slice, heads: slice, first_token: int, num_tokens: int
    ) -> None:
        """
        Raises:
            ProtocolError: these tokens aren't what comes next.
        """
        if sequence not in self.ends:
            raise ProtocolError(f"sequence {sequence} expects no tokens")
        due = self._arrived[sequence][layers, heads]
        if np.count_nonzero(due != first_token):
            raise ProtocolError(
                f"tokens from {first_token} on of sequence {sequence} have come where those from "
                f"{due.min()} on are due"
            )
        if first_token + num_tokens > self.ends[sequence]:
            raise ProtocolError(
                f"sequence {sequence} expects {self.ends[sequence]} tokens in all, not "
                f"{first_token + num_tokens}"
            )

    def arrive(self, sequence: int, layers: slice, heads: slice, num_tokens: int) -> None:
        """They have come. A sequence of which all have is no longer arriving."""
        arrived = self._arrived[sequence][layers, heads]
        arrived += num_tokens
        self._lacking[sequence] -= num_tokens * arrived.size
        self._settle(sequence)

    def _count(self, sequence: int) -> None:
        arrived = self._arrived[sequence]
        self._lacking[sequence] = self.ends[sequence] * arrived.size - int(arrived.sum())

    def _settle(self, sequence: int) -> None:
        if not self._lacking[sequence]:
            self.forget(sequence)
