"""What torch fails with has a type of ours, in a step and before the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fastdecode.core.errors import CapacityError, ConfigError, FastDecodeError, WorkerError
from sworker.failures import raise_typed, typed_start


def fail(error: BaseException) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


def triton_error(message: str) -> Exception:
    """As Triton's are: not RuntimeErrors, and known by where they are defined."""
    base = type("TritonError", (Exception,), {"__module__": "triton.errors"})
    kind = type("OutOfResources", (base,), {"__module__": "triton.runtime.errors"})
    error = kind(message)
    assert isinstance(error, Exception) and not isinstance(error, RuntimeError)
    return error


SHARED_MEMORY = "out of resource: shared memory, Required: 151620, Hardware limit: 101376"


@contextmanager
def typed_step() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise_typed(error)


@pytest.mark.parametrize(
    ("act", "in_a_step", "at_start"),
    [
        (lambda: torch.empty(1 << 50, dtype=torch.uint8), WorkerError, CapacityError),
        (fail(torch.OutOfMemoryError("CUDA out of memory.")), WorkerError, CapacityError),
        (fail(MemoryError()), WorkerError, CapacityError),
        (fail(RuntimeError("CUDA error: out of memory\nCUDA")), WorkerError, CapacityError),
        (fail(RuntimeError("CUDA error: no kernel image")), WorkerError, ConfigError),
        (fail(RuntimeError("could not create a primitive")), None, ConfigError),
        (fail(torch.distributed.DistError("gone")), WorkerError, WorkerError),
        (fail(ConfigError("no")), ConfigError, ConfigError),
        (fail(triton_error(SHARED_MEMORY)), WorkerError, ConfigError),
        (fail(AssertionError("ours")), None, None),
        (fail(ValueError("ours")), None, None),
    ],
)
def test_what_fails_is_typed(
    act: Callable[[], Any],
    in_a_step: type[FastDecodeError] | None,
    at_start: type[FastDecodeError] | None,
) -> None:
    for typed, kind in ((typed_step, in_a_step), (typed_start, at_start)):
        with pytest.raises(BaseException) as caught, typed():
            act()
        assert type(caught.value) is kind or (
            kind is None and not isinstance(caught.value, FastDecodeError)
        )


def test_what_torch_says_behind_the_first_line_is_left_out() -> None:
    with pytest.raises(CapacityError) as caught, typed_start():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried.\nadvice, stacks")
    assert str(caught.value) == (
        "the S-worker can't start, there is too little memory: CUDA out of memory. Tried. Choose a "
        "smaller dtype or model, or lower kv_memory_gb"
    )
