"""What all measurements on a device share: where they run, how they are timed, and
how a row is made of them. Used by the steps of gpu_first.py."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fastdecode.core.model.families import read_model_spec
from fastdecode.core.model.spec import ModelSpec

Row = dict[str, Any]
Rows = Iterator[Row]
SHAPES = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
           "num_key_value_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
           "num_key_value_heads": 8},
}  # fmt: skip
"""Of Llama-2 7B and Llama-3 8B."""


class UnavailableError(Exception):
    """A check can't be made here; says what is lacking."""


@dataclass(frozen=True)
class Found:
    """How far a result is from what it should be."""

    max_error: float
    bound: float

    @property
    def is_right(self) -> bool:
        return self.max_error <= self.bound  # False for NaN


@dataclass(frozen=True)
class Check:
    """One thing that has to be right."""

    name: str
    run: Callable[[], Found]
    """Raises ``UnavailableError`` if it can't be made here."""


@dataclass(frozen=True)
class Setup:
    """Where, how large, and for how long."""

    device: torch.device
    dtype: torch.dtype
    smoke: bool
    deadline_s: float
    """On ``time.monotonic``."""

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def pick(self, full: Any, tiny: Any) -> Any:
        return tiny if self.smoke else full

    def random(self, *shape: int) -> torch.Tensor:
        """Not zeros: with those a GPU's products are faster."""
        return torch.randn(shape, device=self.device).to(self.dtype)

    def spec(self, name: str, num_layers: int = 4) -> ModelSpec:
        shape = dict(SHAPES[name])
        if self.smoke:
            kv_heads = 4 * shape["num_key_value_heads"] // shape["num_attention_heads"]
            shape = {"hidden_size": shape["hidden_size"] // 64, "num_attention_heads": 4,
                     "intermediate_size": shape["intermediate_size"] // 64,
                     "num_key_value_heads": kv_heads}  # fmt: skip
        config = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
            "vocab_size": self.pick(32000, 500), "num_hidden_layers": self.pick(num_layers, 2),
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "rope_theta": 500000.0, "tie_word_embeddings": False, **shape,
        }  # fmt: skip
        return read_model_spec(config, name=name)

    def finish(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], repeats: int = 10) -> float:
        """Median of the device's time for one run, which is queued while the one before it runs."""
        repeats = self.pick(repeats, 2)
        for _ in range(2):
            run()
        if not self.is_cuda:
            return statistics.median(_timed(run) for _ in range(repeats))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))

    def host_seconds(self, run: Callable[[], object], repeats: int = 10) -> float:
        """Median time until the host has queued one run."""
        times = []
        for _ in range(self.pick(repeats, 2) + 2):
            self.finish()
            times.append(_timed(run))
        return statistics.median(times[2:])


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measured(case: Row, found: Found, **rates: float) -> Row:
    """A row: what was measured, how far its result is from the right one, and
    the rates, unless it is too far.

    Args:
        case: what tells the row from others.
    """
    if found.is_right:
        return {**case, **rates, "max_error": found.max_error}
    error = found.max_error if math.isfinite(found.max_error) else str(found.max_error)
    name = " ".join(map(str, case.values()))
    wrong = f"{name}: the result is wrong by {found.max_error:.3g}, where {found.bound:.3g} is"
    return {**case, "max_error": error, "error": f"{wrong} the most: no rate is shown"}


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Greatest difference, in parts of the greatest expected value; infinite if
    something isn't finite where it should be."""
    difference = (found.double() - expected.double()).abs()
    if not bool(difference.isfinite().all()):
        return math.inf
    return float(difference.max() / expected.double().abs().max().clamp_min(1e-30))


def row_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest ``distance`` of any row: small rows count as much as large ones."""
    return max(distance(a, b) for a, b in zip(found, expected, strict=True))
