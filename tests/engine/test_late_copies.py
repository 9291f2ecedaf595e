"""q, k and v that reach the host late, as from a GPU: they are sent when they
are there, and nothing overtakes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import prompts
from torch import Tensor
from trouble import crash_after

from fastdecode import LLM, SamplingParams
from fastdecode.engine.step import remote as attend
from sworker.buffers import LENT_LAYERS, Shipment, Staging


class LateStaged:
    """Copies only when it is waited for: whoever writes the sources before, spoils it."""

    def __init__(
        self, staging: Staging, sources: tuple[Tensor, ...], slot: list[np.ndarray]
    ) -> None:
        self._staging, self._sources, self._slot = staging, sources, slot

    @property
    def done(self) -> bool:
        return not self._sources

    def wait(self) -> None:
        if self._sources:
            self._slot[:] = [source.numpy().copy() for source in self._sources]
            self._sources = ()

    @property
    def shipments(self) -> list[Shipment]:
        assert not self._sources, "sent before it was there"
        return self._staging.shipments(*self._slot)


class LateStaging(Staging):
    """A ring of host memory, as a GPU's: its slots are written again, in place,
    after ``LENT_LAYERS`` layers."""

    def __init__(self, gpu: None, slot_bytes: int) -> None:
        super().__init__()
        self._ring: list[list[np.ndarray]] = [[] for _ in range(LENT_LAYERS)]

    def send(self, q: Tensor, k: Tensor, v: Tensor) -> LateStaged:  # type: ignore[override]
        slot = self._ring.pop(0)
        self._ring.append(slot)
        for array in slot:
            array.fill(np.nan)  # who still reads it reads nonsense
        return LateStaged(self, (q, k, v), slot)


@pytest.mark.parametrize("lanes", [1, 3])
def test_what_a_lost_r_worker_was_to_get_is_not_sent_to_its_successor(
    lanes: int, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tiny_checkpoint("qwen3", num_attention_heads=10, num_key_value_heads=5))
    asked = prompts([3, 30, 11, 1, 19], seed=2)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = {
        "dtype": "float32",
        "r_threads": 1,
        "kv_memory_gb": 0.01,
        "prefill_chunk": 8,
        "lanes": lanes,
    }
    with LLM(path, **options) as llm:
        expected = [output.completions[0].token_ids for output in llm.generate(asked, params)]

    crash_after(monkeypatch, {"r1": 21})
    monkeypatch.setattr(attend, "make_staging", LateStaging)
    with LLM(path, r_workers=3, r_partition="heads", **options) as llm:
        assert [
            output.completions[0].token_ids for output in llm.generate(asked, params)
        ] == expected
        assert llm.snapshot().engine.num_live_r_workers == 2
