"""The model that replicas are kept of, and what it says where nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from replica_jobs import Tokens, run


@pytest.fixture(scope="session")
def llama(tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama"))


@pytest.fixture(scope="session")
def expected(llama: str) -> Tokens:
    return run(llama, replicas=0)[0]
