"""Parts of a layer between its matrix products, each as one pass over memory, on a CPU. The same
functions as in ``fused_triton``, and the same rounding.

torch takes two to ten operators for each of them, which for a prompt's thousands of rows move
several times the bytes, and for a few decoded rows cost more to start than to run. Rows are dealt
out to the threads of torch's own OpenMP runtime, which are awake, as they have just run a matrix
product."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial
from struct import Struct
from typing import Any, Final

import torch
from torch import Tensor

from sworker.kernels import row_loops
from sworker.kernels.row_loops import (
    GATE,
    JOB_BYTES,
    NEXT,
    NORM,
    NUM_FIELDS,
    ROTATE,
)
from sworker.kernels.threads import openmp_library
from sworker.model.skeleton import QKV

ELEMENTS_ALONE: Final = 3 << 14  # fewer elements aren't worth a second thread
_ELEMENTS_AT_ONCE: Final = 1 << 13  # elements that a thread takes at a time
_JOB: Final = Struct(f"<{NUM_FIELDS}q2d{NEXT - 8 * (NUM_FIELDS + 2)}xq")


@cache
def parallel_regions() -> Callable[..., None] | None:
    """``GOMP_parallel`` of torch's OpenMP runtime: runs a function on so many threads."""
    library = openmp_library()
    if library is None:
        return None
    function: Callable[..., None] | None = getattr(ctypes.CDLL(library), "GOMP_parallel", None)
    return function


