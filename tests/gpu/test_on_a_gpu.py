"""What only a GPU can show: the CPU's tokens, graphs and lanes that change
none, copies beside the compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import prompts
from paged_sequences import SPECS, Sequences

from fastdecode import LLM, SamplingParams
from fastdecode.core.spec import AttentionSpec
from sworker import prefill
from sworker.buffers import Share, make_staging
from sworker.device import gpu_of
from sworker.graphs import StepGraphs
from sworker.kernels.fused import fuse
from sworker.load.weights import load_model
from sworker.prefill import local_causal_attention
from sworker.worker import SWorker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and torch built for CUDA"
    ),
]
CUDA = torch.device("cuda", 0)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=20, n=2, ignore_eos=True)
LENGTHS = (3, 30, 11, 1, 19, 8, 5, 40)


def tokens(path: Path, **options: Any) -> list[list[tuple[int, ...]]]:
    shared = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.02, "prefill_chunk": 9}
    shared |= {"device": "cpu", "kv_placement": "r"}
    with LLM(str(path), **{**shared, **options}) as llm:
        outputs = llm.generate(prompts(LENGTHS, seed=2), [GREEDY] * 6 + [SAMPLED] * 2)
    assert [output.error for output in outputs] == [None] * len(LENGTHS)
    return [[completion.token_ids for completion in output.completions] for output in outputs]


def test_the_cpus_tokens(tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint("llama")
    expected = tokens(path)
    for options in (
        {"lanes": 1},
        {"lanes": 2, "r_workers": 2},
        {"lanes": 4},
        {"kv_placement": "gpu"},
    ):
        for graphs in ("on", "off"):
            assert tokens(path, device="cuda", cuda_graphs=graphs, **options) == expected, (
                options,
                graphs,
            )


@pytest.mark.parametrize("family", ["gemma2", "bloom", "mistral"])
def test_the_cpus_tokens_of_other_families(
    family: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    path = tiny_checkpoint(family)
    expected = tokens(path)
    for options in ({"lanes": 2}, {"kv_placement": "gpu"}):
        assert tokens(path, device="cuda", **options) == expected, options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_fused_kernels(dtype: torch.dtype, tiny_checkpoint: Callable[..., Path]) -> None:
    pytest.importorskip("triton")
    steps = []
    for is_fused in (False, True):
        spec, model = load_model(tiny_checkpoint("gemma2"), device=CUDA, dtype=dtype)
        assert not is_fused or fuse(model, CUDA)
        steps.append(SWorker(spec, model, CUDA).begin(np.arange(9), np.arange(9)))
    plain, fused = steps
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fused.q, plain.q, atol=tolerance, rtol=tolerance)
    plain.advance(plain.q)
    fused.advance(plain.q)
    torch.testing.assert_close(fused.k, plain.k, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_prompts_in_one_call(dtype: torch.dtype) -> None:
    """FlashAttention for variable lengths says of each prompt what is said of
    it alone, the log-sum-exp too."""
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, scale=0.125)
    starts = (0, 1, 130, 131, 400)
    q, k, v = torch.randn(400, 12, 64, device=CUDA).to(dtype).split((8, 2, 2), dim=1)
    assert prefill._has_ragged_kernel(q)
    together = local_causal_attention(q, k, v, starts, spec, want_lse=True)
    for start, end in itertools.pairwise(starts):
        rows = slice(start, end)
        alone = local_causal_attention(
            *(x[rows].float() for x in (q, k, v)), (0,), spec, want_lse=True
        )
        torch.testing.assert_close(together[0][rows].float(), alone[0], atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(together[1][rows], alone[1], atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_captured_units(tiny_checkpoint: Callable[..., Path]) -> None:
    """Graphs are right for other numbers in their buffers than they were
    captured with."""
    spec, model = load_model(tiny_checkpoint("gemma2"), device=CUDA, dtype=torch.float32)
    graphs = StepGraphs(model, CUDA, capture=True)
    graphs.prepare([8])
    plain, captured = SWorker(spec, model, CUDA), SWorker(spec, model, CUDA, graphs)
    rng = np.random.default_rng(1)
    for size in (5, 7, 8, 6):
        ids, positions = rng.integers(0, spec.vocab_size, (2, size))
        one, other = plain.begin(ids, positions), captured.begin(ids, positions)
        goes_on = True
        while goes_on:
            torch.testing.assert_close(other.q, one.q, atol=1e-4, rtol=1e-4)
            o = torch.randn_like(one.q)
            goes_on = one.advance(o)
            assert other.advance(o) == goes_on
        rows = np.arange(size)
        torch.testing.assert_close(other.logits(rows), one.logits(rows), atol=1e-3, rtol=1e-3)
    assert graphs.num_graphs == graphs.num_units  # of one bucket
    assert one.device_s() > 0


@torch.inference_mode()
def test_later_chunks_in_one_call() -> None:
    """Chunks of several sequences see their pasts, and themselves causally, as each does alone."""
    spec = AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, scale=0.125)
    num_new, num_keys = [5, 64, 1], [200, 64, 33]
    q, k, v = (
        torch.randn(*shape, device=CUDA).bfloat16()
        for shape in ((70, 8, 64), (297, 2, 64), (297, 2, 64))
    )
    assert prefill.can_take_together(q, num_keys, spec)
    found = prefill.chunks_together(q, k, v, num_new, num_keys, spec)
    row = key = 0
    for new, total in zip(num_new, num_keys, strict=True):
        rows, seen = slice(row, row + new), slice(key, key + total)
        alone = prefill.chunk_attention(q[rows].float(), k[seen].float(), v[seen].float(), spec)
        torch.testing.assert_close(found[rows].float(), alone, atol=1e-2, rtol=1e-2)
        row, key = row + new, key + total


def test_bfloat16_logprobs_stay_close(tiny_checkpoint: Callable[..., Path]) -> None:
    path = str(tiny_checkpoint("llama"))
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    found = []
    for options in ({"dtype": "float32"}, {"dtype": "bfloat16", "device": "cuda"}):
        with LLM(path, kv_memory_gb=0.02, **options) as llm:
            outputs = llm.generate(prompts(LENGTHS, seed=2), params)
        found.append(
            [dict(step.top) for output in outputs for step in output.completions[0].logprobs or ()]
        )
    for exact, rounded in zip(*found, strict=True):
        shared = exact.keys() & rounded.keys()
        assert shared
        assert all(abs(exact[token] - rounded[token]) < 0.3 for token in shared)


@pytest.mark.parametrize("name", SPECS)
def test_paged_attention(name: str) -> None:
    pytest.importorskip("triton")
    step = Sequences(
        SPECS[name], [5, 2000, 64, 63, 0, 20, 700, 0, 12], [1, 1, 1, 1, 1, 1, 9, 30, 2], device=CUDA
    )
    assert step.cache.kernels is not None
    np.testing.assert_allclose(step.attend(), step.expected(), atol=1e-4)
    step.cache.kernels = None
    np.testing.assert_allclose(step.attend(), step.expected(), atol=1e-4)


def test_staging_keeps_what_is_lent() -> None:
    """Layers are sent one after another without a wait; each arrives as it was, in its own slot."""
    staging = make_staging(gpu_of(CUDA), 300 * 12 * 64 * 2)
    head, tail = slice(0, 100), slice(100, 300)
    staging.begin_step([Share(head, (), head, head), Share(tail, (), tail, tail)])
    layers = [
        [torch.randn(300, heads, 64, device=CUDA).bfloat16() for heads in (8, 2, 2)]
        for _ in range(5)
    ]
    sent = [staging.send(*(x.clone() for x in layer)) for layer in layers]
    for staged, layer in zip(sent, layers, strict=True):
        staged.wait()
        for rows, shipment in zip((head, tail), staged.shipments, strict=True):
            for array, x in zip(shipment, layer, strict=True):
                assert torch.equal(torch.from_numpy(array).view(torch.bfloat16), x[rows].cpu())
    o = staging.begin_layer(layers[0][0].shape, torch.bfloat16)
    for rows, shipment in zip((head, tail), sent[0].shipments, strict=True):
        staging.receive(shipment[0], o, rows)
    staging.join()
    assert torch.equal(o, layers[0][0])


@torch.inference_mode()
def test_graphs_before_the_first_step_survive_a_capture_that_fails(
    tiny_checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """What was captured is replayed, the rest runs as it is, and the device's
    memory is given back as before."""
    spec, model = load_model(tiny_checkpoint("llama"), device=CUDA, dtype=torch.float32)
    graphs = StepGraphs(model, CUDA, capture=True, max_rows=8)
    graphs.prepare()
    assert graphs.num_graphs == graphs.num_units * 4
    gpu = gpu_of(CUDA)
    assert gpu is not None
    with pytest.raises(RuntimeError):
        gpu.capture(lambda: torch.zeros(1, device=CUDA).item(), gpu.new_pool())
    torch.cuda.synchronize()
    allocated, stream = torch.cuda.memory_allocated(), torch.cuda.Stream()
    for _ in range(3):
        x = torch.zeros(1 << 20, device=CUDA)
        x.record_stream(stream)
        del x
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    ids = np.arange(5)
    one, other = SWorker(spec, model, CUDA).begin(ids, ids), SWorker(spec, model, CUDA, graphs)
    torch.testing.assert_close(other.begin(ids, ids).q, one.q, atol=1e-4, rtol=1e-4)


def test_memory_does_not_grow(tiny_checkpoint: Callable[..., Path]) -> None:
    """2,000 steps after the first: not a byte of the device's memory more."""
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        for length in (200, 120, 60)
    ]
    with LLM(
        str(tiny_checkpoint("llama")), device="cuda", dtype="bfloat16", lanes=2, kv_memory_gb=0.02
    ) as llm:
        peaks = []
        for _ in range(12):
            llm.generate(prompts((20, 33, 7), seed=1), params)
            torch.cuda.synchronize()
            peaks.append(torch.cuda.memory_reserved())
        assert llm.stats.num_steps > 2000
    assert peaks[-1] == peaks[2]
