"""Python's garbage collector, while an engine is open and after it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from fastdecode import LLM, SamplingParams

OPTIONS = {"r_threads": 1, "kv_memory_gb": 0.01}


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    """As in a process that only has an engine (see ``pytest_collection_finish``)."""
    gc.unfreeze()
    yield
    gc.freeze()


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_an_open_engine_is_left_out_of_collections(llama: str) -> None:
    garbage = weakref.ref(Node())
    with LLM(llama, **OPTIONS) as llm:
        assert garbage() is None, "what was garbage before isn't kept"
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < gc.get_freeze_count()
        assert llm.generate([[3, 4]], SamplingParams(max_tokens=2))[0].ok
        later = weakref.ref(Node())
        gc.collect()
        assert later() is None
    assert gc.get_freeze_count() == 0, "a closed engine may be collected"


def test_objects_that_others_froze_stay_frozen(llama: str) -> None:
    """The application's, and those of an engine that is still open."""
    with LLM(llama, **OPTIONS):
        frozen = gc.get_freeze_count()
        with LLM(llama, **OPTIONS):
            pass
        assert 10_000 < gc.get_freeze_count() <= frozen
    assert gc.get_freeze_count() == 0
