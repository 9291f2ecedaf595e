"""The model that most tests of whole engines run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def llama(tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama"))
