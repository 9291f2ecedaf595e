"""What instances are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from instance_runs import OPTIONS

from fastdecode import LLM


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> str:
    return str(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def one(model: str) -> Iterator[LLM]:
    """One engine that does all of it."""
    with LLM(model, **OPTIONS) as llm:
        yield llm
