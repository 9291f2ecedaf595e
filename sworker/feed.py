"""Drawn tokens that the next step embeds before the host knows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Feed:
    """Of some rows of a step, the token ids, which only the device knows."""

    tokens: Tensor
    """int64 [B], on the device."""
    sources: NDArray[np.int64]
    """[K] which of them."""
    rows: NDArray[np.int64]
    """[K] for which rows of the step."""

    def put_into(self, token_ids: Tensor, upload: Callable[[Tensor], Tensor]) -> None:
        """Where they belong among a step's token ids, int64 [T], on the
        device. ``upload``: copies to there."""
        rows, sources = upload(torch.from_numpy(np.stack((self.rows, self.sources))))
        token_ids.index_copy_(0, rows, self.tokens.index_select(0, sources))
