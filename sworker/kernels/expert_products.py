"""A block's routed experts in bfloat16 on a CPU with ``vdpbf16ps``: from the chosen experts to
their weighted sum in five jobs of compiled code, whose units the threads of torch's own OpenMP
runtime take one by one.

torch multiplies one expert's rows after the other's: each product packs its factors again and is
divided among all threads, which for 64 rows takes as long as the product. Here threads divide
experts and parts of their outputs among themselves, and no weight is packed (``expert_loops``). On
CPUs with tiles (AMX) torch's products are faster, and stay."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch
from torch import Tensor

from cpu_kernels.isa import default_level
from sworker.kernels.fused_numba import ELEMENTS_ALONE, ThreadJob, parallel_regions
from sworker.model.linear import ACTIVATIONS
from sworker.model.moe import ExpertLinear, Experts

_ALIGNED: Final = 32  # hidden and inner dims must be multiples of it
_GROUP_BYTES: Final = 512 << 10
"""Of packed rows for which an expert's weights are read once: they stay in a
core's second cache."""
_UNITS_A_THREAD: Final = 8


def can_multiply(block: Experts) -> bool:
    """Whether there are kernels for the block here: for this CPU, the weights'
    dtype and sizes, and the gate."""
    weights = block.up.weight, block.down.weight
    level = default_level()
    return (
        all(weight.device.type == "cpu" for weight in weights)
        and all(weight.dtype == torch.bfloat16 for weight in weights)
        and not any(size % _ALIGNED for weight in weights for size in weight.shape[1:])
        and level.has_bf16_dot
        and not level.tiles
        and not block.moe.weighs_input
        and _gate_of(block) is not None
        and parallel_regions() is not None
    )


def _gate_of(block: Experts) -> str | None:
    """What ``expert_loops`` calls the block's gate; None: it has none such."""
    if block.moe.gate == "clamped":
        return "CLAMPED"
    if block.act is ACTIVATIONS["silu"]:
        return "SILU" if block.moe.gate == "plain" else "SILU_CLAMPED"
    is_gelu = block.act is ACTIVATIONS["gelu_tanh"] and block.moe.gate == "plain"
    return "GELU_TANH" if is_gelu else None


class _ExpertJob(ThreadJob):
    """With the fields of ``expert_loops``, which it is given."""

    def __init__(self, loops: Any) -> None:
        super().__init__(loops.run_job, loops.JOB_BYTES)
        self.fields: Any = (ctypes.c_int64 * loops.NUM_FIELDS).from_buffer(self.memory, self.offset)
        self.numbers: Any = (ctypes.c_double * 2).from_buffer(
            self.memory, self.offset + loops.NUMBERS
        )
        self.next_unit = ctypes.c_int64.from_buffer(self.memory, self.offset + loops.NEXT)


class ExpertProducts:
    """What computes a block's routed experts. It holds no weights.

    Args:
        block: whose gate it is for.
    """

    def __init__(self, block: Experts) -> None:
        from sworker.kernels import expert_loops

        gate = _gate_of(block)
        assert gate is not None
        self._loops: Any = expert_loops
        self._job = _ExpertJob(expert_loops)
        self._gate = int(getattr(expert_loops, gate))
        limit = torch.tensor(block.moe.limit, dtype=torch.bfloat16)  # as torch's clamps round it
        self._limits = limit.item(), block.moe.alpha

    def __call__(
        self, up: ExpertLinear, down: ExpertLinear, x: Tensor, experts: Tensor, weights: Tensor
    ) -> Tensor:
        """Return each row's weighted sum, bfloat16 [T, hidden].

        Args:
            up, down: bfloat16 [E, 2 · inner, hidden] and [E, hidden, inner].
            x: bfloat16 [T, hidden].
            experts: int64 [T, k]; E is one that isn't here, and adds nothing.
            weights: of the experts, float32 or bfloat16 [T, k].
        """
        if not len(x):
            return torch.empty_like(x)
        loops, fields = self._loops, self._job.fields
        hidden, inner = down.weight.shape[1:]
        experts, weights = experts.contiguous(), weights.contiguous()
        tables = self._plan(experts, len(up.weight), max(hidden, inner))
        num_groups, num_rows = fields[loops.NUM_GROUPS], fields[loops.NUM_VECTORS] * loops.LANES
        packed = x.new_empty((num_rows, hidden))
        self._set(ROWS=x, X_ROW=x.stride(0), OUT=packed, SIZE_IN=hidden)
        self._run(loops.PACK, fields[loops.NUM_BLOCKS], hidden // _ALIGNED, packed.numel())
        h = x.new_empty((num_rows, inner))
        self._set(X=packed, OUT=h, SIZE_OUT=inner, WEIGHT=up.weight, BIAS=up.bias)
        self._run(loops.UP, num_groups, -(-inner // loops.PANEL))
        y = x.new_empty((experts.numel(), hidden))
        self._set(X=h, OUT=y, SIZE_IN=inner, SIZE_OUT=hidden, WEIGHT=down.weight, BIAS=down.bias)
        self._run(loops.DOWN, num_groups, -(-hidden // loops.PANEL))
        out = torch.empty(x.shape, dtype=x.dtype)
        self._set(X=y, OUT=out, WEIGHTS=weights, IS_WIDE=weights.dtype == torch.float32)
        self._run(loops.SUM, -(-len(x) // loops.SUM_ROWS), 1, y.numel())
        del tables  # until here the job has their addresses
        return out

    def _plan(self, experts: Tensor, num_experts: int, widest: int) -> tuple[Tensor, ...]:
        """Sort rows by expert, into blocks and groups: tables that the job points to."""
        num_slots, loops = experts.numel(), self._loops
        sizes = (num_slots, num_slots, num_slots * loops.GROUP_FIELDS,
                 num_slots * loops.BLOCK_FIELDS, num_experts + 1)  # fmt: skip
        memory = torch.empty(sum(sizes), dtype=torch.int64)
        slots, places, groups, blocks, ends = memory.split(sizes)
        self._job.numbers[:] = self._limits
        self._set(
            CHOSEN=experts, NUM_ROWS=experts.shape[0], TOP_K=experts.shape[1],
            NUM_EXPERTS=num_experts, GATE=self._gate, SLOTS=slots, PLACES=places, GROUPS=groups,
            BLOCKS=blocks, OUT=ends,
            GROUP_BLOCKS=max(1, _GROUP_BYTES // (widest * 2 * loops.LANES * loops.BLOCK_VECTORS)),
        )  # fmt: skip
        self._run(loops.PLAN, 1, 1, 0)
        return slots, places, groups, blocks, ends

    def _set(self, **fields: int | Tensor | None) -> None:
        """Fields of the job: numbers, or tensors' addresses, 0 for None."""
        for name, value in fields.items():
            number = value.data_ptr() if isinstance(value, Tensor) else value or 0
            self._job.fields[getattr(self._loops, name)] = number

    def _run(
        self, kind: int, num_pieces: int, most_chunks: int, elements: int = ELEMENTS_ALONE
    ) -> None:
        """Have a job done, each piece in as many chunks as keep all threads busy."""
        num_threads = torch.get_num_threads()
        chunks = min(most_chunks, -(-_UNITS_A_THREAD * num_threads // max(1, num_pieces)))
        self._set(KIND=kind, NUM_UNITS=num_pieces * chunks, CHUNKS=chunks)
        self._job.next_unit.value = 0
        self._job.runner(num_threads, elements)()
