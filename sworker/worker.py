"""The S-worker: runs every layer that has weights over a step's rows, and draws tokens from the logits.

A ``Pass`` is one step's way through the layers, cut where attention is somebody else's: each ``advance`` runs
``post_attention`` of one layer and ``pre_attention`` of the next as one unit of work (an S-step). Several passes can be
under way at once; which of them goes on is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.model_spec import ModelSpec
from sworker.model.skeleton import Model
from sworker.sampler import SampledToken, SamplingState, sample


class SWorker:
    """A model on a device. It holds no KV and no sequence state."""

    def __init__(self, spec: ModelSpec, model: Model, device: torch.device) -> None:
        self.spec = spec
        self.model = model
        self.device = device

    def begin(self, token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> Pass:
        """Embed a step's rows and run the first layer up to its attention. token_ids, positions: [T]."""
        return Pass(self, torch.from_numpy(token_ids), torch.from_numpy(positions))

    @torch.inference_mode()
    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
        """Draw the next token of each row's sequence. logits float32 [R, vocab], one state a row."""
        return sample(logits, states) if states else []


class Pass:
    """One step between two layers: ``q``, ``k``, ``v`` of ``layer`` wait for their attention."""

    layer: int
    q: Tensor  # [T, Hq, D]
    k: Tensor  # [T, Hkv, D]
    v: Tensor  # [T, Hkv, D]

    @torch.inference_mode()
    def __init__(self, worker: SWorker, token_ids: Tensor, positions: Tensor) -> None:
        self._model = worker.model
        self._positions = positions.to(worker.device)
        self._x = self._model.embed(token_ids.to(worker.device), self._positions)  # [T, hidden]
        self.layer = 0
        self.q, self.k, self.v = self._model.layers[0].pre_attention(self._x, self._positions)

    @torch.inference_mode()
    def advance(self, o: Tensor) -> bool:
        """Go on with the attention's output o [T, Hq, D]. True: the next layer's q, k, v are there; False: that was
        the last layer, and ``logits`` may be asked for."""
        self._x = self._model.layers[self.layer].post_attention(self._x, o)
        if self.layer + 1 == len(self._model.layers):
            return False
        self.layer += 1
        self.q, self.k, self.v = self._model.layers[self.layer].pre_attention(self._x, self._positions)
        return True

    @torch.inference_mode()
    def logits(self, rows: NDArray[np.int64]) -> Tensor:
        """Logits of some rows [R], float32 [R, vocab], on the device."""
        return self._model.logits(self._x[torch.from_numpy(rows).to(self._x.device)])
