"""Parts of a layer between its matrix products, each as one pass over memory,
on a CPU. The same functions as in ``fused_triton``, and the same rounding.

torch takes two to ten operators for each of them, which for a prompt's
thousands of rows move several times the bytes, and for a few decoded rows cost
more to start than to run. Rows are dealt out to the threads of torch's own
OpenMP runtime, which are awake, as they have just run a matrix product.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any, Final

import torch
from torch import Tensor

from sworker.kernels.row_loops import (
    GATE,
    JOB_BYTES,
    NEXT,
    NORM,
    NUM_FIELDS,
    ROTATE,
    ROTATE_SPLIT,
    run_job,
)
from sworker.kernels.threads import openmp_library

ELEMENTS_ALONE: Final = 3 << 14
"""Fewer than so many aren't worth a second thread."""
_ELEMENTS_AT_ONCE: Final = 1 << 13
"""That a thread takes at a time."""
_JOB: Final = Struct(f"<{NUM_FIELDS}q2d{NEXT - 8 * (NUM_FIELDS + 2)}xq")
_NUM_GIVEN: Final = NUM_FIELDS - 4
"""Fields of a job that say which tensors it is about."""


@cache
def parallel_regions() -> Callable[..., None] | None:
    """``GOMP_parallel`` of torch's OpenMP runtime: runs a function on so many threads."""
    library = openmp_library()
    if library is None:
        return None
    function: Callable[..., None] | None = getattr(ctypes.CDLL(library), "GOMP_parallel", None)
    return function


class Job(threading.local):
    """A calling thread's own memory of a job, aligned to cache lines.

    Args:
        loops: a compiled function that takes the job's address and does units of
            it until none is left: Numba's ``CFunc``.
        size: of the job, in bytes.
    """

    def __init__(self, loops: Any, size: int) -> None:
        self.memory = ctypes.create_string_buffer(size + 64)
        self.offset = -ctypes.addressof(self.memory) % 64
        self.address = ctypes.addressof(self.memory) + self.offset
        self._run_alone: Callable[[int], None] = loops.ctypes
        self._given = ctypes.c_void_p(loops.address), ctypes.c_void_p(self.address)

    def run(self, num_threads: int, elements: int = ELEMENTS_ALONE) -> None:
        """Have all units done; in this thread alone, where they are of few elements."""
        parallel = parallel_regions()
        if elements < ELEMENTS_ALONE or num_threads == 1 or parallel is None:
            self._run_alone(self.address)
        else:
            parallel(*self._given, num_threads, 0)


_job = Job(run_job, JOB_BYTES)


def is_possible(dtype: torch.dtype) -> bool:
    """Whether there are kernels for such activations, and threads to run them."""
    return dtype in (torch.float32, torch.bfloat16) and parallel_regions() is not None


def _run(
    kind: int, num_rows: int, row_elements: int, *fields: int, eps: float = 0.0, offset: float = 0.0
) -> None:
    """Have a job done. ``fields``: those of ``row_loops``, from _SIZE on, but _IS_WIDE first."""
    num_threads = torch.get_num_threads()
    at_once = max(1, min(_ELEMENTS_AT_ONCE // row_elements, -(-num_rows // num_threads)))
    is_wide, *others = fields
    others += [0] * (_NUM_GIVEN - len(others))
    _JOB.pack_into(
        _job.memory, _job.offset, kind, is_wide, num_rows, at_once, *others, eps, offset, 0
    )  # the last: no block of rows is taken yet
    _job.run(num_threads, num_rows * row_elements)


def norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """See ``fused_triton.norm``."""
    heads, x_head = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    num_rows, size = x.shape[0], x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype)
    _run(
        NORM, num_rows, heads * size, x.dtype == torch.float32, size, heads,
        x.data_ptr(), x.stride(0), x_head, 0, 0, weight.data_ptr(), 0, out.data_ptr(), 0, eps=eps,
        offset=offset,
    )  # fmt: skip
    return out


def add_norm(
    x: Tensor,
    added: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``fused_triton.add_norm``."""
    num_rows, size = x.shape
    if total is None:
        total = torch.empty(x.shape, dtype=x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype)
    _run(
        NORM, num_rows, size, x.dtype == torch.float32, size, 1, x.data_ptr(), x.stride(0), 0,
        added.data_ptr(), added.stride(0), weight.data_ptr(), total.data_ptr(), out.data_ptr(), 0,
        eps=eps, offset=offset,
    )  # fmt: skip
    return total, out


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """See ``fused_triton.rotate``."""
    out = torch.empty(x.shape, dtype=x.dtype)
    _rotate(x, positions, table, out)
    return out


def rotate_split(
    qk: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """See ``fused_triton.rotate_split``."""
    num_rows, num_heads, size = qk.shape
    num_k = v.shape[1]
    num_q = num_heads - num_k
    assert positions.dtype == torch.int64 and positions.is_contiguous()
    _run(
        ROTATE_SPLIT, num_rows, (num_heads + num_k) * size, qk.dtype == torch.float32, size, num_q,
        qk.data_ptr(), qk.stride(0), qk.stride(1), positions.data_ptr(), 0, table.data_ptr(), 0,
        out[0].data_ptr(), table.shape[1] // 2, out[1].data_ptr(), out[2].data_ptr(), num_k,
        v.data_ptr(), v.stride(0), v.stride(1),
    )  # fmt: skip


def _rotate(x: Tensor, positions: Tensor, table: Tensor, out: Tensor) -> None:
    num_rows, heads, size = x.shape
    assert positions.dtype == torch.int64 and positions.is_contiguous()
    _run(
        ROTATE, num_rows, heads * size, x.dtype == torch.float32, size, heads, x.data_ptr(),
        x.stride(0), x.stride(1), positions.data_ptr(), 0, table.data_ptr(), 0, out.data_ptr(),
        table.shape[1] // 2,
    )  # fmt: skip


def gate(h: Tensor, *, is_silu: bool) -> Tensor:
    """See ``fused_triton.gate``."""
    num_rows, size = h.shape[0], h.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=h.dtype)
    _run(
        GATE, num_rows, size, h.dtype == torch.float32, size, 1, h.data_ptr(), h.stride(0), 0, 0, 0,
        0, 0, out.data_ptr(), is_silu,
    )  # fmt: skip
    return out
