"""A fast look at lines: one that differs from a checked line only in its id, prompt
and other free texts is sound like it, and is not parsed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.jobs.plain_kernel import MAX_SHAPE_BYTES, read
from fastdecode.jobs.shard import Shard

MAX_SHAPES: Final = 8192
_MAX_POOL_BYTES: Final = 2 << 20
_BYTES_PER_ID: Final = 16
"""No line that has an id is shorter."""


@dataclass(frozen=True)
class Stop:
    """A line of an unknown shape: it is to be parsed. ``start`` and ``end``:
    where it is in the data."""

    start: int
    end: int
    number: int


class Shapes:
    """Shapes of a file's lines that were checked, and how many lines had each.
    Reads lines of these shapes (``plain_kernel``) and stops at others.

    Args:
        shard: its lines are counted.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._pool = np.empty(_MAX_POOL_BYTES, np.uint8)
        self._starts, self._sizes = np.zeros((2, MAX_SHAPES), np.int64)
        self._places = np.full(4 * MAX_SHAPES, -1, np.int64)
        self._latest = np.empty(MAX_SHAPE_BYTES, np.uint8)
        self._state = np.zeros(6, np.int64)
        self._counts = np.zeros(MAX_SHAPES, np.int64)
        self._num = self._num_bytes = 0
        self.number = 0
        """Of the line that was read last."""

    @property
    def counts(self) -> NDArray[np.int64]:
        """[shapes]: the shard's lines, without the ones that shapes were learned from."""
        return self._counts[: self._num]

    def read(
        self, block: bytes
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint64], Stop | None]]:
        """Read whole lines, the next ones of the file. Yields [lines] the numbers of
        lines of known shapes, [lines, 2] the digests of their ids, both until the
        next item, and the line it stopped at; None: there are no more."""
        data = np.frombuffer(block, np.uint8)
        most = len(block) // _BYTES_PER_ID + 1
        digests, numbers = np.empty((most, 2), np.uint64), np.empty(most, np.int64)
        stop: Stop | None = Stop(0, 0, self.number)
        while stop is not None:
            read(
                data, stop.end, self.number, self._shard.index % self._shard.count,
                self._shard.count, self._pool, self._starts, self._sizes, self._places,
                self._counts, self._latest, digests, numbers, self._state,
            )  # fmt: skip
            begin, end, self.number, num_ids = self._state[:4].tolist()
            stop = None if begin == len(data) else Stop(begin, end, self.number)
            yield numbers[:num_ids], digests[:num_ids], stop

    def learn(self) -> bool:
        """The line that ``read`` stopped at is sound, and so are all of its shape.
        Returns whether there is room for it, and it has one."""
        size, place = self._state[4:].tolist()
        is_full = self._num == MAX_SHAPES or self._num_bytes + size > _MAX_POOL_BYTES
        if size < 0 or is_full:
            return False
        begin = self._num_bytes
        self._pool[begin : begin + size] = self._latest[:size]
        self._starts[self._num], self._sizes[self._num] = begin, size
        self._places[place] = self._num
        self._num, self._num_bytes = self._num + 1, begin + size
        return True
