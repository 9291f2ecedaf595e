"""Which tokens a row may draw: bits, packed 32 to a word, and words that may not
be completed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sworker.buffers import to_device as upload

BITS = 32
"""Tokens of one word of a mask: token t is bit t % 32 of word t // 32."""


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
    words = torch.from_numpy(np.stack([mask for mask in masks if mask is not None]))
    words = upload(words, logits.device)
    bits = torch.arange(BITS, dtype=torch.int32, device=logits.device)
    is_out = words.unsqueeze(-1).bitwise_right_shift(bits).bitwise_and_(1).eq_(0)
    vocab_size = logits.shape[1]
    added = torch.zeros(len(rows), vocab_size, device=logits.device)
    added.masked_fill_(is_out.view(len(rows), -1)[:, :vocab_size].bool(), -torch.inf)
    if len(rows) == len(logits):
        logits += added
    else:
        logits[upload(torch.tensor(rows), logits.device)] += added


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
