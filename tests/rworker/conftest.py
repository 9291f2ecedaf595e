"""Fixtures for tests of R-workers."""

from __future__ import annotations

import pytest
from state_machine import HELLO, Worker


@pytest.fixture
def worker() -> Worker:
    worker = Worker()
    worker.tell(HELLO)
    return worker
