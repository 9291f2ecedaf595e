"""Triton's kernels are compiled for GPUs where there is none: from the calls that the engine
makes, down to the machine's code, of which registers, spills and shared memory are read; and
then not run."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from examples import TRIES_ALL
from fastdecode.core.spec import AttentionSpec
from sworker.kv_splits import Splits, SplitShape, chunk_tiles, plan_decode, plan_splits

triton = pytest.importorskip("triton", reason="needs triton, which torch brings along for CUDA")

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPEC = AttentionSpec(8, 2, 128, scale=0.1)
SHARED_MEMORY = {80: 166912, 86: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes that a program may have, by compute capability."""


@dataclass(frozen=True)
class Code:
    """A kernel for a GPU."""

    name: str
    registers: int
    stack_bytes: int  # registers that were spilled, of each thread
    shared_bytes: int


class NoGpu:
    """Stands for a GPU's driver: takes in what was compiled, and launches nothing."""

    def __init__(self, directory: Path, capability: int = 90) -> None:
        self.target = importlib.import_module("triton.backends.compiler").GPUTarget(
            "cuda", capability, 32
        )
        self.launched: set[str] = set()
        self.compiled: list[Code] = []
        self._directory = directory
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY[capability]},
            load_binary=self._load,
            unload_module=lambda module: None,
        )

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return -1  # what is compiled for it is nobody else's

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: self.launched.add(metadata.name)

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        assert len(binary) > 100
        path = self._directory / f"{len(self.compiled)}.cubin"
        path.write_bytes(binary)
        tool = importlib.import_module("triton.knobs").nvidia.cuobjdump.path
        done = subprocess.run(
            [tool, "-res-usage", path], capture_output=True, text=True, check=True
        )
        registers, stack = (
            int(re.findall(rf"{what}:(\d+)", done.stdout)[0]) for what in ("REG", "STACK")
        )
        self.compiled.append(Code(name, registers, stack, shared))
        return object(), object(), 0, 0, 1024


def forget(kernels: Any) -> None:
    """What was compiled for another GPU, and how much shared memory that had."""
    importlib.import_module("triton.compiler.compiler").max_shared_mem.cache_clear()
    for kernel in vars(kernels).values():
        if hasattr(kernel, "device_caches"):
            kernel.device_caches.clear()


@pytest.fixture
def gpu_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], NoGpu]]:
    """A GPU of a compute capability becomes the current one."""
    if importlib.import_module("triton.knobs").runtime.interpret:
        pytest.skip("kernels are run in Triton's interpreter here")
    kernels = [
        importlib.import_module(f"sworker.kernels.{name}_triton") for name in ("paged", "fused")
    ]
    if not hasattr(kernels[0]._attend, "device_caches"):
        pytest.skip("kernels are interpreted in this process")
    driver = importlib.import_module("triton.runtime.driver").driver
    before = driver._active
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

    def set_active(capability: int) -> NoGpu:
        for module in kernels:
            forget(module)
        gpu = NoGpu(tmp_path, capability)
        driver.set_active(gpu)
        monkeypatch.setattr(kernels[0], "_shared_memory", lambda device: SHARED_MEMORY[capability])
        return gpu

    yield set_active
    driver._active = before
    for module in kernels:
        forget(module)


