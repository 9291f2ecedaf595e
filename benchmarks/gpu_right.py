"""Whether a GPU is right: checks against float64 or against the CPU, from a single
copy to whole engines. Used by gpu_first.py and by tests/gpu.

Each function makes the list of a step's checks. They need torch and NumPy, those
of kernels Triton beside, those of engines what an engine needs.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_paged import (
    attended,
    decode_step,
    decode_ways,
    dense,
    make_cache,
    num_blocks_for,
    poison_unseen,
)
from gpu_setup import Check, Found, Setup, UnavailableError, distance, row_distance

from fastdecode.core.dtype import DType
from fastdecode.core.sequence import SamplingParams
from fastdecode.core.spec import AttentionSpec, KVSpec
from sworker import prefill
from sworker.buffers import Share, make_staging
from sworker.device import gpu_of
from sworker.dtypes import torch_dtype
from sworker.graphs import StepGraphs
from sworker.kernels import fused
from sworker.load.weights import random_model
from sworker.paged import PagedKV, Prompt
from sworker.sampling.sampler import SamplingState, sample
from sworker.worker import SWorker

DEMO_MODEL = Path(__file__).parents[1] / "examples" / "model" / "checkpoint"
BOUNDS = {DType.FLOAT32: 1e-4, DType.FLOAT16: 4e-3, DType.BFLOAT16: 3e-2}
"""Of a kernel's results, in parts of a row's greatest: inputs and weights of the
softmax are rounded to 8 (bfloat16) or 11 bits."""
_WHOLE_BOUND = 5e-2
"""Of several layers in bfloat16, each rounded in another order."""
CONTEXTS = (1, 63, 64, 65, 2047, 20000)
BF16, F16, F32, INT8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.INT8
PLAIN: dict[str, Any] = {}
WINDOW = {"sliding_window": 200}
SOFTCAP = {"logit_softcap": 20.0}
# Activations, KV cache, head dim, group, block size, what is special.
DECODE_CASES: tuple[tuple[DType, DType, int, int, int, str], ...] = (
    (BF16, BF16, 128, 4, 64, "plain"), (BF16, INT8, 128, 4, 64, "plain"),
    (BF16, BF16, 128, 1, 16, "plain"), (F16, F16, 128, 8, 64, "plain"),
    (BF16, BF16, 64, 8, 128, "plain"), (F16, INT8, 64, 1, 16, "window"),
    (BF16, INT8, 80, 1, 64, "plain"), (F16, F16, 80, 4, 16, "ALiBi"),
    (BF16, BF16, 256, 4, 64, "softcap"), (F16, INT8, 256, 8, 128, "softcap"),
    (BF16, BF16, 128, 32, 64, "window"), (F16, F16, 64, 32, 128, "ALiBi"),
    (BF16, INT8, 128, 8, 16, "ALiBi"), (BF16, BF16, 256, 1, 16, "window"),
    (F32, F32, 128, 4, 64, "plain"), (F32, INT8, 64, 8, 16, "softcap"),
)  # fmt: skip


def copies(setup: Setup) -> list[Check]:
    """What leaves the device and comes back is what it was."""
    sizes = setup.pick((4 << 10, 1 << 20, 64 << 20), (4 << 10,))
    checks = [Check(f"registered copy, {n >> 10} KiB", partial(_copied, setup, n)) for n in sizes]
    checks.append(Check("layers that are staged, and their answers", partial(_staged, setup)))
    return checks


def _copied(setup: Setup, num_bytes: int) -> Found:
    gpu = gpu_of(setup.device)
    if gpu is None:
        raise UnavailableError("no CUDA device")
    host = gpu.pinned(num_bytes)
    expected = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
    host.copy_(expected)
    on_device = host.to(setup.device, non_blocking=True)
    setup.finish()
    host.zero_()
    host.copy_(on_device, non_blocking=True)
    setup.finish()
    return Found(float((host != expected).sum()), 0.0)


def _staged(setup: Setup) -> Found:
    """Layers are sent one after another without a wait; each arrives as it was."""
    heads, dim, num_rows = (8, 2, 2), 64, 300
    staging = make_staging(gpu_of(setup.device), num_rows * sum(heads) * dim * 2)
    parts = (slice(0, 100), slice(100, num_rows))
    staging.begin_step([Share(rows, (), rows, rows) for rows in parts])
    layers = [[setup.random(num_rows, h, dim) for h in heads] for _ in range(5)]
    # On a CPU what is sent is the tensors' own memory.
    copies = [[x.clone() for x in layer] for layer in layers]
    sent = [staging.send(*layer) for layer in copies]
    wrong = 0
    for staged, layer in zip(sent, layers, strict=True):
        staged.wait()
        for rows, shipment in zip(parts, staged.shipments, strict=True):
            for array, x in zip(shipment, layer, strict=True):
                arrived = torch.from_numpy(array).view(torch.bfloat16)
                wrong += int((arrived != x[rows].cpu()).sum())
    o = staging.begin_layer(layers[0][0].shape, torch.bfloat16)
    for rows, shipment in zip(parts, sent[0].shipments, strict=True):
        staging.receive(shipment[0], o, rows)
    staging.join()
    setup.finish()
    return Found(float(wrong + int((o != layers[0][0]).sum())), 0.0)


def kernels(setup: Setup) -> list[Check]:
    """Every kernel of the device against float64."""
    checks = [
        Check(f"store, {act.value} to {kv.value}", partial(_stored, setup, act, kv))
        for act, kv in ((BF16, BF16), (F16, F16), (BF16, INT8), (F32, INT8))
    ]
    for case in setup.pick(DECODE_CASES, DECODE_CASES[:2] + DECODE_CASES[5:8] + DECODE_CASES[-2:]):
        act, kv, dim, group, block, special = case
        name = (
            f"decode, {act.value}, KV {kv.value}, {dim} dims, {group} a KV head, blocks of {block}"
        )
        checks.append(Check(f"{name}, {special}", partial(_decoded, setup, *case)))
    for act, kv in ((BF16, BF16), (BF16, INT8), (F16, F16), (F32, F32)):
        for special in ("plain", "window", "softcap", "ALiBi"):
            name = f"later chunks over blocks, {act.value}, KV {kv.value}, {special}"
            checks.append(Check(name, partial(_chunks_over_blocks, setup, act, kv, special)))
    for dtype in (BF16, F16, F32):
        for name, run in (("norm", _norm), ("add and norm", _add_norm), ("rotate", _rotate),
                          ("rotate and split", _rotate_split), ("gate", _gate)):  # fmt: skip
            checks.append(Check(f"{name}, {dtype.value}", partial(_fused, setup, dtype, run)))
    return checks


def _stored(setup: Setup, act: DType, kv: DType) -> Found:
    """Tokens lie in their slots as they were rounded. int8: in steps of a scale."""
    spec = KVSpec(1, 8, 128, kv, 64)
    cache = PagedKV(spec, [AttentionSpec(32, 8, 128, 0.1)], 4, setup.device)
    _need_kernels(setup, cache)
    k, v = (torch.randn(50, 8, 128, device=setup.device).to(torch_dtype(act)) for _ in range(2))
    slots = torch.randperm(cache.num_slots, device=setup.device)[:50]
    cache.store(0, k, v, slots)
    for half, x in enumerate((k, v)):
        held = cache.pool[0, half][slots].double()
        if cache.scales is None:
            wrong = float((held != x.double()).sum())
        else:
            scales = cache.scales[0, half][slots].double()[..., None]
            expected = x.double().abs().amax(-1, keepdim=True) / 127
            steps = (held * scales - x.double()).abs() / expected
            # Half a step is what rounding takes; a scale may be off in its last bit.
            wrong = float((steps.max() - 0.501).clamp_min(0))
        if wrong:
            return Found(wrong, 0.0)
    return Found(0.0, 0.0)


def _decoded(
    setup: Setup, act: DType, kv: DType, dim: int, group: int, block_size: int, special: str
) -> Found:
    num_kv_heads = 2
    num_heads, spec = group * num_kv_heads, _spec_of(group, dim, special)
    lens = setup.pick(CONTEXTS, (1, 63, 64, 65, 300))
    cache = PagedKV(
        KVSpec(1, num_kv_heads, dim, kv, block_size), [spec], num_blocks_for(lens, block_size) + 3,
        setup.device,
    )  # fmt: skip
    _need_kernels(setup, cache)
    _fill(cache)
    step = decode_step(lens, setup.device, block_size)
    poison_unseen(cache, step)
    dtype = torch_dtype(act)
    q, k, v = (
        torch.randn(len(lens), heads, dim, device=setup.device).to(dtype)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    o = cache.attend(0, q, k, v, step)
    return Found(row_distance(o, attended(q, cache, step, range(len(lens)))), BOUNDS[act])


def _spec_of(group: int, dim: int, special: str) -> AttentionSpec:
    """Of two KV heads."""
    slopes = {"alibi_slopes": tuple(2.0 ** -(1 + i / 4) for i in range(2 * group))}
    options = {"plain": PLAIN, "window": WINDOW, "softcap": SOFTCAP, "ALiBi": slopes}[special]
    return AttentionSpec(2 * group, 2, dim, dim**-0.5, **options)


def _chunks_over_blocks(setup: Setup, act: DType, kv: DType, special: str) -> Found:
    """Rows of several prompts' later chunks see their pasts, and themselves causally."""
    spec, dtype = _spec_of(4, 128, special), torch_dtype(act)
    num_new, num_keys = setup.pick(([5, 300, 1], [5000, 300, 65]), ([5, 6, 1], [20, 6, 13]))
    cache = PagedKV(
        KVSpec(1, 2, 128, kv, 64), [spec], sum(num_keys) // 64 + 1, setup.device, dtype=dtype
    )
    _need_kernels(setup, cache)
    _fill(cache)
    order = torch.randperm(cache.num_slots, device=setup.device)
    slots = order[: sum(num_keys)].split(num_keys)
    ends = list(itertools.accumulate(num_new))
    chunks = [
        Prompt(slice(end - new, end), own)
        for end, new, own in zip(ends, num_new, slots, strict=True)
    ]
    q = torch.randn(sum(num_new), spec.num_q_heads, 128, device=setup.device).to(dtype)
    o = torch.empty_like(q)
    cache.attend_later(0, q, chunks, o, {})
    expected = torch.cat([_seen_by(q[chunk.rows], cache, chunk.slots) for chunk in chunks])
    return Found(row_distance(o, expected), BOUNDS[act])


