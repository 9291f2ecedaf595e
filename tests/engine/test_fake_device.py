"""Steps on CUDA tensors that have no memory: nothing mixes host and device, and
nothing makes the host wait for the device. In bfloat16, some in float32, too; every row of
families in ``make campaign``. Triton's kernels and grouped products have stand-ins."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, FEW_FAMILIES
from fake_gpu import CUDA, FakeGpu, moved, with_fakes
from families import FAMILIES as OTHER_FAMILIES
from families import config_of
from torch import Tensor

from examples import TRIES_ALL
from fastdecode.core.dtype import DType
from fastdecode.core.model.families import ROWS, read_model_spec
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.sequence import SamplingParams
from fastdecode.core.spec import KVSpec
from sworker.buffers import GpuStaging, Share
from sworker.graphs import MAX_GRAPHS, StepGraphs
from sworker.kv_splits import Splits
from sworker.load.weights import load_model, random_model
from sworker.model import moe as block_module
from sworker.model.skeleton import Model
from sworker.paged import PagedKV, PagedStep, Prompt
from sworker.prefill import add_sinks
from sworker.sampling.sampler import SamplingState, draw
from sworker.whole import WholeSteps
from sworker.worker import Pass, SWorker

CASES = [
    *((family, torch.bfloat16) for family in FEW_FAMILIES),
    *((family, torch.float32) for family in FEW_FAMILIES[: 3 if TRIES_ALL else 1]),
]
ALL_ROWS = tuple(OTHER_FAMILIES)
FEW_ROWS = ALL_ROWS if TRIES_ALL else ("gpt_oss", "laguna", "step3p5", "llama4_text", "glm4")
"""Sinks and experts; query heads that differ by layer; limits of gates; layers that don't turn;
norms behind both branches."""
BLOCK_SIZE, NUM_BLOCKS = 16, 40
NUM_DECODED, LATER, FIRST = 5, 20, 9
CPU = torch.device("cpu")


class StandIns:
    """Of Triton's kernels: they take what those take, all of it on the device."""

    def __init__(self) -> None:
        self.num_calls = 0

    def _check(self, *tensors: Tensor | None) -> None:
        self.num_calls += 1
        assert all(x is None or x.device == CUDA for x in tensors)

    def paged_store(
        self, k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor, scales: Any
    ) -> None:
        self._check(k, v, slots, keys, values, *(scales or ()))

    def paged_decode(
        self, q: Tensor, keys: Tensor, values: Tensor, scales: Any, tables: Tensor, lens: Tensor,
        splits: Splits, spec: Any, slopes: Tensor | None, block_size: int, *, out: Tensor,
        lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._check(q, keys, values, tables, lens, splits.pieces, slopes, out, lse, *(scales or ()))
        assert tables.dtype == lens.dtype == torch.int32 and out.dtype == q.dtype

    def chunk_tokens(self, spec: Any, dtype: torch.dtype) -> int:
        return 8

    def paged_chunks(
        self, q: Tensor, keys: Tensor, values: Tensor, scales: Any, slots: Tensor, splits: Splits,
        spec: Any, slopes: Tensor | None, *, out: Tensor, lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._check(q, keys, values, slots, splits.pieces, slopes, out, lse, *(scales or ()))


@pytest.fixture(autouse=True)
def is_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """With FlashAttention, where heads and dtypes are for it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


@pytest.fixture
def loaded(tiny_checkpoint: Callable[..., Path]) -> Callable[[str, torch.dtype], Any]:
    def load(family: str, dtype: torch.dtype) -> tuple[ModelSpec, Model]:
        return load_model(tiny_checkpoint(family), device=CPU, dtype=dtype)

    return load


def decode_step(gpu: FakeGpu, *, with_prompts: bool) -> PagedStep:
    lens = np.array([3, 17, 40, 41, 64], np.int32)
    tables = np.arange(NUM_DECODED * 4, dtype=np.int32).reshape(NUM_DECODED, 4)
    num_rows = NUM_DECODED + (LATER + FIRST if with_prompts else 0)
    up = lambda x: gpu.upload(torch.from_numpy(x))  # noqa: E731
    later = Prompt(slice(NUM_DECODED, NUM_DECODED + LATER), up(np.arange(50, dtype=np.int64)))
    first = NUM_DECODED + LATER if with_prompts else num_rows
    return PagedStep(
        slots=up(np.arange(num_rows, dtype=np.int64)), tables=up(tables), context_lens=up(lens),
        context_lens_host=lens, later=(later,) if with_prompts else (),
        first_rows=slice(first, num_rows), first_starts=(0, 4) if with_prompts else (),
    )  # fmt: skip


def twice(rows: np.ndarray) -> Tensor:
    """As token ids, and as positions."""
    return torch.from_numpy(np.stack((rows, rows)))


def rows_of(num_rows: int) -> np.ndarray:
    return np.arange(num_rows, dtype=np.int64)


def through(forward: Pass, attend: Callable[[Pass], Tensor]) -> None:
    while forward.advance(attend(forward)):
        pass
    logits = forward.logits(np.arange(3))
    assert logits.device == CUDA and logits.shape[0] == 3


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_steps_with_r_workers(
    family: str, dtype: torch.dtype, loaded: Callable[[str, torch.dtype], Any]
) -> None:
    """Units with and without graphs, q, k and v out, o in by either way."""
    run_with_r_workers(*loaded(family, dtype), num_lanes=2, max_graphs=MAX_GRAPHS)


def run_with_r_workers(spec: ModelSpec, model: Model, num_lanes: int, max_graphs: int) -> None:
    dtype = model.dtype
    with with_fakes(FakeGpu()) as gpu, torch.inference_mode():
        moved(model)
        graphs = StepGraphs(
            model,
            CUDA,
            capture=True,
            num_lanes=num_lanes,
            max_rows=8,
            max_graphs=max_graphs,
            gpu=gpu,
        )
        graphs.prepare()
        s_worker = SWorker(spec, model, CUDA, graphs, gpu, num_lanes)
        staging = GpuStaging(gpu, 1 << 16)
        for num_rows in (6, 30):  # in fixed memory, and not
            half = slice(0, num_rows // 2), slice(num_rows // 2, num_rows)
            staging.begin_step([Share(x, (), x, x) for x in half])

            def attend(forward: Pass, half: Any = half) -> Tensor:
                o = staging.begin_layer(forward.q.shape, dtype, forward.place)
                staged = staging.send(forward.q, forward.k, forward.v)
                for rows, direct in zip(half, (0, 1 << 40), strict=True):
                    staging._direct_bytes = direct
                    staging.receive(np.zeros_like(staged.shipments[0][0]), o, rows)
                staging.join()
                if model.sinks is not None:
                    lse = torch.full(o.shape[:2], torch.inf, device=CUDA)
                    add_sinks(o, lse, model.sinks[forward.layer])
                return o

            through(s_worker.begin(twice(rows_of(num_rows)), num_lanes - 1), attend)
    assert gpu.waits == [] and gpu.num_operators > 100


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_steps_with_kv_on_the_device(
    family: str,
    dtype: torch.dtype,
    loaded: Callable[[str, torch.dtype], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decoded tokens, later and first chunks; decode steps as one graph. Gathered
    and by kernels, with KV as activations are and int8."""
    spec, model = loaded(family, dtype)
    monkeypatch.setattr(PagedKV, "_tried", lambda self, kernels, dtype: kernels)
    own = DType.FLOAT32 if dtype == torch.float32 else DType.BFLOAT16
    with with_fakes(FakeGpu()) as gpu, torch.inference_mode():
        moved(model)
        for kv_dtype, kernels in itertools.product((own, DType.INT8), (None, StandIns())):
            kv = KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, kv_dtype, BLOCK_SIZE)
            cache = PagedKV(kv, spec.attention, NUM_BLOCKS, CUDA, kernels)
            run_on_device(spec, model, cache, gpu)
            assert kernels is None or kernels.num_calls > 0
    assert gpu.waits == []


@pytest.mark.parametrize("family", FEW_ROWS)
def test_every_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both, of the families that aren't in ``CASES``: mixtures of experts, sinks, query heads
    that differ by layer."""
    spec = read_model_spec(json.loads(config_of(family, seed=0)), name=family)
    monkeypatch.setattr(PagedKV, "_tried", lambda self, kernels, dtype: kernels)
    monkeypatch.setattr(block_module, "can_group", lambda weight: True)
    monkeypatch.setattr(block_module, "grouped_product", lambda: grouped)
    model, num_units = random_model(spec, device=CPU, dtype=torch.bfloat16), spec.num_layers + 1
    run_with_r_workers(spec, model, num_lanes=1, max_graphs=num_units)
    model = random_model(spec, device=CPU, dtype=torch.bfloat16)
    with with_fakes(FakeGpu()) as gpu, torch.inference_mode():
        moved(model)
        kv = KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, DType.BFLOAT16, BLOCK_SIZE)
        for kernels in (None, StandIns()):
            cache = PagedKV(kv, spec.attention, NUM_BLOCKS, CUDA, kernels)
            cache.sinks = model.sinks
            run_on_device(spec, model, cache, gpu)
    assert gpu.waits == []


def grouped(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    """A stand-in for ``grouped_mm``: of bytes that are on the device."""
    assert x.device == weight.device == offs.device == CUDA
    return x.new_empty(x.shape[0], weight.shape[2])


def test_no_family_is_left_out() -> None:
    """But for MiMo, which is Qwen2, and which transformers doesn't know."""
    assert {row.family for row in ROWS} - {"mimo"} == {*FAMILIES, *ALL_ROWS}


def run_on_device(spec: ModelSpec, model: Model, cache: PagedKV, gpu: FakeGpu) -> None:
    """A step of all kinds of rows; and one that only decodes, if there are kernels."""
    s_worker = SWorker(spec, model, CUDA, None, gpu, 1)
    step, rows = decode_step(gpu, with_prompts=True), rows_of(NUM_DECODED + LATER + FIRST)
    through(
        s_worker.begin(twice(rows)),
        lambda forward: cache.attend(forward.layer, forward.q, forward.k, forward.v, step),
    )
    if cache.kernels is not None:
        graphs = StepGraphs(model, CUDA, capture=True, max_rows=8, max_graphs=1, gpu=gpu)
        whole = WholeSteps(graphs, cache, 64)
        whole.prepare(only_lane=0)
        both = twice(rows_of(NUM_DECODED))
        x = whole.run(0, both, decode_step(gpu, with_prompts=False))
        assert x.device == CUDA


SAMPLING: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "whole": SamplingParams(temperature=0.8, seed=1),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9, seed=1, logprobs=3),
    "top-k": SamplingParams(temperature=1.0, top_k=20, min_p=0.05, seed=1),
    "penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.2, presence_penalty=0.3, logit_bias={2: 1.0}, seed=1
    ),
}


