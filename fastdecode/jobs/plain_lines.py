"""A fast look at lines: one that differs from a checked line only in its id, prompt
and other free texts is sound like it, and is not parsed."""

from __future__ import annotations

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


class PlainLines:
    """Reads lines of known shapes (``plain_kernel``) and stops at others.

    Args:
        block: whole lines.
        number: of the line before them.
        shapes: what is known.
    """

    def __init__(self, block: bytes, number: int, shapes: Shapes) -> None:
        self._data = np.frombuffer(block, np.uint8)
        self._shapes = shapes
        self._place = 0
        most = len(block) // _BYTES_PER_ID + 1
        self._digests, self._numbers = np.empty((most, 2), np.uint64), np.empty(most, np.int64)
        self.number = number
        """Of the line that was read last."""

    def read(self) -> tuple[NDArray[np.int64], NDArray[np.uint64], Stop | None]:
        """Read on. Returns [lines] the numbers of lines of known shapes, [lines,
        2] the digests of their ids, both until the next ``read``, and the line
        it stopped at; None: there are no more."""
        at = self._shapes.read(self._data, self._place, self.number, self._digests, self._numbers)
        begin, self._place, self.number, num_ids = at
        stop = None if begin == len(self._data) else Stop(begin, self._place, self.number)
        return self._numbers[:num_ids], self._digests[:num_ids], stop


class Shapes:
    """Shapes of lines that were checked, and how many lines had each.

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

    @property
    def counts(self) -> NDArray[np.int64]:
        """[shapes]: the shard's lines, without the ones that shapes were learned from."""
        return self._counts[: self._num]

    def read(
        self,
        data: NDArray[np.uint8],
        start: int,
        number: int,
        digests: NDArray[np.uint64],
        numbers: NDArray[np.int64],
    ) -> tuple[int, int, int, int]:
        """Read on until an unknown shape: see ``plain_kernel.read``. Returns where
        the line it stopped at begins and ends, its number, and how many ids were
        written."""
        read(
            data, start, number, self._shard.index % self._shard.count, self._shard.count,
            self._pool, self._starts, self._sizes, self._places, self._counts, self._latest,
            digests, numbers, self._state,
        )  # fmt: skip
        begin, end, at, num_ids = self._state[:4].tolist()
        return begin, end, at, num_ids

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