@pytest.fixture
def gpu(gpu_of: Callable[[int], NoGpu]) -> NoGpu:
    """An H200."""
    return gpu_of(90)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_a_layer(dtype: torch.dtype, gpu: NoGpu) -> None:
    kernels = importlib.import_module("sworker.kernels.fused_triton")
    x, weight = torch.zeros(5, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    kernels.norm(x, weight, 1e-5, 0.0)
    kernels.norm(x.view(5, 32, 128), weight[:128], 1e-5, 1.0)
    kernels.add_norm(x, x, weight, 1e-5, 0.0, torch.empty_like(x))
    positions = torch.zeros(5, dtype=torch.int64)
    heads = x.view(5, 32, 128)
    for num_turned in (128, 32):  # all dims of a head, and some
        table = torch.zeros(64, num_turned)
        kernels.rotate(heads, positions, table)
        out = tuple(torch.empty(5, n, 128, dtype=dtype) for n in (24, 4, 4))
        kernels.rotate_split(heads[:, :28], heads[:, 28:], positions, table, out)
    for is_silu in (True, False):
        kernels.gate(x, is_silu=is_silu)
    assert gpu.launched == {"_norm", "_rotate", "_rotate_split", "_gate"}
    assert all(code.stack_bytes == 0 for code in gpu.compiled)


SPECS = {
    "plain": SPEC,
    "window": replace(SPEC, sliding_window=100),
    "softcap": replace(SPEC, logit_softcap=30.0),
    "alibi": replace(SPEC, alibi_slopes=tuple([0.5] * 8)),
    "heads of 80": replace(SPEC, head_dim=80),
}


class Cache:
    """K and V of a layer, and the calls that attend over them."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype, is_int8: bool) -> None:
        self.kernels = importlib.import_module("sworker.kernels.paged_triton")
        self.spec, self.dtype = spec, dtype
        shape = (1024, spec.num_kv_heads, spec.head_dim)
        self.kv = torch.zeros(shape, dtype=torch.int8 if is_int8 else dtype)
        self.scales = (torch.zeros(shape[:2]), torch.zeros(shape[:2])) if is_int8 else None
        slopes = spec.alibi_slopes
        self.slopes = None if slopes is None else torch.tensor(slopes)

    def q(self, num_rows: int) -> torch.Tensor:
        return torch.zeros(num_rows, self.spec.num_q_heads, self.spec.head_dim, dtype=self.dtype)

    def store(self) -> None:
        new = torch.zeros(3, *self.kv.shape[1:], dtype=self.dtype)
        slots = torch.zeros(3, dtype=torch.int64)
        self.kernels.paged_store(new, new, slots, self.kv, self.kv, self.scales)

    def decode(self, block_size: int, longest: int = 2048) -> None:
        lens, q = np.array([longest, 3, 40]), self.q(3)
        splits = Splits.upload(plan_decode(lens, self.spec.sliding_window, 66), CPU)
        tables = torch.zeros(3, 4, dtype=torch.int32)
        self.kernels.paged_decode(
            q, self.kv, self.kv, self.scales, tables, torch.from_numpy(lens).int(), splits,
            self.spec, self.slopes, block_size, out=torch.empty_like(q),
        )  # fmt: skip

    def attend_chunk(self) -> None:
        tokens, q = self.kernels.chunk_tokens(self.spec, self.dtype), self.q(50)
        tiles = chunk_tiles(np.array([0]), np.array([50]), np.array([900]), tokens)
        shape = SplitShape(len(tiles.rows), 528, tokens)
        splits = Splits.upload(plan_splits(tiles, self.spec.sliding_window, shape), CPU)
        slots = torch.zeros(900, dtype=torch.int64)
        self.kernels.paged_chunks(
            q, self.kv, self.kv, self.scales, slots, splits, self.spec, self.slopes,
            out=torch.empty_like(q),
        )  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, torch.bfloat16) for name in SPECS), ("plain", torch.float16),
    ("plain", torch.float32),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("is_int8", [False, True], ids=["as it is", "int8"])
def test_attention(name: str, dtype: torch.dtype, is_int8: bool, gpu: NoGpu) -> None:
    cache = Cache(SPECS[name], dtype, is_int8)
    cache.store()
    cache.decode(block_size=64, longest=64)  # in one piece
    assert gpu.launched == {"_store", "_attend"}
    cache.decode(block_size=16)  # in several
    cache.attend_chunk()
    assert gpu.launched == {"_store", "_attend"} | (set() if name == "window" else {"_merge"})
    assert all(code.stack_bytes == 0 for code in gpu.compiled)


CAPABILITIES = tuple(SHARED_MEMORY) if TRIES_ALL else (90, 120)
HEAD_DIMS = (64, 80, 96, 128, 256) if TRIES_ALL else (128, 256)
GROUPS = (1, 4, 8, 32) if TRIES_ALL else (4,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_int8", [False, True], ids=["as it is", "int8"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_what_attention_takes(
    capability: int, is_int8: bool, dtype: torch.dtype, gpu_of: Callable[[int], NoGpu]
) -> None:
    """It fits every card (that of Gemma's heads of 256, too, in float32 on 99 KiB), and up to
    heads of 128 no register is spilled. Kernels aren't launched where they don't fit: Triton
    raises."""
    gpu = gpu_of(capability)
    for head_dim in HEAD_DIMS:
        for group_size in GROUPS:
            gpu.compiled.clear()
            cache = Cache(AttentionSpec(2 * group_size, 2, head_dim, 0.1), dtype, is_int8)
            for block_size in (16, 64):
                cache.decode(block_size)
            cache.attend_chunk()
            attention = [code for code in gpu.compiled if code.name == "_attend"]
            assert len(attention) == 3
            assert all(code.shared_bytes <= SHARED_MEMORY[capability] for code in attention)
            if head_dim <= 128:
                assert [code.stack_bytes for code in attention] == [0, 0, 0], (head_dim, attention)


def test_many_query_heads_over_int8(gpu_of: Callable[[int], NoGpu]) -> None:
    """Groups of 32 and heads that aren't a power of two, on a B200."""
    gpu = gpu_of(100)
    Cache(AttentionSpec(64, 2, 80, 0.1), torch.bfloat16, is_int8=True).decode(block_size=64)
    assert [code.stack_bytes for code in gpu.compiled if code.name == "_attend"] == [0]


def test_int8_is_rounded_as_r_workers_do(gpu: NoGpu) -> None:
    """Divisions are exact, and no sum is fused with a product."""
    cache = Cache(SPEC, torch.bfloat16, is_int8=True)
    cache.store()
    (kernel,) = cache.kernels._store.device_caches[gpu.get_current_device()][0].values()
    ptx = kernel.asm["ptx"]
    assert "div.rn.f32" in ptx
    assert not re.search(r"div\.(full|approx)|fma\.rn", ptx)


def test_two_buffers_of_k_and_v(gpu: NoGpu) -> None:
    """A tile is fetched while the one before is used, also where the block table says where it
    is; in 16 bits, heads of 128."""
    cache = Cache(SPEC, torch.bfloat16, is_int8=False)
    for block_size in (16, 64):
        cache.decode(block_size)
    kernels = cache.kernels._attend.device_caches[gpu.get_current_device()][0].values()
    for kernel in kernels:
        assert len(re.findall(r"local_alloc.*memdesc<2x64x128xbf16", kernel.asm["ttgir"])) == 2


def test_each_kernel_says_whether_sums_are_fused(gpu: NoGpu) -> None:
    """Versions of Triton differ in what they do when nobody says."""
    cache = Cache(SPEC, torch.bfloat16, is_int8=True)
    cache.store()
    cache.decode(block_size=16)
    device, found = gpu.get_current_device(), {}
    for name in ("_store", "_attend", "_merge"):
        for kernel in getattr(cache.kernels, name).device_caches[device][0].values():
            found[name] = kernel.metadata.enable_fp_fusion
    assert found == {"_store": False, "_attend": True, "_merge": True}
