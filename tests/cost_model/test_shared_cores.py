"""The benchmark of goodput: what the controller takes of the instances' cores."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from goodput import SharedCores

from cost_model.goodput.replanning import InstanceProfile, LinearTimes

ALIKE = InstanceProfile(LinearTimes(0.01, 1e-3, 1e-6, 1e-4, 2e-4), 512, 10_000, 64)


def test_a_controller_with_a_core_of_its_own_slows_no_instance() -> None:
    assert SharedCores(num_cores=2, token_s=1e-3).slowed(ALIKE, 1, tokens_per_s=900.0) == ALIKE


def test_what_a_controller_takes_beyond_free_cores_is_shared_evenly() -> None:
    """It needs 1.4 cores; one is free, and two instances lose a fifth of theirs each."""
    slowed = SharedCores(num_cores=3, token_s=1e-3).slowed(ALIKE, 2, tokens_per_s=1400.0)
    before, after = asdict(ALIKE.times), asdict(slowed.times)
    fetched_s = before.pop("fetched_s")
    assert after.pop("fetched_s") == fetched_s, "a fetch waits for its pace, not for a core"
    assert after == pytest.approx({name: value / 0.8 for name, value in before.items()})
