"""What torch and Triton raise when a device, its memory, a kernel or another rank
fails. Our own mistakes raise as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, NoReturn

import torch
from torch import distributed as dist

from fastdecode.core.errors import CapacityError, ConfigError, Given, WorkerError

DEVICE_ERRORS: Final = (
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),
)
"""A device's own; older versions of torch have no type for what CUDA refuses."""
_RANK_ERRORS: Final = (dist.DistError,) if dist.is_available() else ()
# What has no type of its own, by how the messages begin, or what they have in them.
_BARE_STARTS: Final = ("CUDA error", "CUDA driver error", "cuDNN error")
_NO_MEMORY: Final = ("DefaultCPUAllocator", "out of memory")


def raise_typed(error: Exception) -> NoReturn:
    """Raise what ended a step, the S-worker's failures as errors of ours.

    Raises:
        WorkerError: (code ``s_worker_failed``) its device, its memory, or a
            rank that it computes with has failed.
    """
    if is_failure(error):
        raise WorkerError(f"the S-worker failed: {error}", code="s_worker_failed") from None
    raise error


@contextlib.contextmanager
def typed_start() -> Iterator[None]:
    """Inside, an S-worker is made: a model is loaded, and what its steps need is prepared.

    Raises:
        CapacityError: there isn't the memory for it.
        ConfigError: (code ``s_worker_failed``) its device has refused something.
        WorkerError: (code ``s_worker_failed``) a rank that it computes with is gone.
    """
    try:
        yield
    except _RANK_ERRORS as error:
        raise WorkerError(f"the S-worker can't start: {error}", code="s_worker_failed") from None
    except Exception as error:
        if is_out_of_memory(error):
            raise CapacityError(
                f"the S-worker can't start, there is too little memory: {_first_line(error)}. "
                "Choose a smaller dtype or model, or lower ",
                Given("kv_memory_gb"),
            ) from error
        # torch has no other type for what a device or a library refuses.
        is_torchs = type(error) is RuntimeError or isinstance(error, DEVICE_ERRORS)
        if is_torchs or is_kernel_error(error):
            raise ConfigError(
                f"the S-worker can't start: {_first_line(error)}", code="s_worker_failed"
            ) from error
        raise


def is_failure(error: BaseException) -> bool:
    """Whether the S-worker has failed: its device, its memory, or a rank that it computes with."""
    if isinstance(error, DEVICE_ERRORS + _RANK_ERRORS) or is_out_of_memory(error):
        return True
    if is_kernel_error(error):
        return True
    return type(error) is RuntimeError and str(error).startswith(_BARE_STARTS)


def is_kernel_error(error: BaseException) -> bool:
    """Whether Triton couldn't build or launch a kernel: shared memory or registers
    are short, or a compiler is missing or too old. Its errors derive from
    ``Exception`` alone, and importing their types would import Triton."""
    return any(kind.__module__.split(".")[0] == "triton" for kind in type(error).__mro__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory, on the device or the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    is_torchs = type(error) is RuntimeError or isinstance(error, DEVICE_ERRORS)
    return is_torchs and any(part in str(error) for part in _NO_MEMORY)


def _first_line(error: Exception) -> str:
    """What torch says in the first place: behind it come stacks and advice."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
