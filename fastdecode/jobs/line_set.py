"""Sets of lines, and lines with equal ids, in little memory: what is kept of a
line is a bit, not an object."""

from __future__ import annotations

import hashlib
from array import array

import numpy as np
from numpy.typing import NDArray

from fastdecode.jobs.line_format import LineId


class LineSet:
    """Line numbers (from 1), one bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self._bits) and bool(self._bits[place] >> (number & 7) & 1)

    def add(self, number: int) -> None:
        assert number > 0
        if number in self:
            return
        place = number >> 3
        if place >= len(self._bits):
            self._bits.extend(bytes(max(place + 1 - len(self._bits), len(self._bits))))
        self._bits[place] |= 1 << (number & 7)
        self._num += 1


class DuplicateFinder:
    """Finds lines whose id an earlier line has, at 24 bytes a line while it
    looks: a 16-byte digest and a number.

    Among a million different ids, two share a digest with a probability below
    1e-26.
    """

    def __init__(self) -> None:
        self._digests = bytearray()
        self._numbers = array("q")

    def add(self, number: int, line_id: LineId) -> None:
        self._digests += hashlib.blake2b(str(line_id).encode(), digest_size=16).digest()
        self._numbers.append(number)

    def find(self) -> NDArray[np.int64]:
        """[num_duplicates, 2]: each line whose id was used before, and the
        first line that used it; in order."""
        digests = np.frombuffer(self._digests, np.uint64).reshape(-1, 2)
        numbers = np.frombuffer(self._numbers, np.int64)
        places = _in_doubt(digests[:, 0])
        digests, numbers = digests[places], numbers[places]
        order = np.lexsort((numbers, digests[:, 1], digests[:, 0]))
        ordered = digests[order]
        is_new = np.ones(len(order), bool)
        is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        first = order[is_new][np.cumsum(is_new) - 1]
        pairs = np.stack([numbers[order], numbers[first]], axis=1)[~is_new]
        by_number: NDArray[np.int64] = pairs[pairs[:, 0].argsort()]
        return by_number


def _in_doubt(halves: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Where the values that occur more than once are. Most files have none, and
    sorting the values alone takes 8 bytes each."""
    ordered = np.sort(halves)
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        return np.empty(0, np.int64)
    return np.flatnonzero(np.isin(halves, repeated))