def _seen_by(q: torch.Tensor, cache: PagedKV, slots: torch.Tensor) -> torch.Tensor:
    """Row by row, as ``dense`` knows no windows. float64 [n, Hq, D]."""
    spec = cache.attention[0]
    k, v = (half[slots].double() for half in cache.pool[0])
    if cache.scales is not None:
        k, v = (
            x * s[slots].double()[..., None] for x, s in zip((k, v), cache.scales[0], strict=True)
        )
    first = len(slots) - len(q)
    rows = []
    for i in range(len(q)):
        low = 0 if spec.sliding_window is None else max(0, first + i + 1 - spec.sliding_window)
        seen = slice(low, first + i + 1)
        rows.append(dense(q[i : i + 1].double(), k[seen], v[seen], spec))
    return torch.cat(rows)


def _fill(cache: PagedKV) -> None:
    if cache.scales is None:
        cache.pool.normal_()
    else:
        cache.pool.random_(-127, 128)
        cache.scales.uniform_(0.005, 0.02)


def _need_kernels(setup: Setup, cache: PagedKV) -> None:
    """On a GPU: a check of the way around kernels isn't one of kernels."""
    if setup.is_cuda and cache.kernels is None:
        raise UnavailableError("no Triton kernels are here: decoded tokens' K and V are gathered")


