"""The numbers of a draw: which they are, that every library gives the same, and that noise of
logits changes no token of a large vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sampling_rows import make_state

from examples import examples
from fastdecode.core.sequence import SamplingParams
from sworker.sampling.random_numbers import (
    exponentials,
    exponentials_in_numpy,
    exponentials_in_torch,
)
from sworker.sampling.sampler import SamplingState, sample
from sworker.sampling.sampling_state import draw_keys

PUBLISHED_SEED = 1234567
PUBLISHED = (
    6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
    16408922859458223821,
)  # fmt: skip
"""SplitMix64's first outputs from that seed (Rosetta Code)."""


def test_a_keys_numbers_are_the_published_generators() -> None:
    uniforms = np.array([((word >> 12) + 0.5) * 2.0**-52 for word in PUBLISHED])
    numbers = exponentials(torch.tensor([[PUBLISHED_SEED]]), len(PUBLISHED))
    np.testing.assert_allclose(numbers[0].numpy(), -np.log(uniforms), rtol=1e-15)


def test_positions_follow_the_published_generator() -> None:
    states = []
    for position in range(len(PUBLISHED)):
        state = make_state(SamplingParams())
        state.stream, state.num_generated = PUBLISHED_SEED, position
        states.append(state)
    assert draw_keys(states).view(np.uint64).tolist() == list(PUBLISHED)


def keys() -> torch.Tensor:
    drawn = np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, 64)
    return torch.from_numpy(np.append(drawn, [0, 1, -1, -(1 << 63)]))[:, None]


def test_torch_gives_what_numpy_gives() -> None:
    in_numpy = exponentials_in_numpy(keys().numpy(), 700)
    in_torch = exponentials_in_torch(keys(), 700).numpy()
    np.testing.assert_allclose(in_torch, in_numpy, rtol=1e-14)
    assert (in_numpy > 0).all() and np.isfinite(in_numpy).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_what_numpy_gives() -> None:
    on_gpu = exponentials(keys().cuda(), 700).cpu().numpy()
    np.testing.assert_allclose(on_gpu, exponentials_in_numpy(keys().numpy(), 700), rtol=1e-14)


def test_the_least_and_the_greatest_uniform_give_finite_numbers() -> None:
    """The key whose first word is 0, and the distribution's ends."""
    gamma = 0x9E3779B97F4A7C15
    least = exponentials(torch.tensor([[(1 << 64) - gamma]]), 1)
    assert least.item() == pytest.approx(53 * np.log(2))
    many = exponentials_in_numpy(np.arange(1000)[:, None], 1000)
    assert many.min() > 0 and many.max() < 53 * np.log(2)
    assert many.mean() == pytest.approx(1, abs=5e-3) and many.var() == pytest.approx(1, abs=2e-2)


VOCAB = 128_256
NOISE = 1e-5
NUM_ROWS = examples(96, share=3)


def rows_of(kind: str) -> NDArray[np.float32]:
    rng = np.random.default_rng(7)
    spread = {"flat": 0.5, "likely": 3.0, "untrained": 1.0}[kind]
    rows = rng.normal(0, spread, (NUM_ROWS, VOCAB)).astype(np.float32)
    if kind == "untrained":
        # A few likely tokens, and behind them many that were never trained.
        rows -= 8
        rows[:, rng.permutation(VOCAB)[:30_000]] = 0.5
        rows[:, rng.permutation(VOCAB)[:20]] += 12
    return rows


OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "hot": {"temperature": 1.5},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.02},
    "both": {"top_k": 50, "top_p": 0.9},
}


@pytest.mark.parametrize("kind", ["flat", "likely", "untrained"])
def test_noise_changes_no_draw(kind: str) -> None:
    """Inverse CDF in order of id, as it was: of these draws dozens change."""
    rows = rows_of(kind)
    noise = np.random.default_rng(8).standard_normal(rows.shape, np.float32) * np.float32(NOISE)
    noisy = torch.from_numpy(rows + noise)
    clean = torch.from_numpy(rows)
    changed = {}
    for name, options in OPTIONS.items():
        if kind == "flat" and options.get("top_p"):
            continue  # half of the vocabulary is sorted for each row
        params = SamplingParams(**options)
        states = [SamplingState(params, row, (), (), VOCAB) for row in range(NUM_ROWS)]
        before, after = sample(clean, states), sample(noisy, states)
        changed[name] = sum(a != b for a, b in zip(before, after, strict=True))
    assert not any(changed.values()), changed
