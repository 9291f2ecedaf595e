"""Masks of the tokens that a row may draw, 32 bits to a word, and words to leave incomplete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sworker.buffers import to_device as upload

BITS = 32  # tokens of one word of a mask: token t is bit t % 32 of word t // 32

MAX_ELEMENTS = 1 << 24
"""Rows are masked so many logits at a time: 64 MiB of what is added to them."""


def num_words(vocab_size: int) -> int:
    """Words of one row's mask."""
    return -(-vocab_size // BITS)


def packed(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """A mask of these tokens alone: int32 [num_words]."""
    is_allowed = np.zeros(num_words(vocab_size) * BITS, np.uint8)
    is_allowed[np.fromiter(token_ids, np.int64)] = 1
    return np.packbits(is_allowed, bitorder="little").view("<i4").astype(np.int32, copy=False)


def mask_logits(logits: Tensor, masks: Sequence[NDArray[np.int32] | None]) -> None:
    """Add -inf to the logits of tokens that a row's mask leaves out, in place;
    so a NaN stays a NaN.

    Args:
        logits: float32 [B, V].
        masks: one a row, int32 [num_words]; None allows every token.
    """
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return
    words = np.stack([mask for mask in masks if mask is not None])
    if logits.device.type == "cpu":
        every = logits.numpy()
        with np.errstate(invalid="ignore"):  # infinite ones become NaN, and are refused
            for row, its in zip(rows, words, strict=True):
                _mask_row(every[row], its)
        return
    _mask_rows(logits, rows, words)


def _mask_row(logits: NDArray[np.float32], words: NDArray[np.int32]) -> None:
    """One row on a CPU, float32 [V]. Grammars mostly allow nearly all tokens or nearly
    none, so only words are looked at that differ from the more frequent of the two."""
    num_whole = len(logits) // BITS
    tail, words_of_tail = logits[num_whole * BITS :], words[num_whole:]
    if len(tail):
        tail += _added(words_of_tail)[0, : len(tail)]
    of_words, words = logits[: num_whole * BITS].reshape(num_whole, BITS), words[:num_whole]
    is_whole = words == -1
    if 2 * np.count_nonzero(is_whole) >= num_whole:
        some = np.flatnonzero(~is_whole)
        of_words[some] += _added(words[some])
        return
    some = np.flatnonzero(words)
    kept = of_words[some] + _added(words[some])
    of_words += np.float32(-np.inf)
    of_words[some] = kept


def _added(words: NDArray[np.int32]) -> NDArray[np.float32]:
    """What words add to the logits of their tokens: float32 [len(words), BITS]."""
    table: NDArray[np.float32] = _added_by_byte().numpy()
    return table[words.view(np.uint8)].reshape(len(words), BITS)


def _mask_rows(logits: Tensor, rows: Sequence[int], words: NDArray[np.int32]) -> None:
    """Rows on a device."""
    device, vocab_size = logits.device, logits.shape[1]
    of_bytes = upload(torch.from_numpy(words.view(np.uint8)), device)
    table = upload(_added_by_byte(), device)
    size = max(1, MAX_ELEMENTS // vocab_size)
    for first in range(0, len(rows), size):
        added = table[of_bytes[first : first + size].long()].flatten(1)[:, :vocab_size]
        some = rows[first : first + size]
        if some[-1] - some[0] + 1 == len(some):
            logits[some[0] : some[-1] + 1] += added
        else:
            logits[upload(torch.tensor(some), device)] += added


@lru_cache(maxsize=1)
def _added_by_byte() -> Tensor:
    """What each value of a byte of a mask adds to eight logits: float32 [256, 8]."""
    values = np.arange(256, dtype=np.uint8)[:, None]
    is_allowed = np.unpackbits(values, axis=1, bitorder="little").astype(bool)
    return torch.from_numpy(np.where(is_allowed, np.float32(0), np.float32(-np.inf)))


class BadWords:
    """What must not follow the tokens that a sequence has generated so far.

    Args:
        words: tokens of each word, one or more.
    """

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        words = [word for word in words if len(word) > 1]
        self._words = words
        self._most = max(map(len, words), default=1) - 1
        self._tail: list[int] = []

    @property
    def next_out(self) -> list[int]:
        """Tokens that would complete a longer word now."""
        tail = self._tail
        return [word[-1] for word in self._words if tail[-(len(word) - 1) :] == [*word[:-1]]]

    def observe(self, token_id: int) -> None:
        """A token was appended to the output."""
        self._tail.append(token_id)
        if len(self._tail) > self._most:
            del self._tail[: -self._most or None]