FusedRun = Callable[[Setup, Any, torch.dtype], tuple[torch.Tensor, torch.Tensor]]


def _fused(setup: Setup, dtype: DType, run: FusedRun) -> Found:
    found = fused._kernels_of(setup.device, torch_dtype(dtype))
    if found is None:
        raise UnavailableError("no fused kernels are here for this dtype")
    result, expected = run(setup, found, torch_dtype(dtype))
    return Found(row_distance(result, expected), BOUNDS[dtype])


def _some(setup: Setup, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=setup.device).to(dtype)


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + 1.0)


def _norm(setup: Setup, of: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = _some(setup, dtype, 37, 4096), _some(setup, dtype, 4096)
    return of.norm(x, weight, 1e-5, 1.0), _rms(x, weight)


def _add_norm(setup: Setup, of: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, added, weight = (_some(setup, dtype, *shape) for shape in ((37, 4096), (37, 4096), (4096,)))
    total, normed = of.add_norm(x, added, weight, 1e-5, 1.0)
    # The norm is of the sum as it was rounded.
    expected = (x.double() + added.double()).to(dtype)
    return torch.cat((total, normed)), torch.cat((expected.double(), _rms(expected, weight)))


def _turned(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    cos, sin = table[positions].double().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    num = cos.shape[-1]
    a, b, rest = x.double().tensor_split((num, 2 * num), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _table(setup: Setup, num_pairs: int) -> torch.Tensor:
    angles = torch.rand(100, num_pairs, device=setup.device) * 6
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _rotate(setup: Setup, of: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x, table = _some(setup, dtype, 37, 8, 128), _table(setup, 48)
    positions = torch.randint(0, 100, (37,), device=setup.device)
    return of.rotate(x, positions, table), _turned(x, positions, table)


def _rotate_split(setup: Setup, of: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    qk, v = _some(setup, dtype, 37, 40, 128), _some(setup, dtype, 37, 8, 128)
    table, positions = _table(setup, 64), torch.randint(0, 100, (37,), device=setup.device)
    out = tuple(torch.empty_like(x) for x in (qk[:, :32].contiguous(), v, v))
    of.rotate_split(qk, v, positions, table, out)
    return torch.cat(out, dim=1), torch.cat((_turned(qk, positions, table), v.double()), dim=1)


def _gate(setup: Setup, of: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    h = _some(setup, dtype, 37, 2 * 14336)
    a, b = h.double().chunk(2, dim=-1)
    gelu = torch.nn.functional.gelu(a, approximate="tanh")
    found = [of.gate(h, is_silu=is_silu) for is_silu in (True, False)]
    return torch.cat(found), torch.cat((torch.nn.functional.silu(a) * b, gelu * b))


def prompts(setup: Setup) -> list[Check]:
    """Prompts' attention: several of unequal lengths in one call, first and later chunks."""
    return [
        Check(f"{name}, {dtype.value}", partial(run, setup, torch_dtype(dtype), BOUNDS[dtype]))
        for name, run in (("prompts", _first_chunks), ("later chunks", _later_chunks))
        for dtype in (BF16, F16, F32)
    ]


_PROMPTS = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)


def _qkv(setup: Setup, dtype: torch.dtype, new: int, keys: int) -> tuple[torch.Tensor, ...]:
    return tuple(_some(setup, dtype, n, h, 128) for n, h in ((new, 32), (keys, 8), (keys, 8)))


def _first_chunks(setup: Setup, dtype: torch.dtype, bound: float) -> Found:
    lengths = setup.pick((1, 129, 1, 270, 1500, 77), (1, 20, 9))
    starts = [0, *itertools.accumulate(lengths)]
    q, k, v = _qkv(setup, dtype, starts[-1], starts[-1])
    found, _ = prefill.local_causal_attention(q, k, v, starts[:-1], _PROMPTS, want_lse=False)
    expected = [
        dense(*(x[a:b].double() for x in (q, k, v)), _PROMPTS)
        for a, b in itertools.pairwise(starts)
    ]
    return Found(row_distance(found, torch.cat(expected)), bound)


def _later_chunks(setup: Setup, dtype: torch.dtype, bound: float) -> Found:
    num_new, num_keys = setup.pick(([5, 64, 1], [1200, 64, 33]), ([5, 6, 1], [20, 6, 13]))
    q, k, v = _qkv(setup, dtype, sum(num_new), sum(num_keys))
    parts = [
        (a, b, c)
        for a, b, c in zip(q.split(num_new), k.split(num_keys), v.split(num_keys), strict=True)
    ]
    if prefill.can_take_together(q, num_keys, _PROMPTS):
        found = prefill.chunks_together(q, k, v, num_new, num_keys, _PROMPTS)
    else:
        found = torch.cat([prefill.chunk_attention(*part, _PROMPTS) for part in parts])
    expected = torch.cat([dense(*(x.double() for x in part), _PROMPTS) for part in parts])
    return Found(row_distance(found, expected), bound)


def graphs(setup: Setup) -> list[Check]:
    """Graphs say what runs as it is says, at 8B's shapes."""
    sizes = setup.pick((1, 5, 64, 256), (5,))
    checks = [Check(f"units, {size} rows", partial(_units, setup, size)) for size in sizes]
    checks += [
        Check(f"a whole step, {size} rows, KV {kv.value}", partial(_whole, setup, size, kv))
        for size in setup.pick((5, 64), (3,))
        for kv in (BF16, INT8)
    ]
    checks.append(Check("a capture that fails costs nothing", partial(_failed_capture, setup)))
    return checks


def _units(setup: Setup, size: int) -> Found:
    """Unfused and as it is, against fused and, on a GPU, captured."""
    spec = setup.spec("8b")
    plain, model = (random_model(spec, device=setup.device, dtype=setup.dtype) for _ in range(2))
    if setup.is_cuda and not fused.fuse(model, setup.device):
        raise UnavailableError("Triton's kernels can't be used here")
    step_graphs = StepGraphs(model, setup.device, capture=setup.is_cuda)
    step_graphs.prepare([step_graphs.buckets.of(size)])
    generator, worst = np.random.default_rng(1), 0.0
    one = SWorker(spec, plain, setup.device)
    other = SWorker(spec, model, setup.device, step_graphs)
    for _ in range(2):  # for other numbers in their memory than they were captured with
        most = min(spec.vocab_size, spec.max_model_len)  # token ids and positions
        rows = torch.from_numpy(generator.integers(0, most, (2, size)))
        a, b = one.begin(rows), other.begin(rows)
        goes_on = True
        while goes_on:
            worst = max(worst, distance(b.q, a.q), distance(b.k, a.k), distance(b.v, a.v))
            o = torch.randn_like(a.q)
            goes_on = a.advance(o)
            b.advance(o)
        rows = np.arange(size)
        worst = max(worst, distance(b.logits(rows), a.logits(rows)))
    if setup.is_cuda and step_graphs.num_graphs != step_graphs.num_units:
        raise RuntimeError(f"{step_graphs.num_graphs} of {step_graphs.num_units} were captured")
    return Found(worst, _WHOLE_BOUND)


def _whole(setup: Setup, size: int, kv: DType) -> Found:
    model = random_model(setup.spec("8b"), device=setup.device, dtype=setup.dtype)
    if setup.is_cuda and not fused.fuse(model, setup.device):
        raise UnavailableError("Triton's kernels can't be used here")
    lens = [17 + 31 * row % setup.pick(1500, 40) for row in range(size)]
    spec = model.spec
    cache = make_cache(spec, spec.num_layers, kv, num_blocks_for(lens), setup.device)
    ways = dict(decode_ways(model, cache, lens, setup.is_cuda))
    if setup.is_cuda and "one graph" not in ways:
        raise UnavailableError("no Triton kernels are here: no step is one graph")
    expected = ways.pop("gathered")()
    return Found(max(distance(run(), expected) for run in ways.values()), _WHOLE_BOUND)


def _failed_capture(setup: Setup) -> Found:
    """What is allocated behind it is given back, and the device computes."""
    gpu = gpu_of(setup.device)
    if gpu is None:
        raise UnavailableError("no CUDA device")
    try:
        gpu.capture(lambda: torch.zeros(1, device=setup.device).item(), gpu.new_pool())
    except RuntimeError:
        pass
    else:
        raise RuntimeError("a capture that waits for the device didn't fail")
    setup.finish()
    allocated, stream = torch.cuda.memory_allocated(), torch.cuda.Stream()
    for _ in range(3):
        x = torch.zeros(1 << 20, device=setup.device)
        x.record_stream(stream)
        del x
    setup.finish()
    return Found(float(torch.cuda.memory_allocated() - allocated), 0.0)


def sampler(setup: Setup) -> list[Check]:
    """The device draws the CPU's tokens, by seed."""
    greedy = SamplingParams(temperature=0, logprobs=5)
    ways: dict[str, SamplingParams] = {
        "greedy": greedy,
        "whole vocabulary": SamplingParams(temperature=0.9),
        "top-k and min-p": SamplingParams(temperature=1.1, top_k=40, min_p=0.05),
        "top-p": SamplingParams(temperature=0.8, top_p=0.9),
        "penalties": SamplingParams(
            temperature=0.7, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2
        ),
    }
    return [Check(f"sampler, {name}", partial(_drawn, setup, way)) for name, way in ways.items()]


def _drawn(setup: Setup, params: SamplingParams) -> Found:
    num_rows, vocab = 32, setup.pick(128256, 500)
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(num_rows, vocab, generator=generator)
    found = []
    for device in (torch.device("cpu"), setup.device):
        states = [
            SamplingState(params, seed, tuple(range(20)), (), vocab, 0, tuple(range(10, 30)))
            for seed in range(num_rows)
        ]
        found.append(sample(logits.clone().to(device), states))
    pairs = list(zip(*found, strict=True))
    wrong = sum(a.token_id != b.token_id for a, b in pairs)
    far = [
        abs(a.logprob.logprob - b.logprob.logprob)
        for a, b in pairs
        if a.logprob is not None and b.logprob is not None
    ]
    return Found(wrong + float(max(far, default=0.0) > 1e-4), 0.0)


LENGTHS = (3, 30, 11, 1, 19, 8, 5, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=20, n=2, ignore_eos=True)
_DRAWN = (*[GREEDY] * 6, *[SAMPLED] * 2)
PLACEMENTS: dict[str, dict[str, Any]] = {
    "R-workers": {"kv_placement": "r", "lanes": 2, "r_workers": 2},
    "KV on the GPU": {"kv_placement": "gpu"},
    "KV on both sides": {"kv_placement": "hybrid", "device_kv_gb": 0.0015, "r_workers": 2},
}


def tokens(setup: Setup) -> list[Check]:
    """Whole engines: the shipped model in float32 says on the GPU what it says
    on a CPU."""
    ways = setup.pick(("on", "off"), ("auto",))
    shared = {"dtype": "float32", "r_threads": 1, "prefill_chunk": 9}
    of_cpu = functools.cache(partial(_said, setup, _DRAWN, **shared, device="cpu"))
    checks = [
        Check(
            f"tokens, {name}" + (f", graphs {graphs}" if setup.is_cuda else ""),
            partial(
                _tokens_differ,
                of_cpu,
                partial(_said, setup, _DRAWN, **shared, **options, cuda_graphs=graphs),
            ),
        )
        for name, options in PLACEMENTS.items()
        for graphs in ways
    ]
    checks.append(Check("bfloat16 stays close to float32", partial(_logprobs, setup)))
    checks.append(Check("2,000 steps take no memory", partial(_memory_grows, setup)))
    return checks


def _llm(setup: Setup, directory: str, **options: Any) -> Any:
    """The shipped model, of token ids only: no package for text is needed."""
    from fastdecode import LLM

    for name in ("config.json", "model.safetensors"):
        shutil.copy(DEMO_MODEL / name, directory)
    return LLM(directory, kv_memory_gb=0.02, **{"device": setup.device.type, **options})


def _prompts(vocab: int = 1500) -> list[list[int]]:
    generator = np.random.default_rng(2)
    return [generator.integers(3, vocab, length).tolist() for length in LENGTHS]


def _said(setup: Setup, params: Sequence[SamplingParams], **options: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as directory, _llm(setup, directory, **options) as llm:
        outputs = llm.generate(_prompts(), list(params))
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [completion for output in outputs for completion in output.completions]


def _tokens_differ(expected: Callable[[], list[Any]], found: Callable[[], list[Any]]) -> Found:
    wrong = sum(
        a != b
        for one, other in zip(expected(), found(), strict=True)
        for a, b in itertools.zip_longest(one.token_ids, other.token_ids)
    )
    return Found(float(wrong), 0.0)


def _logprobs(setup: Setup) -> Found:
    params = [SamplingParams(temperature=0, max_tokens=1, logprobs=5)] * len(LENGTHS)
    exact = _said(setup, params, dtype="float32", device="cpu")
    rounded = _said(setup, params, dtype="bfloat16")
    worst = 0.0
    for one, other in zip(exact, rounded, strict=True):
        a, b = (dict(each.logprobs[0].top) for each in (one, other))
        worst = max(worst, *(abs(a[token] - b[token]) for token in a.keys() & b.keys()))
    return Found(worst, 0.3)


def _memory_grows(setup: Setup) -> Found:
    if not setup.is_cuda:
        raise UnavailableError("no CUDA device")
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (200, 120, 60)]
    with (
        tempfile.TemporaryDirectory() as directory,
        _llm(setup, directory, dtype="bfloat16", lanes=2) as llm,
    ):
        peaks = []
        while llm.stats.num_steps < 2000:
            llm.generate(_prompts()[:3], params)
            setup.finish()
            peaks.append(torch.cuda.memory_reserved())
    return Found(float(peaks[-1] - peaks[2]), 0.0)


def _lacks_cuda() -> Found:
    raise UnavailableError("no CUDA device")


def ordered(setup: Setup) -> list[Check]:
    """What copies and attends, for CUDA's sanitizer (TORCH_CUDA_SANITIZER=1),
    which raises where nothing orders two uses of memory. It sees no graph."""
    if not setup.is_cuda:  # with the sanitizer, nothing can be computed at all
        return [Check("CUDA's sanitizer", _lacks_cuda)]
    return [*copies(setup), *kernels(setup)[:6], *prompts(setup)]
