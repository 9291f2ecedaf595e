"""The checkpoint that most tests of loading change."""

from __future__ import annotations

from pathlib import Path

import pytest
from weight_files import Make


@pytest.fixture(scope="module")
def llama(tiny_checkpoint: Make) -> Path:
    return tiny_checkpoint("llama")