@pytest.mark.parametrize("kind", SAMPLING)
def test_sampling(kind: str) -> None:
    vocab, params = 5000, SAMPLING[kind]
    states = [SamplingState(params, 0, tuple(range(9)), (), vocab, i) for i in range(3)]
    with with_fakes(FakeGpu()) as gpu, torch.inference_mode():
        worker: Any = SWorker.__new__(SWorker)
        worker.gpu, worker._fetches = gpu, {}
        logits = torch.empty((3, vocab), dtype=torch.float32, device=CUDA)
        drawing = draw(logits, states, worker._fetch(0))
        assert drawing.tokens.device == CUDA
    assert gpu.waits == [] and gpu.num_operators > 0


MISTAKES: dict[str, Callable[[Tensor], object]] = {
    "a value": lambda x: x[0].item(),
    "a list": lambda x: x.tolist(),
    "as many as there are": lambda x: x.nonzero(),
    "CPU indices": lambda x: x[torch.tensor([1, 2])],
    "a mask": lambda x: x[x > 0],
    "to the host": lambda x: x.to("cpu"),
    "into plain memory": lambda x: torch.zeros(4).copy_(x, non_blocking=True),
    "out of plain memory": lambda x: x.copy_(torch.zeros(4), non_blocking=True),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_what_makes_the_host_wait_is_found(what: str) -> None:
    with with_fakes(FakeGpu()) as gpu:
        x = torch.empty(4, device=CUDA)
        try:
            MISTAKES[what](x)
        except Exception:  # a value of a tensor that has none
            assert gpu.waits
    assert len(gpu.waits) == 1


def test_mixed_devices_are_refused() -> None:
    with with_fakes(FakeGpu()) as gpu:
        x = torch.empty(4, device=CUDA)
        with pytest.raises(Exception, match="device"):
            _ = x + torch.zeros(4)
    assert gpu.num_operators > 0
