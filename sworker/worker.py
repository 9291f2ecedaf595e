"""The S-worker: runs every layer that has weights over a step's rows, and draws tokens from the logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fastdecode.core.model_spec import ModelSpec
from sworker.model.skeleton import Attend, Model, forward
from sworker.sampler import SampledToken, SamplingState, sample


class SWorker:
    """A model on a device. It holds no KV and no sequence state."""

    def __init__(self, spec: ModelSpec, model: Model, device: torch.device) -> None:
        self.spec = spec
        self._model = model
        self._device = device

    @torch.inference_mode()
    def run(
        self,
        token_ids: np.ndarray[tuple[int], np.dtype[np.int64]],
        positions: np.ndarray[tuple[int], np.dtype[np.int64]],
        logit_rows: np.ndarray[tuple[int], np.dtype[np.int64]],
        attend: Attend,
    ) -> Tensor:
        """One step through all layers.

        Args:
            token_ids, positions: int64 [T], the step's rows.
            logit_rows: int64 [R], the rows whose logits are wanted.
            attend: where the KV is.

        Returns:
            logits, float32 [R, vocab], on the device.
        """
        tokens, places, rows = (torch.from_numpy(x).to(self._device) for x in (token_ids, positions, logit_rows))
        x = forward(self._model, tokens, places, attend)  # [T, hidden]
        return self._model.logits(x[rows])

    @torch.inference_mode()
    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
        """Draw the next token of each row's sequence. logits float32 [R, vocab], one state a row."""
        return sample(logits, states) if states else []
