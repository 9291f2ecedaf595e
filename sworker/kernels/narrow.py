"""16-bit weights on a CPU that has no products of them: they keep their 16 bits in memory, and are
widened in registers by the product that reads them (``narrow_loops``).

A step of few rows reads half of what float32 weights take. A step of many rows widens each weight
once for six rows, which costs no time beside their products."""

from __future__ import annotations

from functools import cache
from struct import Struct
from typing import Any, Final

import torch
from torch import Tensor, nn

from cpu_kernels.isa import default_level
from sworker.kernels.fused_numba import ThreadJob, parallel_regions
from sworker.model.linear import Embedding, Linear
from sworker.model.moe import ExpertLinear

_UNITS_A_THREAD: Final = 8
_ROWS: Final = 96
"""Rows of a unit, at most: with 1,024 elements each they stay in a core's second cache."""


def is_possible() -> bool:
    """Return True if there are kernels for this CPU, and threads to run them."""
    return default_level().has_fma and parallel_regions() is not None


class NarrowWeight:
    """One matrix or several, in panels of ``narrow_loops``, and their biases.

    Args:
        weight: bfloat16 or float16, [N, K] or [E, N, K].
        bias: [N] or [E, N].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        from sworker.kernels import narrow_loops as loops  # needs Numba

        self._size_out, self._size_in = weight.shape[-2:]
        self._lanes, self._panel = loops.LANES, loops.PANEL
        self._num_panels = -(-self._size_out // loops.PANEL)
        self._padded = self._num_panels * loops.PANEL
        rest = self._padded - self._size_out
        padded = nn.functional.pad(weight, (0, 0, 0, rest)) if rest else weight
        halves = padded.view(-1, self._num_panels, 2, loops.LANES, self._size_in)
        self._is_half = weight.dtype == torch.float16
        order = (0, 1, 4, 2, 3) if self._is_half else (0, 1, 4, 3, 2)
        self._panels = halves.permute(order).contiguous()
        self._biases = torch.zeros(len(halves), self._padded)
        if bias is not None:
            self._biases[:, : self._size_out] = bias
        self._pack_into, self._job = _job(is_half=self._is_half)

    def __call__(self, x: Tensor, number: int = 0) -> Tensor:
        """Multiply with one of the matrices: float32 x [T, K] → float32 [T, N]."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        num_rows, num_panels, num_threads = x.shape[0], self._num_panels, torch.get_num_threads()
        out = x.new_empty((num_rows, self._padded))
        if num_rows:
            group = 4 // num_rows or 1  # panels of a tile, see ``narrow_loops``
            num_groups, row_units = -(-num_panels // group), -(-num_rows // _ROWS)
            job = self._job
            self._pack_into(
                job.memory, job.offset, num_rows, num_panels, self._size_in, x.data_ptr(),
                4 * x.stride(0), self._panels.data_ptr() + number * self._panels[0].nbytes,
                self._biases.data_ptr() + 4 * number * self._padded, out.data_ptr(),
                4 * self._padded, row_units,
                min(num_groups, -(-_UNITS_A_THREAD * num_threads // row_units)), group, 0,
            )  # fmt: skip
            job.runner(num_threads, num_panels * self._size_in * 16)()
        return out if self._padded == self._size_out else out[:, : self._size_out].contiguous()

    def rows(self, numbers: Tensor) -> Tensor:
        """Return rows of the first matrix: numbers [T] → float32 [T, K]."""
        panel = numbers // self._panel
        half, lane = numbers % self._panel // self._lanes, numbers % self._lanes
        first, second = (half, lane) if self._is_half else (lane, half)
        found: Tensor = self._panels[0].permute(0, 2, 3, 1)[panel, first, second]
        return found.float()


class NarrowLinear(nn.Module):
    """A ``Linear`` with 16-bit weights for float32 rows."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.splits = linear.splits
        self._weight = NarrowWeight(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:  # [T, in_size] → [T, sum(splits)]
        return self._weight(x)


class NarrowEmbedding(nn.Module):
    """An ``Embedding`` of 16 bits whose rows are float32."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self._weight = NarrowWeight(embedding.weight)

    def forward(self, rows: Tensor) -> Tensor:  # [T] → [T, size]
        return self._weight.rows(rows)

    def project(self, x: Tensor) -> Tensor:
        return self._weight(x)


class NarrowExperts(nn.Module):
    """An ``ExpertLinear`` with 16-bit weights for float32 rows."""

    is_packed = True

    def __init__(self, linear: ExpertLinear) -> None:
        super().__init__()
        self.first, self.splits = linear.first, linear.splits
        self._weight = NarrowWeight(linear.weight, linear.bias)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self._weight(x, expert)


@cache
def _job(*, is_half: bool) -> tuple[Any, ThreadJob]:
    """What writes a job's fields, and the job, of which each thread has its own."""
    from sworker.kernels import narrow_loops as loops

    fields = Struct(f"<{loops.NUM_FIELDS}q{loops.NEXT - 8 * loops.NUM_FIELDS}xq")
    return fields.pack_into, ThreadJob(loops.compiled(is_half=is_half), loops.JOB_BYTES)
