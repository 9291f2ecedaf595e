"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Not there where only the GPU tests are run.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    # The same examples every time, and no example fails for being slow:
    # machines differ, and are busy.
    settings.register_profile(
        "everywhere", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("everywhere")

# Tests are imported by path, not as a package; this lets them import the modules that they share.
sys.path.insert(0, str(Path(__file__).parent))

from inherited_signals import hear_interrupts

hear_interrupts()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_checkpoint(family, seed=None, **config) -> Path``: a small random
    model directory, made once a session."""
    from checkpoints import save_checkpoint  # needs transformers

    made: dict[str, Path] = {}

    def make(family: str, seed: int | None = None, **overrides: Any) -> Path:
        key = json.dumps([family, seed, overrides], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            save_checkpoint(made[key], family, overrides, seed)
        return made[key]

    return make