class Job:
    """Memory of a job, aligned to cache lines.

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

    def runner(self, num_threads: int, elements: int = ELEMENTS_ALONE) -> Callable[[], None]:
        """What has all units done; in this thread alone, where they are of few elements."""
        parallel = parallel_regions()
        if elements < ELEMENTS_ALONE or num_threads == 1 or parallel is None:
            return partial(self._run_alone, self.address)
        return partial(parallel, *self._given, num_threads, 0)


class ThreadJob(Job, threading.local):
    """One that each calling thread has memory of its own for."""


@cache
def _job(is_wide: bool) -> ThreadJob:
    return ThreadJob(row_loops.compiled(is_wide=is_wide), JOB_BYTES)


def is_possible(dtype: torch.dtype) -> bool:
    """Whether there are kernels for such activations, and threads to run them."""
    return dtype in (torch.float32, torch.bfloat16) and parallel_regions() is not None


def _run(
    kind: int,
    is_wide: bool,
    num_rows: int,
    row_elements: int,
    *fields: int,
    eps: float = 0.0,
    offset: float = 0.0,
) -> None:
    """Have a job done; ``fields``: those of ``row_loops`` from ``SIZE`` on."""
    num_threads = torch.get_num_threads()
    share, most = -(-num_rows // num_threads), _ELEMENTS_AT_ONCE // row_elements
    at_once = (share if share < most else most) or 1
    unused = (0,) * (NUM_FIELDS - 4 - len(fields))
    job = _job(is_wide)
    _JOB.pack_into(
        job.memory, job.offset, kind, is_wide, num_rows, at_once, *fields, *unused, eps, offset, 0
    )
    # The last: no block of rows is taken yet.
    job.runner(num_threads, num_rows * row_elements)()


def norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    heads, x_head = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    num_rows, size = x.shape[0], x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype)
    _run(
        NORM, x.dtype == torch.float32, num_rows, heads * size, size, heads, x.data_ptr(),
        x.stride(0), x_head, 0, 0, weight.data_ptr(), 0, out.data_ptr(), 0, eps=eps, offset=offset,
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
    num_rows, size = x.shape
    if total is None:
        total = torch.empty_like(x)
    out = torch.empty_like(x)
    _run(
        NORM, x.dtype == torch.float32, num_rows, size, size, 1, x.data_ptr(), x.stride(0), 0,
        added.data_ptr(), added.stride(0), weight.data_ptr(), total.data_ptr(), out.data_ptr(), 0,
        eps=eps, offset=offset,
    )  # fmt: skip
    return total, out


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    assert positions.dtype == torch.int64 and positions.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    num_rows, heads, size = x.shape
    _run(
        ROTATE, x.dtype == torch.float32, num_rows, heads * size, size, heads, x.data_ptr(),
        x.stride(0), x.stride(1), positions.data_ptr(), 0, table.data_ptr(), 0, out.data_ptr(),
        table.shape[1] // 2,
    )  # fmt: skip
    return out


def rotate_split(qk: Tensor, v: Tensor, positions: Tensor, table: Tensor, out: QKV) -> None:
    assert positions.dtype == torch.int64 and positions.is_contiguous()
    num_q, (num_rows, num_k, size) = out[0].shape[1], out[1].shape
    _run(
        ROTATE, out[1].dtype == torch.float32, num_rows, (num_q + 2 * num_k) * size, size,
        num_q, qk.data_ptr(), qk.stride(0), qk.stride(1), positions.data_ptr(), 0,
        table.data_ptr(), 0, out[0].data_ptr(), table.shape[1] // 2, out[1].data_ptr(),
        out[2].data_ptr(), num_k, v.data_ptr(), v.stride(0), v.stride(1),
    )  # fmt: skip


def gate(h: Tensor, *, is_silu: bool) -> Tensor:
    num_rows, size = h.shape[0], h.shape[1] // 2
    out = h.new_empty((num_rows, size))
    _run(
        GATE, h.dtype == torch.float32, num_rows, size, size, 1, h.data_ptr(), h.stride(0), 0, 0,
        0, 0, 0, out.data_ptr(), is_silu,
    )  # fmt: skip
    return out


class RowJob(Job):
    """A job of one layer, for one thread at a time: what is the same in every step is laid
    out once, and a call writes where the rows are that it takes.

    Args:
        fields: numbers of fields of ``row_loops``, and what they hold.
        eps, offset: see ``norm``.
    """

    def __init__(
        self, fields: Mapping[int, int], size: int, eps: float = 0.0, offset: float = 0.0
    ) -> None:
        loops = row_loops.compiled(is_wide=bool(fields[row_loops.IS_WIDE]))
        super().__init__(loops, JOB_BYTES)
        job = memoryview(self.memory).cast("B")[self.offset : self.offset + JOB_BYTES]
        Struct("<2d").pack_into(job, 8 * NUM_FIELDS, eps, offset)
        self.fields = job.cast("q")
        for field, number in fields.items():
            self.fields[field] = number
        self.size = size

    def lay_out(self, num_rows: int, out: Tensor | None = None) -> None:
        """From now on each call has so many rows, more than none, and writes to ``out``."""
        fields, num_threads = self.fields, torch.get_num_threads()
        share, most = -(-num_rows // num_threads), max(1, _ELEMENTS_AT_ONCE // self.size)
        fields[row_loops.NUM_ROWS], fields[row_loops.ROWS_AT_ONCE] = num_rows, min(share, most)
        if out is not None:
            fields[row_loops.OUT] = out.data_ptr()
        self._run = self.runner(num_threads, num_rows * self.size)


class AddNorm(RowJob):
    """``add_norm`` of one layer.

    Args:
        weight: [size]; it stays where it is.
    """

    def __init__(self, weight: Tensor, eps: float, offset: float) -> None:
        size = weight.shape[0]
        fields = {
            row_loops.KIND: NORM, row_loops.IS_WIDE: weight.dtype == torch.float32,
            row_loops.SIZE: size, row_loops.NUM_HEADS: 1, row_loops.WEIGHT: weight.data_ptr(),
            row_loops.X_ROW: size, row_loops.Y_ROW: size,
        }  # fmt: skip
        super().__init__(fields, size, eps, offset)

    def __call__(self, x: Tensor, added: Tensor | None, total: Tensor) -> Tensor:
        """See ``fused_triton.add_norm``; all are dense, and the sum is elsewhere than they
        are. Returns it: x, where nothing is added."""
        fields = self.fields
        fields[row_loops.X], fields[row_loops.TOTAL] = x.data_ptr(), total.data_ptr()
        fields[row_loops.Y] = 0 if added is None else added.data_ptr()
        fields[NEXT // 8] = 0  # no block of rows is taken yet
        self._run()
        return x if added is None else total


class RotateHeads(RowJob):
    """``rotate_split`` of one layer, of what its projection to q, k and v gives.

    Args:
        table: see ``fused_triton.rotate``; it stays where it is.
    """

    def __init__(
        self, table: Tensor, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        row = (num_q_heads + 2 * num_kv_heads) * head_dim
        fields = {
            row_loops.KIND: ROTATE, row_loops.IS_WIDE: dtype == torch.float32,
            row_loops.SIZE: head_dim, row_loops.NUM_HEADS: num_q_heads,
            row_loops.NUM_K: num_kv_heads, row_loops.X_ROW: row, row_loops.X_HEAD: head_dim,
            row_loops.V_ROW: row, row_loops.V_HEAD: head_dim,
            row_loops.WEIGHT: table.data_ptr(), row_loops.FLAG: table.shape[1] // 2,
        }  # fmt: skip
        self._v_bytes = (num_q_heads + num_kv_heads) * head_dim * dtype.itemsize
        super().__init__(fields, row)

    def __call__(self, heads: Tensor, positions: Tensor, out: QKV) -> None:
        """heads [T, (Hq + 2 Hkv) · D], dense: of q, then k, then v; positions int64 [T],
        dense; ``out``: each dense."""
        first, fields = heads.data_ptr(), self.fields
        fields[row_loops.X], fields[row_loops.V] = first, first + self._v_bytes
        fields[row_loops.Y] = positions.data_ptr()
        q, k, v = out
        fields[row_loops.OUT] = q.data_ptr()
        fields[row_loops.K_OUT], fields[row_loops.V_OUT] = k.data_ptr(), v.data_ptr()
        fields[NEXT // 8] = 0
        self._run()


class Gate(RowJob):
    """``gate`` of one layer."""

    def __init__(self, size: int, dtype: torch.dtype, *, is_silu: bool) -> None:
        fields = {
            row_loops.KIND: GATE, row_loops.IS_WIDE: dtype == torch.float32, row_loops.SIZE: size,
            row_loops.NUM_HEADS: 1, row_loops.X_ROW: 2 * size, row_loops.FLAG: is_silu,
        }  # fmt: skip
        super().__init__(fields, size)

    def __call__(self, h: Tensor) -> None:
        """See ``fused_triton.gate``; h is dense."""
        fields = self.fields
        fields[row_loops.X], fields[NEXT // 8] = h.data_ptr(), 0
        self._run()
