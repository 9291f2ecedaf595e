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
from collections.abc import Callable, Mapping
from functools import cache
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
    ROTATE_SPLIT,
    run_job,
)
from sworker.kernels.threads import openmp_library
from sworker.model.skeleton import QKV

ELEMENTS_ALONE: Final = 3 << 14
"""Fewer than so many aren't worth a second thread."""
_ELEMENTS_AT_ONCE: Final = 1 << 13
"""That a thread takes at a time."""
_JOB: Final = Struct(f"<{NUM_FIELDS}q2d{NEXT - 8 * (NUM_FIELDS + 2)}xq")


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
    kind: int,
    is_wide: bool,
    num_rows: int,
    row_elements: int,
    size: int,
    num_heads: int,
    x: int,
    x_row: int,
    x_head: int,
    y: int,
    y_row: int,
    weight: int,
    total: int,
    out: int,
    flag: int,
    k_out: int = 0,
    v_out: int = 0,
    num_k: int = 0,
    v: int = 0,
    v_row: int = 0,
    v_head: int = 0,
    eps: float = 0.0,
    offset: float = 0.0,
) -> None:
    """Have a job done; its fields are those of ``row_loops``."""
    num_threads = torch.get_num_threads()
    share, most = -(-num_rows // num_threads), _ELEMENTS_AT_ONCE // row_elements
    at_once = (share if share < most else most) or 1
    _JOB.pack_into(
        _job.memory, _job.offset, kind, is_wide, num_rows, at_once, size, num_heads, x, x_row,
        x_head, y, y_row, weight, total, out, flag, k_out, v_out, num_k, v, v_row, v_head, eps,
        offset, 0,
    )  # fmt: skip
    # The last: no block of rows is taken yet.
    _job.run(num_threads, num_rows * row_elements)


def norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """See ``fused_triton.norm``."""
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
    """See ``fused_triton.add_norm``."""
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
    """See ``fused_triton.rotate``."""
    out = torch.empty(x.shape, dtype=x.dtype)
    _rotate(x, positions, table, out)
    return out


def rotate_split(
    qk: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor,
    out: QKV,
) -> None:
    """See ``fused_triton.rotate_split``."""
    strides = qk.stride(0), qk.stride(1), v.stride(0), v.stride(1)
    _rotate_split(qk.data_ptr(), v.data_ptr(), strides, positions, table, out)


def _rotate_split(
    qk: int,
    v: int,
    strides: tuple[int, int, int, int],
    positions: Tensor,
    table: Tensor,
    out: QKV,
) -> None:
    """``qk``, ``v``: addresses; ``strides``: from row to row and head to head of each."""
    assert positions.dtype == torch.int64 and positions.is_contiguous()
    num_q, (num_rows, num_k, size) = out[0].shape[1], out[1].shape
    _run(
        ROTATE_SPLIT, out[1].dtype == torch.float32, num_rows, (num_q + 2 * num_k) * size, size,
        num_q, qk, strides[0], strides[1], positions.data_ptr(), 0, table.data_ptr(), 0,
        out[0].data_ptr(), table.shape[1] // 2, out[1].data_ptr(), out[2].data_ptr(), num_k, v,
        strides[2], strides[3],
    )  # fmt: skip


def _rotate(x: Tensor, positions: Tensor, table: Tensor, out: Tensor) -> None:
    num_rows, heads, size = x.shape
    assert positions.dtype == torch.int64 and positions.is_contiguous()
    _run(
        ROTATE, x.dtype == torch.float32, num_rows, heads * size, size, heads, x.data_ptr(),
        x.stride(0), x.stride(1), positions.data_ptr(), 0, table.data_ptr(), 0, out.data_ptr(),
        table.shape[1] // 2,
    )  # fmt: skip


def gate(h: Tensor, *, is_silu: bool) -> Tensor:
    """See ``fused_triton.gate``."""
    num_rows, size = h.shape[0], h.shape[1] // 2
    out = h.new_empty((num_rows, size))
    _run(
        GATE, h.dtype == torch.float32, num_rows, size, size, 1, h.data_ptr(), h.stride(0), 0, 0,
        0, 0, 0, out.data_ptr(), is_silu,
    )  # fmt: skip
    return out


class RowJob(Job):
    """A job of one layer: what is the same in every step is laid out once for each
    thread, and a call writes where the rows are.

    Args:
        fields: numbers of fields of ``row_loops``, and what they hold.
        row_elements: that each row has.
        eps, offset: see ``norm``.
    """

    def __init__(
        self, fields: Mapping[int, int], row_elements: int, eps: float = 0.0, offset: float = 0.0
    ) -> None:
        super().__init__(run_job, JOB_BYTES)
        job = memoryview(self.memory).cast("B")[self.offset : self.offset + JOB_BYTES]
        Struct("<2d").pack_into(job, 8 * NUM_FIELDS, eps, offset)
        self.fields = job.cast("q")
        for field, number in fields.items():
            self.fields[field] = number
        self._row_elements = row_elements
        self._most_rows = max(1, _ELEMENTS_AT_ONCE // row_elements)

    def run_rows(self, num_rows: int) -> None:
        """Have all rows done: more than none."""
        fields, num_threads = self.fields, torch.get_num_threads()
        share = -(-num_rows // num_threads)
        fields[row_loops.NUM_ROWS] = num_rows
        fields[row_loops.ROWS_AT_ONCE] = share if share < self._most_rows else self._most_rows
        fields[NEXT // 8] = 0  # no block of rows is taken yet
        self.run(num_threads, num_rows * self._row_elements)


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
        }  # fmt: skip
        super().__init__(fields, size, eps, offset)

    def __call__(
        self, x: Tensor, added: Tensor, total: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``fused_triton.add_norm``."""
        out, fields = torch.empty_like(added), self.fields
        if total is None:
            total = torch.empty_like(added)
        fields[row_loops.X], fields[row_loops.X_ROW] = x.data_ptr(), x.stride(0)
        fields[row_loops.Y], fields[row_loops.Y_ROW] = added.data_ptr(), added.stride(0)
        fields[row_loops.TOTAL], fields[row_loops.OUT] = total.data_ptr(), out.data_ptr()
        self.run_rows(x.shape[0])
        return total, out


class RotateHeads(RowJob):
    """``rotate_split`` of one layer, of what its projection to q, k and v gives.

    Args:
        table: see ``fused_triton.rotate``; it stays where it is.
        num_q_heads, num_kv_heads, head_dim: of the layer.
        dtype: of what it turns.
    """

    def __init__(
        self, table: Tensor, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        row = (num_q_heads + 2 * num_kv_heads) * head_dim
        fields = {
            row_loops.KIND: ROTATE_SPLIT, row_loops.IS_WIDE: dtype == torch.float32,
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
        self.run_rows(heads.shape[0])


class Gate(RowJob):
    """``gate`` of one layer.

    Args:
        size: of what comes out.
        dtype: of both.
    """

    def __init__(self, size: int, dtype: torch.dtype, *, is_silu: bool) -> None:
        fields = {
            row_loops.KIND: GATE, row_loops.IS_WIDE: dtype == torch.float32, row_loops.SIZE: size,
            row_loops.NUM_HEADS: 1, row_loops.X_ROW: 2 * size, row_loops.FLAG: is_silu,
        }  # fmt: skip
        self._size = size
        super().__init__(fields, size)

    def __call__(self, h: Tensor) -> Tensor:
        """See ``fused_triton.gate``; h is dense."""
        out, fields = h.new_empty((h.shape[0], self._size)), self.fields
        fields[row_loops.X], fields[row_loops.OUT] = h.data_ptr(), out.data_ptr()
        self.run_rows(h.shape[0])
        return out
