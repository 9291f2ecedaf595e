"""Triton's kernels are compiled for an H200 where there is no GPU: from the
calls that the engine makes, down to the machine's code, and then not run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastdecode.core.spec import AttentionSpec

triton = pytest.importorskip("triton", reason="needs triton, which torch brings along for CUDA")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPEC = AttentionSpec(8, 2, 128, scale=0.1)


class NoGpu:
    """Stands for an H200's driver: takes in what was compiled, and launches nothing."""

    def __init__(self) -> None:
        self.target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
        self.launched: set[str] = set()
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=self._load,
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
        return object(), object(), 0, 0, 1024


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NoGpu]:
    knobs = importlib.import_module("triton.knobs")
    if knobs.runtime.interpret:
        pytest.skip("kernels are run in Triton's interpreter here")
    driver = importlib.import_module("triton.runtime.driver").driver
    before, gpu = driver._active, NoGpu()
    driver.set_active(gpu)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield gpu
    driver._active = before


@pytest.fixture
def gpu(one_gpu: NoGpu) -> NoGpu:
    one_gpu.launched.clear()
    return one_gpu


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


SPECS = {
    "plain": SPEC,
    "window": replace(SPEC, sliding_window=100),
    "softcap": replace(SPEC, logit_softcap=30.0),
    "alibi": replace(SPEC, alibi_slopes=tuple([0.5] * 8)),
    "heads of 80": replace(SPEC, head_dim=80),
}


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, torch.bfloat16) for name in SPECS), ("plain", torch.float16),
    ("plain", torch.float32),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("is_int8", [False, True], ids=["as it is", "int8"])
def test_attention(name: str, dtype: torch.dtype, is_int8: bool, gpu: NoGpu) -> None:
    kernels = importlib.import_module("sworker.kernels.paged_triton")
    spec, num_slots = SPECS[name], 1024
    q = torch.zeros(3, spec.num_q_heads, spec.head_dim, dtype=dtype)
    new = torch.zeros(3, spec.num_kv_heads, spec.head_dim, dtype=dtype)
    shape = (num_slots, spec.num_kv_heads, spec.head_dim)
    keys, values = (torch.zeros(shape, dtype=torch.int8 if is_int8 else dtype) for _ in range(2))
    scale = torch.zeros(shape[:2])
    scales = (scale, scale) if is_int8 else None
    slopes = None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes)
    kernels.paged_store(new, new, torch.zeros(3, dtype=torch.int64), keys, values, scales)
    lens = torch.ones(3, dtype=torch.int32)
    for block_size, longest in ((64, 64), (16, 2048)):  # in one split, and in several
        tables = torch.zeros(3, 4, dtype=torch.int32)
        kernels.paged_decode(
            q, keys, values, scales, tables, lens, spec, slopes, block_size, longest,
            out=torch.empty_like(q),
        )  # fmt: skip
    several = set() if spec.sliding_window else {"_merge"}
    assert gpu.launched == {"_store", "_decode"} | several
