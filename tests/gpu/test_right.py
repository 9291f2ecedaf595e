"""The part "right" of benchmarks/gpu.py: copies, kernels, graphs and the sampler of a GPU beside
float64 or the CPU, and whole engines. With FASTDECODE_GPU_SMOKE=1 on a CPU, by tiny sizes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import MOST_OFF, Case, cases, pairwise

from fastdecode import LLM, SamplingParams
from fastdecode.core.model.families import read_model_spec
from sworker.buffers import Share, make_staging
from sworker.device import gpu_of
from sworker.graphs import StepGraphs
from sworker.kernels import fused
from sworker.load.weights import random_model
from sworker.model.skeleton import Model
from sworker.sampling.sampler import SamplingState, sample
from sworker.worker import SWorker

IS_SMOKE = "FASTDECODE_GPU_SMOKE" in os.environ and not torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() and not IS_SMOKE,
        reason="needs a CUDA device, and torch built for CUDA",
    ),
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
DEMO_MODEL = Path(__file__).parents[2] / "examples" / "model" / "checkpoint"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = pairwise(list(cases(DTYPES)))


@pytest.fixture
def gpu() -> Any:
    found = gpu_of(DEVICE)
    if found is None:
        pytest.skip("no CUDA device")
    return found


@pytest.fixture(params=[4 << 10, 1 << 20, 64 << 20], ids=lambda size: f"{size >> 10} KiB")
def num_bytes(request: pytest.FixtureRequest) -> int:
    return request.param


def test_copies_of_registered_memory(gpu: Any, num_bytes: int) -> None:
    host, expected = gpu.pinned(num_bytes), torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    host.copy_(expected)
    on_device = host.to(DEVICE, non_blocking=True)
    torch.cuda.synchronize()
    host.zero_()
    host.copy_(on_device, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host, expected)


def test_copies_of_layers_that_are_sent_without_a_wait() -> None:
    num_rows, dim = 300, 64
    staging = make_staging(gpu_of(DEVICE), num_rows * 12 * dim * 2)
    parts = (slice(0, 100), slice(100, num_rows))
    staging.begin_step([Share(rows, (), rows, rows) for rows in parts])
    layers = [
        [torch.randn(num_rows, num, dim, device=DEVICE).bfloat16() for num in (8, 2, 2)]
        for _ in range(5)
    ]
    # On a CPU what is sent is the tensors' own memory.
    sent = [staging.send(*(x.clone() for x in layer)) for layer in layers]
    for staged, layer in zip(sent, layers, strict=True):
        staged.wait()
        for rows, shipment in zip(parts, staged.shipments, strict=True):
            for array, x in zip(shipment, layer, strict=True):
                assert torch.equal(torch.from_numpy(array).view(torch.bfloat16), x[rows].cpu())
    o = staging.begin_layer(layers[0][0].shape, torch.bfloat16)
    for rows, shipment in zip(parts, sent[0].shipments, strict=True):
        staging.receive(shipment[0], o, rows)
    staging.join()
    assert torch.equal(o, layers[0][0])


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("what", ["decoded", "later"])
@torch.inference_mode()
def test_kernels(case: Case, what: str) -> None:
    """New K and V are read from the cache: they were stored right, too."""
    far = 2046 if IS_SMOKE else 20_000  # many pieces
    if what == "later":
        step = case.sequences((64, 2047, 1, far), (9, 130, 300, 17), DEVICE, None)
    else:
        step = case.sequences((0, 62, 63, 64, far), (1, 1, 1, 1, 1), DEVICE, None)
    if gpu_of(DEVICE) is not None:
        step.cache.kernels = pytest.importorskip("sworker.kernels.paged_triton")
    assert step.error(step.step(what)) < MOST_OFF[case.dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_prompts_of_unequal_lengths(dtype: torch.dtype) -> None:
    lengths = (1, 129, 1, 270, 1500, 77)
    case = Case(dtype, False, 128, 4, 64, "plain")
    step = case.sequences([0] * len(lengths), lengths, DEVICE, None)
    assert step.error(step.step("first")) < 2 * MOST_OFF[dtype]


def model_8b(dtype: torch.dtype) -> Model:
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 32000, "num_hidden_layers": 4}  # fmt: skip
    if IS_SMOKE:
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "vocab_size": 500, "num_hidden_layers": 2}  # fmt: skip
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": 500000.0, "tie_word_embeddings": False, **shape,
    }  # fmt: skip
    return random_model(read_model_spec(config, name="8b"), device=DEVICE, dtype=dtype)


@pytest.mark.parametrize(
    ("size", "dtype"), [*product((1, 5, 64, 256), DTYPES[:1]), *product((5,), DTYPES[1:])]
)
@torch.inference_mode()
def test_graphs_of_fused_units(size: int, dtype: torch.dtype) -> None:
    """Beside units of plain torch, at 8B's shapes."""
    plain, model = model_8b(dtype), model_8b(dtype)
    is_cuda = DEVICE.type == "cuda"
    assert not is_cuda or fused.fuse(model, DEVICE)
    graphs = StepGraphs(model, DEVICE, capture=is_cuda)
    graphs.prepare([graphs.buckets.of(size)])
    rng, spec = np.random.default_rng(1), model.spec
    one, other = SWorker(spec, plain, DEVICE), SWorker(spec, model, DEVICE, graphs)
    for _ in range(2):  # for other numbers in their memory than they were captured with
        rows = torch.from_numpy(rng.integers(0, min(spec.vocab_size, 8192), (2, size)))
        a, b = one.begin(rows), other.begin(rows)
        has_more = True
        while has_more:
            assert max(map(distance, (b.q, b.k, b.v), (a.q, a.k, a.v))) < 5e-2
            o = torch.randn_like(a.q)
            has_more = a.advance(o)
            b.advance(o)
        every = np.arange(size)
        assert distance(b.logits(every), a.logits(every)) < 5e-2
    assert not is_cuda or graphs.num_graphs == graphs.num_units


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.isfinite().all()
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def test_graphs_that_cannot_be_captured_cost_nothing(gpu: Any) -> None:
    with pytest.raises(RuntimeError):
        gpu.capture(lambda: torch.zeros(1, device=DEVICE).item(), gpu.new_pool())
    torch.cuda.synchronize()
    allocated, stream = torch.cuda.memory_allocated(), torch.cuda.Stream()
    for _ in range(3):
        x = torch.zeros(1 << 20, device=DEVICE)
        x.record_stream(stream)
        del x
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated


SAMPLERS = {
    "greedy": SamplingParams(temperature=0, logprobs=5),
    "whole vocabulary": SamplingParams(temperature=0.9),
    "top-k and min-p": SamplingParams(temperature=1.1, top_k=40, min_p=0.05),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler_draws_the_cpus_tokens(name: str) -> None:
    num_rows, vocab = 32, 500 if IS_SMOKE else 128256
    logits = 3 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(3))
    found = []
    for device in (torch.device("cpu"), DEVICE):
        states = [
            SamplingState(
                SAMPLERS[name], seed, tuple(range(20)), (), vocab, 0, tuple(range(10, 30))
            )
            for seed in range(num_rows)
        ]
        found.append(sample(logits.clone().to(device), states))
    for a, b in zip(*found, strict=True):
        assert a.token_id == b.token_id
        if a.logprob is not None and b.logprob is not None:
            assert b.logprob.logprob == pytest.approx(a.logprob.logprob, abs=1e-4)


LENGTHS = (3, 30, 11, 1, 19, 8, 5, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=20, n=2, ignore_eos=True)
PLACEMENTS: dict[str, dict[str, Any]] = {
    "R-workers": {"kv_placement": "r", "lanes": 2, "r_workers": 2},
    "KV on the GPU": {"kv_placement": "gpu"},
    "KV on both sides": {"kv_placement": "hybrid", "device_kv_gb": 0.0015, "r_workers": 2},
}


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    """The shipped model, of token ids only: no package for text is needed."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    return tmp_path


def token_prompts() -> list[list[int]]:
    rng = np.random.default_rng(2)
    return [rng.integers(3, 1500, length).tolist() for length in LENGTHS]


def completions(model: Path, params: Sequence[SamplingParams], **options: Any) -> list[Any]:
    shared = {"kv_memory_gb": 0.02, "device": DEVICE.type, "r_threads": 1, "prefill_chunk": 9}
    with LLM(str(model), **{**shared, **options}) as llm:
        outputs = llm.generate(token_prompts(), list(params))
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [completion for output in outputs for completion in output.completions]


@pytest.mark.parametrize("graphs", ["auto"] if IS_SMOKE else ["on", "off"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tokens_are_the_cpus(placement: str, graphs: str, model: Path) -> None:
    params = [GREEDY] * 6 + [SAMPLED] * 2
    options = {**PLACEMENTS[placement], "dtype": "float32", "cuda_graphs": graphs}
    found = completions(model, params, **options)
    expected = completions(model, params, dtype="float32", device="cpu")
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]


def test_tokens_in_bfloat16_have_nearly_the_probabilities_of_float32(model: Path) -> None:
    params = [SamplingParams(temperature=0, max_tokens=1, logprobs=5)] * len(LENGTHS)
    exact = completions(model, params, dtype="float32", device="cpu")
    for one, other in zip(exact, completions(model, params, dtype="bfloat16"), strict=True):
        a, b = (dict(each.logprobs[0].top) for each in (one, other))
        assert all(abs(a[token] - b[token]) < 0.3 for token in a.keys() & b.keys())


def test_tokens_of_2000_steps_take_no_memory(gpu: Any, model: Path) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (200, 120, 60)]
    options = {"device": "cuda", "kv_memory_gb": 0.02, "dtype": "bfloat16", "lanes": 2}
    peaks = []
    with LLM(str(model), **options) as llm:
        while llm.stats.num_steps < 2000:
            llm.generate(token_prompts()[:3], params)
            torch.cuda.synchronize()
            peaks.append(torch.cuda.memory_reserved())
    assert peaks[-1] <= peaks[2]
