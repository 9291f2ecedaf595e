"""What torch raises when a device, its memory or another rank has failed: not a
mistake of ours, which raises as is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import torch
from torch import distributed as dist

from fastdecode.core.errors import WorkerError

DEVICE_ERRORS: Final = (
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),
)
"""A device's own; older versions of torch have no type for what CUDA refuses."""
_RANK_ERRORS: Final = (dist.DistError,) if dist.is_available() else ()
# What has no type of its own, by how the messages begin, or what they have in them.
_BARE_STARTS: Final = ("CUDA error", "CUDA driver error", "cuDNN error")
_BARE_PARTS: Final = ("DefaultCPUAllocator",)


@contextlib.contextmanager
def typed_failures() -> Iterator[None]:
    """Inside, what the S-worker fails with has a type of ours.

    Raises:
        WorkerError: (code ``s_worker_failed``) its device, its memory, or a
            rank that it computes with has failed.
    """
    try:
        yield
    except Exception as error:
        if not is_failure(error):
            raise
        raise WorkerError(f"the S-worker failed: {error}", code="s_worker_failed") from None


def is_failure(error: BaseException) -> bool:
    """Whether the S-worker has failed: its device, its memory, or a rank that it computes with."""
    if isinstance(error, DEVICE_ERRORS + _RANK_ERRORS):
        return True
    if type(error) is not RuntimeError:
        return False
    text = str(error)
    return text.startswith(_BARE_STARTS) or any(part in text for part in _BARE_PARTS)
