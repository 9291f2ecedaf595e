"""A verdict on a GPU in ten minutes: what it is, is it right, how fast it is, what engines do.

    benchmarks/gpu_first.sh                 the verdict, 10 minutes, no network
    benchmarks/gpu_first.sh --more          steps beside the verdict, 10 minutes more
    benchmarks/gpu_first.sh --smoke         tiny sizes, on a CPU if there is no GPU
    benchmarks/gpu_first.sh --only layers   one step, or several

Every step is a process of its own with a limit. The report is written after each. The last line is

    RIGHT 67/67 · FAST 5/6 · 9:12 min · gpu_first.json

RIGHT counts checks (tests of tests/gpu) that passed, of all. FAST counts goals that were met, of
all. Exit code 0: all checks passed, and everything was measured (goals may be missed). 1: something
is wrong or failed. 3: a package or time was lacking for something (0 with --smoke).

A step's process appends lines of JSON to a file: ``{"plan": [names]}`` lists its checks,
``{"begin": name}`` starts one, ``{"check": name, "ok": ...}`` ends it. Other lines are
measurements. A wrong result has ``error`` in place of rates.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import math
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance

from fastdecode.core.dtype import DType
from fastdecode.core.model.families import read_model_spec
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.sequence import SamplingParams
from fastdecode.core.spec import KVSpec
from sworker.device import gpu_of
from sworker.graphs import MAX_GRAPH_ROWS, StepGraphs
from sworker.kernels.fused import fuse
from sworker.load.weights import random_model
from sworker.model.skeleton import Model, forward
from sworker.paged import PagedKV, PagedStep
from sworker.prefill import local_causal_attention
from sworker.whole import WholeSteps
from sworker.worker import SWorker

HERE = Path(__file__).parent
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 500000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Llama-3 8B's shapes."""
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500}  # fmt: skip
KERNEL_BOUND, LAYERS_BOUND, STEP_BOUND = 3e-2, 5e-2, 0.1
"""Bounds of one product, a few layers, and 32 layers in bfloat16."""
LOGPROB_BOUND = 0.3
BLOCK_SIZE = 64
Row = dict[str, Any]
Rows = Iterator[Row]


@dataclass(frozen=True)
class Setup:
    """Device, sizes and deadline (on ``time.monotonic``) of a step."""

    device: torch.device
    smoke: bool
    deadline_s: float = math.inf
    write: Callable[[Row], None] = print

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def pick(self, full: Any, tiny: Any) -> Any:
        return tiny if self.smoke else full

    def random(self, *shape: int) -> torch.Tensor:
        """Return normal values. A GPU's products of zeros would be faster."""
        return torch.randn(shape, device=self.device).bfloat16()

    def config(self, num_layers: int = 32) -> dict[str, Any]:
        return {**CONFIG, **TINY} if self.smoke else {**CONFIG, "num_hidden_layers": num_layers}

    def model(self, num_layers: int = 4) -> Model:
        """Return a model of random weights, without fused kernels."""
        spec = read_model_spec(self.config(num_layers), name="8b")
        return random_model(spec, device=self.device, dtype=torch.bfloat16)

    def finish(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], repeats: int = 10) -> float:
        """Return the median device time of one run, which is queued while another runs."""
        repeats = self.pick(repeats, 2)
        for _ in range(2):
            run()
        if not self.is_cuda:
            return statistics.median(_timed(run) for _ in range(repeats))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        self.finish()
        return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))

    def host_seconds(self, run: Callable[[], object], repeats: int = 10) -> float:
        """Return the median time until the host has queued one run."""
        times = []
        for _ in range(self.pick(repeats, 2) + 2):
            self.finish()
            times.append(_timed(run))
        return statistics.median(times[2:])


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measured(case: Row, error: float, bound: float, **rates: float) -> Row:
    """Return a row of the case, its error, and its rates unless the error is too large."""
    if error <= bound:  # False for NaN
        return {**case, **rates, "max_error": error}
    name = " ".join(map(str, case.values()))
    wrong = f"{name}: the result is wrong by {error:.3g}, at most {bound:.3g} is allowed"
    return {**case, "max_error": str(error), "error": f"{wrong}: no rate is shown"}


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the greatest difference in parts of the greatest value; infinity for NaN."""
    difference = (found.double() - expected.double()).abs()
    if not bool(difference.isfinite().all()):
        return math.inf
    return float(difference.max() / expected.double().abs().max().clamp_min(1e-30))


# Facts

_ASKED = (
    "name", "driver_version", "compute_cap", "memory.total", "memory.used", "compute_mode",
    "mig.mode.current", "ecc.mode.current", "power.limit", "clocks.max.sm", "clocks.max.mem",
    "pcie.link.gen.max", "pcie.link.width.max",
)  # fmt: skip
_TF32 = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")


def facts(setup: Setup) -> Rows:
    """Yield facts with a ``note`` where one explains bad figures. One that fails costs no other."""
    for name, ask in {"host": _host, "GPU": _gpu, "torch": _torch}.items():
        try:
            yield {"fact": name, **ask()}
        except Exception as error:
            yield {"fact": name, "value": None, "why": f"{type(error).__name__}: {error}"[:300]}


def _host() -> Row:
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cores = len(os.sched_getaffinity(0))
    tf32 = [name for name in _TF32 if os.environ.get(name, "0") not in ("", "0")]
    note = f"{', '.join(tf32)} makes float32 products TF32: tokens in float32 may differ"
    value = f"{platform.platform()}, {cores} cores, {memory_gb:.0f} GB"
    return {"value": value, **({"note": note} if tf32 else {})}


def _gpu() -> Row:
    values = {}
    for name in _ASKED:  # one by one: an old driver refuses fields that it doesn't know
        query = ["nvidia-smi", f"--query-gpu={name}", "--format=csv,noheader", "-i", "0"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
        if done.returncode == 0:
            values[name] = done.stdout.strip()
    is_shared = values.get("compute_mode", "Default") in ("Default", "[N/A]")
    note = {} if is_shared else {"note": "only one process at a time gets this GPU"}
    return {"value": values, **note}


def _torch() -> Row:
    if not torch.cuda.is_available():
        return {"value": f"{torch.__version__}: sees no CUDA device"}
    free, total = torch.cuda.mem_get_info(0)
    built_for = " ".join(torch.cuda.get_arch_list())
    value = f"{torch.__version__}, CUDA {torch.version.cuda}, for {built_for}"
    triton = metadata.version("triton")
    return {"value": value, "triton": triton, "free_gb": free / 1e9, "total_gb": total / 1e9}


# Right: the tests of tests/gpu, as checks


def checks(names: str, setup: Setup) -> Rows:
    """Run the tests whose names match pytest's ``-k names``, and write a check for each."""
    import pytest

    # The project's own options name plugins that may not be there.
    options = "-q -p no:cacheprovider -o addopts=--import-mode=importlib -o timeout= -m gpu"
    if setup.smoke:
        os.environ["FASTDECODE_GPU_SMOKE"] = "1"  # tests that need no GPU run on the CPU
    directory = str(HERE.parent / "tests" / "gpu")
    pytest.main([*options.split(), "-k", names, directory], plugins=[_Checks(setup)])
    yield from ()


class _Checks:
    """Plugin of pytest that writes the plan, the start and the outcome of each test."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._write = setup, setup.write

    def pytest_collection_finish(self, session: Any) -> None:
        self._write({"plan": [item.nodeid.rpartition("/")[2] for item in session.items]})

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._write({"begin": nodeid.rpartition("/")[2]})

    def pytest_runtest_logreport(self, report: Any) -> None:
        row = {"check": report.nodeid.rpartition("/")[2], "ok": True}
        if report.failed:
            self._write({**row, "ok": False, "why": str(report.longrepr).strip()[-2000:]})
        elif report.skipped:
            self._write({**row, "ok": None, "why": str(report.longrepr[2])})
        elif report.when == "call":
            self._write(row)

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:
        if self._setup.left_s < 1:
            item.session.shouldstop = "no time was left"


# Fast: rates of layers, prompts and whole steps


def ceilings(setup: Setup) -> Rows:
    """Measure the device's own rates, by which everything else is judged."""
    n, num_bytes = setup.pick(8192, 128), setup.pick(4 << 30, 1 << 20)
    a, b = setup.random(n, n), setup.random(n, n)
    error = distance((a @ b)[:4], a[:4].double() @ b.double())
    tflops = 2 * n**3 / setup.seconds(lambda: a @ b) / 1e12
    yield measured({"what": "matmul"}, error, KERNEL_BOUND, tflops=tflops)
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    host = torch.empty(num_bytes // 16, dtype=torch.uint8, pin_memory=setup.is_cuda)
    piece, back = source[: len(host)], target[: len(host)]
    for what, times, run, end in (
        ("device copy", 2, lambda: target.copy_(source), target),
        ("to host", 1, lambda: host.copy_(piece, non_blocking=True), host),
        ("from host", 1, lambda: back.copy_(host, non_blocking=True), back),
    ):
        end.zero_()
        seconds = setup.seconds(run)
        setup.finish()
        error = float(not torch.equal(end, source[: len(end)].to(end.device)))
        yield measured({"what": what}, error, 0.0, gbps=times * len(end) / seconds / 1e9)


def layers(setup: Setup, sizes: Sequence[int] = (64, 256, 512)) -> Rows:
    """Measure T(B) of layers, kernel by kernel and as graphs."""
    sizes = setup.pick(sizes, (1, 16))
    model = setup.model()
    exact = copy.deepcopy(model).float()
    if not fuse(model, setup.device) and setup.is_cuda:
        yield {"model": "8b", "error": "Triton's kernels can't be used: see the log"}
    graphs = StepGraphs(model, setup.device, capture=setup.is_cuda)
    graphs.prepare([graphs.buckets.of(size) for size in sizes if size <= MAX_GRAPH_ROWS])
    spec, num = model.spec, model.spec.num_layers - 1
    for size in sizes:
        x = setup.random(size, spec.hidden_size)
        o = setup.random(size, spec.num_q_heads, spec.head_dim)
        expected = _through_layers(exact, x.float(), o.float())
        ways = {"eager": partial(_through_layers, model, x, o)}
        if size <= MAX_GRAPH_ROWS:
            graphs.buffers(0).x[:size].copy_(x)
            graphs.buffers(0).o[:size].copy_(o)
            ways["graph"] = partial(_through_graphs, graphs, size)
        flops = 2 * size * (spec.layer_parameters(0) - 2 * spec.hidden_size)
        for how, run in ways.items():
            error = distance(run(), expected)
            layer_s, host_s = setup.seconds(run) / num, setup.host_seconds(run) / num
            yield measured(
                {"model": "8b", "rows": size, "how": how}, error, LAYERS_BOUND,
                layer_us=layer_s * 1e6, host_us=host_s * 1e6, tflops=flops / layer_s / 1e12,
                weights_gbps=2 * spec.layer_parameters(0) / layer_s / 1e9,
            )  # fmt: skip


def _through_layers(model: Model, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """Run all units between the first and the last → hidden states."""
    positions = torch.arange(len(x), device=x.device)
    for before, after in zip(model.layers, list(model.layers)[1:], strict=False):
        x, _ = after.pre_attention(*before.post_attention(x, o), positions)
    return x


def _through_graphs(graphs: StepGraphs, size: int) -> torch.Tensor:
    for unit in range(1, graphs.num_units - 1):
        graphs.run(0, unit, graphs.buckets.of(size))
    return graphs.buffers(0).x[:size]


def prefill(setup: Setup) -> Rows:
    """Measure prompts through all layers, attention included."""
    model = setup.model()
    exact, spec = copy.deepcopy(model).float(), model.spec
    exact.dtype = torch.float32  # of activations
    fuse(model, setup.device)
    cases = ((1, 2048), (4, 2048), (16, 512), (128, 64))
    for num_prompts, length in setup.pick(cases, ((2, 32),)):
        total = num_prompts * length
        ids = torch.randint(0, spec.vocab_size, (total,), device=setup.device)
        error, hidden = 0.0, through_prompts(model, ids, length)
        for start in (0, total - length):  # later tokens don't change the first ones
            rows = slice(start, start + min(length, 64))
            expected = through_prompts(exact, ids[rows], length)
            error = max(error, distance(hidden[rows], expected))
        seconds = setup.seconds(partial(through_prompts, model, ids, length), repeats=5)
        attention = 2 * total * length * spec.num_q_heads * spec.head_dim
        flops = spec.num_layers * (2 * total * spec.layer_parameters(0) + attention)
        yield measured(
            {"model": "8b", "prompts": num_prompts, "tokens": length}, error, LAYERS_BOUND,
            tokens_per_s_and_layer=total * spec.num_layers / seconds,
            tflops=flops / seconds / 1e12,
        )  # fmt: skip


def through_prompts(model: Model, ids: torch.Tensor, length: int) -> torch.Tensor:
    """Run prompts of equal lengths through all layers → hidden states."""

    def attend(layer: int, q: Any, k: Any, v: Any) -> torch.Tensor:
        spec, starts = model.spec.attention[layer], range(0, len(ids), length)
        return local_causal_attention(q, k, v, starts, spec, want_lse=False)[0]

    return forward(model, ids, torch.arange(len(ids), device=ids.device) % length, attend)


def decode_attention(setup: Setup) -> Rows:
    """Measure attention over paged KV on the device, of equal and of very unequal lengths."""
    equal = [(f"{n} x {c}", [c] * n) for n, c in ((4, 32768), (16, 2048), (64, 2048), (256, 1024))]
    skewed = [("1 x 100000, 63 x 493", [100_000] + [493] * 63)]
    full = ((DType.BFLOAT16, [*equal, *skewed]), (DType.INT8, equal[2:] + skewed))
    tiny = ((DType.BFLOAT16, [("2 x 40", [40] * 2)]), (DType.INT8, [("3", [90, 4, 4])]))
    spec = read_model_spec(setup.config(num_layers=1), name="8b")
    for dtype, cases in setup.pick(full, tiny):
        for lengths, lens in cases:
            cache = make_cache(spec, dtype, lens, setup.device)
            step = decode_step(lens, setup.device)
            heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
            q, k, v = (setup.random(len(lens), num, spec.head_dim) for num in heads)
            run = partial(cache.attend, 0, q, k, v, step)
            found = run()
            with without_kernels(cache):
                expected = run()
            gpu = gpu_of(setup.device)
            # As an engine runs it: kernel by kernel the host would be slower than the device.
            graph = None if gpu is None else gpu.capture(run, gpu.new_pool())
            seconds = setup.seconds(run if graph is None else graph.replay)
            num_bytes = sum(lens) * cache.kv.token_bytes / cache.kv.num_layers
            yield measured(
                {"model": "8b", "kv": dtype.value, "lengths": lengths},
                max(map(distance, found, expected)), KERNEL_BOUND,
                attend_us=seconds * 1e6, kv_gbps=num_bytes / seconds / 1e9,
            )  # fmt: skip


def whole_steps(setup: Setup) -> Rows:
    """Measure decode steps with KV on the device, through all layers.

    A step with prompts among its rows runs unit by unit. Steps of more rows than graphs are
    captured for run layer by layer, with every kernel launched from Python.
    """
    model = setup.model(num_layers=32)
    fuse(model, setup.device)
    for dtype in (DType.BFLOAT16, DType.INT8):
        for size, context in setup.pick(((16, 1024), (64, 1024), (256, 1024)), ((2, 40),)):
            cache = make_cache(model.spec, dtype, [context] * size, setup.device)
            # All are made before one is run: to capture a step writes to the first slot.
            ways = decode_ways(setup, model, cache, decode_step([context] * size, setup.device))
            with without_kernels(cache):
                expected = ways["layer by layer"]().clone()
            for how, run in ways.items():
                error = distance(run(), expected)
                step_s, host_s = setup.seconds(run), setup.host_seconds(run)
                yield measured(
                    {"kv": dtype.value, "sequences": size, "context": context, "how": how},
                    error, STEP_BOUND, step_us=step_s * 1e6, host_us=host_s * 1e6,
                    tokens_per_s=size / step_s,
                )  # fmt: skip
            del cache, run, ways


def decode_ways(
    setup: Setup, model: Model, cache: PagedKV, step: PagedStep
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return ways to run a decode step, those beside the first only with kernels."""
    lens, device = torch.from_numpy(step.context_lens_host).long(), setup.device
    rows = torch.stack((torch.arange(len(lens)), lens - 1))
    token_ids, positions = rows.to(device)

    def attend(layer: int, q: Any, k: Any, v: Any, place: Any = None) -> Any:
        return cache.attend(layer, q, k, v, step, place)

    ways = {"layer by layer": partial(forward, model, token_ids, positions, attend)}
    if cache.kernels is None:
        return ways
    graphs = StepGraphs(model, device, capture=setup.is_cuda)
    buckets = [graphs.buckets.of(len(lens))]
    graphs.prepare(buckets)
    worker = SWorker(model.spec, model, device, graphs)
    whole = WholeSteps(graphs, cache, int(lens.max()))
    whole.prepare(buckets)
    by_unit = {"unit by unit": lambda: worker.begin(rows).run(attend).output}
    return {**ways, **by_unit, "one graph": partial(whole.run, 0, rows, step)}


def make_cache(spec: ModelSpec, dtype: DType, lens: Sequence[int], device: torch.device) -> PagedKV:
    """Return a cache with room for sequences of these lengths, full of random values."""
    kv = KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype, BLOCK_SIZE)
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in lens)
    cache = PagedKV(kv, spec.attention, num_blocks, device)
    if cache.scales is None:
        cache.pool.normal_()
    else:
        cache.pool.random_(-127, 128)
        cache.scales.fill_(0.01)
    return cache


def decode_step(lens: Sequence[int], device: torch.device) -> PagedStep:
    """Return a step of one more token, the last of ``lens``, over blocks in random order."""
    widths = [-(-length // BLOCK_SIZE) for length in lens]
    # On the host: a generator's numbers don't depend on the device.
    blocks = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(0)).int()
    tables = torch.zeros((len(lens), max(widths)), dtype=torch.int32)
    for row, own in enumerate(blocks.split(widths)):
        tables[row, : len(own)] = own
    last = torch.tensor(lens) - 1
    homes = tables.gather(1, (last // BLOCK_SIZE)[:, None])[:, 0].long()
    slots, host = homes * BLOCK_SIZE + last % BLOCK_SIZE, np.array(lens, np.int32)
    no_rows = slice(len(host), len(host))
    slots, tables, seen = (x.to(device) for x in (slots, tables, torch.from_numpy(host)))
    return PagedStep(slots, tables, seen, host, (), no_rows, ())


@contextlib.contextmanager
def without_kernels(cache: PagedKV) -> Iterator[None]:
    """Attend in plain torch, which gathers K and V."""
    kernels, cache.kernels = cache.kernels, None
    try:
        yield
    finally:
        cache.kernels = kernels


# Instant: decode steps through the real pipeline with R-workers that answer at once


def instant(setup: Setup, cases: Sequence[tuple[int, int, int]] = ()) -> Rows:
    """Measure what copies, messages and the host leave uncovered, by R-workers, lanes and rows."""
    full = ((1, 2, 256), (4, 2, 256), (16, 2, 256), (1, 1, 256), (1, 2, 64), (16, 2, 64))
    sys.path.append(str(HERE.parent / "tests"))
    from instant_steps import InstantSteps

    model = setup.model(num_layers=32)
    fuse(model, setup.device)
    for num_r_workers, lanes, rows in cases or setup.pick(full, ((1, 2, 4), (4, 2, 4))):
        steps = InstantSteps(model, setup.device, lanes, rows, num_r_workers, capture=setup.is_cuda)
        steps_s, units_s = [], []
        for _ in range(setup.pick(24, 6)):
            batches = steps.batches()
            for run, times in ((partial(steps.run, batches), steps_s), (steps.run_units, units_s)):
                started = time.perf_counter()
                run()
                setup.finish()
                times.append(time.perf_counter() - started)
        step_s, s_part_s = statistics.median(steps_s[4:]), min(units_s[4:])
        yield {
            "model": "8b", "r_workers": num_r_workers, "lanes": lanes, "rows_a_lane": rows,
            "step_us": step_s * 1e6, "s_part_us": s_part_s * 1e6, "ratio": step_s / s_part_s,
        }  # fmt: skip
        del steps


# Engines: a whole model, each engine in a process of its own

ON_GPU, BOTH_SIDES = "KV on the GPU", "KV on both sides"
ENGINE_LIMIT_S = 75.0


@dataclass(frozen=True)
class Workload:
    """Requests that arrive at once, with tokens of each prompt and each answer."""

    requests: int
    prompt: int
    new: int

    def prompts(self, vocab: int) -> list[list[int]]:
        rng = random.Random(0)
        return [[rng.randrange(3, vocab) for _ in range(self.prompt)] for _ in range(self.requests)]


USUAL = Workload(64, 512, 64)
Engine = tuple[str, float, dict[str, Any]]
"""Name, part of the workload's KV that fits on the GPU, and options."""


def compiled(setup: Setup) -> Rows:
    """Compile R-workers' kernels for the engines' heads and the shipped model's, and keep them."""
    shipped = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 200}
    for dtype, shapes in (("bfloat16", {}), ("float32", shipped)):
        started = time.monotonic()
        options = {"device": "cpu", "dtype": dtype, "kv_memory_gb": 0.05, "r_threads": 1}
        with model_directory({**CONFIG, **small, **shapes}) as model:
            found = _run_engine(model, options, Workload(2, 20, 3), setup.left_s)
        error = {"error": found["error"]} if "error" in found else {}
        seconds = time.monotonic() - started
        yield {"what": f"R-workers' kernels, {dtype}", "compiled_s": seconds, **error}


def engines(setup: Setup) -> Rows:
    """Measure engines in all placements, with room for all KV on the GPU and for a tenth of it."""
    workload = setup.pick(USUAL, Workload(6, 20, 6))
    return _engines(setup, workload, first_engines(setup, workload))


def more_engines(setup: Setup) -> Rows:
    """Measure int8 KV, no graphs, and longer prompts."""
    usual = setup.pick(USUAL, Workload(6, 20, 6))
    long = setup.pick(Workload(64, 2048, 48), Workload(3, 40, 4))
    local = first_engines(setup, usual)[0][-1]
    more: list[Engine] = [
        ("KV on the GPU, int8", 1.0, {**local, "kv_dtype": "int8"}),
        ("KV on the GPU, no graphs", 1.0, {**local, "cuda_graphs": "off"}),
    ]
    yield from _engines(setup, usual, more)
    yield from _engines(setup, long, first_engines(setup, long)[:2])


def first_engines(setup: Setup, workload: Workload) -> list[Engine]:
    """Return the engines of the verdict, the most important first."""
    config, requests = setup.config(), workload.requests
    token_bytes = 4 * config["num_hidden_layers"] * config["num_key_value_heads"]
    num_tokens = requests * (workload.prompt + workload.new)
    kv_gb = num_tokens * token_bytes * config["head_dim"] / 1e9
    base = {"device": setup.device.type, "dtype": "bfloat16", **setup.pick({}, {"block_size": 16})}
    remote = {**base, "kv_placement": "r", "kv_memory_gb": max(0.01, 1.5 * kv_gb)}
    local = {**base, "kv_placement": "gpu"}
    both = {**remote, "kv_placement": "hybrid", "r_workers": 2}
    if not setup.is_cuda:
        local["kv_memory_gb"] = both["device_kv_gb"] = 0.01
    # A tiny workload's tenth holds no sequence.
    tenth_gb = max(0.1 * kv_gb, 2 * kv_gb / requests)
    return [
        (ON_GPU, 1.0, local),
        ("R-workers", 1.0, remote),
        (BOTH_SIDES, 1.0, both),
        (ON_GPU, 0.1, {**local, "kv_memory_gb": tenth_gb}),
        (BOTH_SIDES, 0.1, {**both, "device_kv_gb": tenth_gb}),
    ]


@contextlib.contextmanager
def model_directory(config: dict[str, Any]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config))
        yield directory


def _engines(setup: Setup, workload: Workload, wanted: Sequence[Engine]) -> Rows:
    """Yield a row for each engine.

    ``max_error`` is the distance of log-probabilities of first tokens from the first engine's.
    """
    expected: list[Any] | None = None
    with model_directory(setup.config()) as model:
        for name, share, options in wanted:
            case: Row = {"engine": name, **vars(workload), "asked_kv_share": share}
            if setup.left_s < 10:
                yield {**case, "left_out": f"{name}: no time was left"}
                continue
            found = _run_engine(model, options, workload, setup.left_s)
            if "error" in found:
                yield {**case, "error": f"{name}: {found['error']}"}
                continue
            top = found.pop("top")
            expected = expected or top
            yield measured(case, _top_distance(top, expected), LOGPROB_BOUND, **found)


def _top_distance(found: list[Any], expected: list[Any]) -> float:
    """Return the greatest difference of log-probabilities of tokens that both name."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        a, b = ({int(token): value for token, value in each} for each in (one, other))
        far = [abs(a[token] - b[token]) for token in a.keys() & b.keys()]
        worst = max(worst, *(far or [math.inf]))
    return worst


def _run_engine(
    model: str, options: dict[str, Any], workload: Workload, left_s: float
) -> dict[str, Any]:
    """Run an engine in a process of its own. Return its measurements, or ``error``."""
    limit_s = min(ENGINE_LIMIT_S, left_s)
    asked = json.dumps({"model": model, "options": options, "workload": vars(workload)})
    command = [sys.executable, __file__, "--engine", asked]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {limit_s:.0f} s"}
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        return {"error": said[-1][:300] if said else f"exit code {error.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_engine(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure the engine that ``_run_engine`` asks this process for."""
    model, options, workload = asked["model"], asked["options"], Workload(**asked["workload"])
    from fastdecode import LLM

    count, new = workload.requests, workload.new
    options |= {"load_format": "random", "max_num_sequences": count, "prefix_cache": "off"}
    with LLM(model, **options) as llm:
        prompts = workload.prompts(llm.facts.vocab_size)

        def run(number: int) -> float:
            params = SamplingParams(temperature=0, max_tokens=number, ignore_eos=True)
            started = time.perf_counter()
            outputs = llm.generate(prompts, params)
            assert all(output.ok for output in outputs), next(o.error for o in outputs if not o.ok)
            return time.perf_counter() - started

        run(new)  # kernels are compiled
        first = statistics.median(run(1) for _ in range(3))
        totals = [run(new)]
        while len(totals) < 3 and sum(totals) < 5:
            totals.append(run(new))
        total, stats = statistics.median(totals), llm.stats
        decode_s = max(total - first, 1e-9)
        likeliest = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
        outputs = llm.generate(prompts[:4], likeliest)
        return {"total_s": total, "prefill_s": first, "tokens_per_s": count * new / total,
                "decode_tokens_per_s": count * (new - 1) / decode_s,
                "decode_step_ms": decode_s / (new - 1) * 1e3, "start_s": llm.facts.load_s,
                "ahead_share": stats.num_ahead / stats.num_steps,
                "wait_share": stats.wait_s / stats.step_s,
                "top": [list(x.completions[0].logprobs[0].top) for x in outputs]}  # fmt: skip


# Goals on an H200: at least, at most, and what a model says

GOALS = {
    "8B S-step of 256 rows or more, of the matmul rate": (0.6, None, "0.61"),
    "step of 2 lanes of 256 rows if 1, 4 or 16 R-workers answer at once, of the S-part": (
        None, 1.1, "1.00 with 1 R-worker",
    ),
    "the host's microseconds a layer with graphs": (None, 15.0, "8-11"),
    "prefill of 2k prompts, of the matmul rate": (0.5, None, "0.78"),
    "KV on both sides, all of it on the GPU: of the GPU alone": (0.99, None, "1"),
    "KV on both sides, a tenth of it on the GPU: of the GPU alone": (1.0, None, "1.4"),
}  # fmt: skip


def goals(steps: dict[str, list[Row]]) -> Rows:
    """Yield a row for each goal, judged by the worst row that an engine would run."""
    for (goal, (least, most, model)), value in zip(GOALS.items(), _worst(steps), strict=True):
        row = {"goal": goal, "at_least": least, "at_most": most, "model": model, "measured": value}
        is_met = None
        if value is not None:
            is_met = value >= least if most is None else value <= most
        yield {**row, "met": is_met}


def _worst(steps: dict[str, list[Row]]) -> Iterator[float | None]:
    def worst(step: str, key: str, pick: Callable[..., float], **where: object) -> float | None:
        """Return the worst value. None if a row that counts has none: its result was wrong."""
        rows = steps.get(step, [])
        rows = [row for row in rows if all(row.get(k) == v for k, v in where.items())]
        found = [row[key] for row in rows if key in row]
        return pick(found) if found and len(found) == len(rows) else None

    matmul = worst("ceilings", "tflops", min, what="matmul")

    def of_matmul(tflops: float | None) -> float | None:
        return tflops / matmul if tflops and matmul else None

    large = [worst("layers", "tflops", min, how="graph", rows=rows) for rows in (256, 512)]
    yield of_matmul(min(x for x in large if x) if all(large) else None)
    yield worst("instant", "ratio", max, lanes=2, rows_a_lane=256)
    yield worst("layers", "host_us", max, how="graph")
    yield of_matmul(worst("prefill", "tflops", min, tokens=2048))
    for share in (1.0, 0.1):
        both, alone = (
            worst("engines", "tokens_per_s", min, engine=engine, asked_kv_share=share)
            for engine in (BOTH_SIDES, ON_GPU)
        )
        yield both / alone if both and alone else None


def shown_goal(goal: Row) -> str:
    bound = f">= {goal['at_least']}" if goal["at_most"] is None else f"<= {goal['at_most']}"
    found = goal["measured"]
    measured = "not measured" if found is None else f"measured {found:.3g}"
    verdict = {None: "", True: ": met", False: ": MISSED"}[goal["met"]]
    return f"{goal['goal']}: {bound}  model {goal['model']}  {measured}{verdict}"


# Steps: each in a process of its own


@dataclass(frozen=True)
class Step:
    """Measurements or checks. ``is_more``: they are beside the verdict."""

    name: str
    part: str
    limit_s: float
    make: Callable[[Setup], Rows]
    is_more: bool = False


def _right(name: str, limit_s: float) -> Step:
    return Step(name, "right", limit_s, partial(checks, f"test_right and {name}"))


_ALL_ROWS = [1 << power for power in range(12)]
_SMALL_ROWS = ((1, 2, 16), (4, 2, 16), (16, 2, 16))
STEPS = (
    Step("facts", "facts", 30, facts),
    Step("compiled", "facts", 90, compiled),
    *(_right(name, 30) for name in ("copies", "prompts", "sampler")),
    *(_right(name, limit_s) for name, limit_s in (("kernels", 95), ("graphs", 45), ("tokens", 75))),
    Step("ceilings", "fast", 30, ceilings),
    Step("layers", "fast", 45, layers),
    Step("instant", "fast", 60, instant),
    Step("prefill", "fast", 30, prefill),
    Step("decode_attention", "fast", 45, decode_attention),
    Step("whole_steps", "fast", 45, whole_steps),
    Step("engines", "engines", 240, engines),
    Step("tests", "right", 200, partial(checks, "not test_right"), is_more=True),
    Step("all_layers", "fast", 90, partial(layers, sizes=_ALL_ROWS), is_more=True),
    Step("host_turns", "fast", 90, partial(instant, cases=_SMALL_ROWS), is_more=True),
    Step("more_engines", "engines", 300, more_engines, is_more=True),
)
PART_ENDS_S = {"facts": 100.0, "right": 275.0, "fast": 415.0, "engines": 580.0}
"""End of each part, in seconds from the start. What a part leaves over the next one has."""


@dataclass
class Outcome:
    """Result of a step: rows, checks by name, errors, and what was not measured."""

    rows: list[Row] = field(default_factory=list)
    checks: dict[str, Row] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def read(self, text: str, error: str | None) -> None:
        """Take the lines that a process wrote, and the reason why it failed, if it did."""
        open_check = None
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # it was killed while it wrote
                continue
            if "plan" in row:
                self.checks = {name: {"check": name} for name in row["plan"]}
            elif "begin" in row:
                open_check = row["begin"]
            elif "check" in row:
                self.checks[row["check"]], open_check = row, None
            else:
                self.rows.append(row)
        if error is not None and open_check is not None:
            self.checks[open_check] = {"check": open_check, "ok": False, "why": error}
        elif error is not None:
            self.failed.append(error)
        self.failed += [str(row["error"]) for row in self.rows if "error" in row]
        self.left_out += [str(row["left_out"]) for row in self.rows if "left_out" in row]
        for check in self.checks.values():
            if "ok" not in check:
                check |= {"ok": None, "why": error or "no time was left"}

    @property
    def oks(self) -> list[bool | None]:
        return [check["ok"] for check in self.checks.values()]


def run_apart(limit_s: float, until_s: float, command: Sequence[str]) -> Outcome:
    """Run a step in a process of its own, until its limit and that time at most."""
    started, outcome = time.monotonic(), Outcome()
    left_s = min(until_s - started, limit_s)
    if left_s < 5:
        outcome.left_out.append("no time was left")
    else:
        with tempfile.TemporaryDirectory() as directory:
            rows = Path(directory, "rows.jsonl")
            rows.touch()
            # The process gets a nearer end than it has, so that it can report what it leaves out.
            limits = ["--rows", str(rows), "--limit-s", str(0.9 * left_s)]
            error = watched([*command, *limits], left_s)
            outcome.read(rows.read_text(errors="replace"), error)
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def watched(command: Sequence[str], limit_s: float) -> str | None:
    """Run a process within its limit, and kill all that it started. Return why it failed."""
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=words, start_new_session=True
        )
        try:
            exit_code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # none is left
                os.killpg(process.pid, signal.SIGKILL)
        if exit_code is None:
            return f"took more than {limit_s:.0f} s"
        words.seek(0)
        said = words.read().decode(errors="replace").strip()[-2000:]
    if exit_code == 0:
        return None
    signalled = exit_code < 0
    why = f"killed by {signal.Signals(-exit_code).name}" if signalled else f"exit code {exit_code}"
    return f"{why}: {said}" if said else why


def run_step(step: Step, rows: Path, limit_s: float, *, smoke: bool) -> None:
    """Run a step in this process, and append its rows to the file."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not smoke and step.name != "facts":
        raise SystemExit("torch sees no CUDA device: is it built for CUDA, and for this driver?")
    with rows.open("a") as out:

        def write(row: Row) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()

        setup = Setup(device, smoke, time.monotonic() + limit_s, write)
        # Engines of the tests have threads of their own, and say themselves where they infer.
        with torch.inference_mode(step.part != "right"):
            try:
                for row in step.make(setup):
                    write(row)
            except ModuleNotFoundError as error:
                write({"left_out": f"not installed: {error.name}"})


# The report


class Report:
    """Outcomes so far, as JSON in a file and as text for people."""

    def __init__(self, out: Path, smoke: bool) -> None:
        self._started = time.monotonic()
        self._out, self._smoke = out, smoke
        self._outcomes: dict[Step, Outcome] = {}

    @property
    def right(self) -> tuple[int, int]:
        """Checks that passed, and all. A step without a known check counts as one."""
        found = [outcome for step, outcome in self._outcomes.items() if step.part == "right"]
        oks = [ok for outcome in found for ok in outcome.oks or [None]]
        return oks.count(True), len(oks)

    @property
    def goals(self) -> list[Row]:
        return list(goals({step.name: outcome.rows for step, outcome in self._outcomes.items()}))

    @property
    def exit_code(self) -> int:
        outcomes = self._outcomes.values()
        oks = [ok for outcome in outcomes for ok in outcome.oks]
        if any(outcome.failed for outcome in outcomes) or False in oks:
            return 1
        is_partial = None in oks or any(outcome.left_out for outcome in outcomes)
        return 3 if is_partial and not self._smoke else 0

    @property
    def verdict(self) -> str:
        passed, of = self.right
        met = sum(goal["met"] is True for goal in self.goals)
        minutes, seconds = divmod(round(time.monotonic() - self._started), 60)
        took = f"{minutes}:{seconds:02d} min"
        return f"RIGHT {passed}/{of} · FAST {met}/{len(GOALS)} · {took} · {self._out.name}"

    def add(self, step: Step, outcome: Outcome) -> None:
        """Print an outcome, and write the report."""
        self._outcomes[step] = outcome
        print(f"\n{step.part}: {step.name}, {outcome.seconds:.0f} s")
        for row in outcome.rows:
            shown = (f"{x:.3g}" if isinstance(x, float) else x for x in row.values())
            print(" ", "  ".join(f"{key} {value}" for key, value in zip(row, shown, strict=True)))
        words = {True: "right", False: "WRONG", None: "not run"}
        for check in outcome.checks.values():
            print(f"  {words[check['ok']]}: {check['check']}  {check.get('why', '')[-300:]}")
        print(*(f"  FAILED: {text}\n" for text in outcome.failed), sep="", end="")
        print(*(f"  not measured: {x}\n" for x in outcome.left_out), sep="", end="", flush=True)
        part = self._out.with_suffix(".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(self.as_json, indent=1) + "\n")
        os.replace(part, self._out)

    @property
    def as_json(self) -> Row:
        passed, of = self.right
        steps = {
            step.name: {"part": step.part, **vars(outcome), "checks": [*outcome.checks.values()]}
            for step, outcome in self._outcomes.items()
        }
        return {
            **provenance(), "smoke": self._smoke,
            "seconds": round(time.monotonic() - self._started, 1),
            "right": {"passed": passed, "of": of}, "steps": steps, "goals": self.goals,
            "verdict": self.verdict,
        }  # fmt: skip


def main() -> int:
    names = {step.name: step for step in STEPS}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on any device")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--more", action="store_true", help="what is beside the verdict")
    which.add_argument("--only", nargs="+", default=[], choices=names)
    parser.add_argument("--limit-s", type=float, default=580.0, help="for everything")
    parser.add_argument("--out", type=Path, help="default: gpu_first.json in benchmarks/results")
    for hidden in ("--step", "--rows", "--engine"):  # of the processes that this one starts
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        print(json.dumps(run_engine(json.loads(options.engine))))
        return 0
    if options.step:
        run_step(names[options.step], Path(options.rows), options.limit_s, smoke=options.smoke)
        return 0
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi")
    if not options.smoke and not has_gpu:
        parser.error("no NVIDIA GPU is here: run it on a host that has one, or with --smoke")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started, smoke = time.monotonic(), ["--smoke"] if options.smoke else []
    name = "gpu_first_more.json" if options.more else "gpu_first.json"
    report = Report(options.out or HERE / "results" / name, options.smoke)
    wanted = [step for step in STEPS if step.is_more == options.more]
    with contextlib.suppress(KeyboardInterrupt):
        for step in [names[name] for name in options.only] or wanted:
            end_s = PART_ENDS_S["engines" if options.more else step.part]
            end_s = options.limit_s if options.only else min(end_s, options.limit_s)
            command = [sys.executable, __file__, "--step", step.name, *smoke]
            limit_s = options.limit_s if options.only else step.limit_s
            report.add(step, run_apart(limit_s, started + end_s, command))
    note = " (tiny sizes: they say nothing)" if options.smoke else ""
    print(f"\ngoals on an H200, what a model says, and what was measured{note}")
    print(*(f"  {shown_goal(goal)}" for goal in report.goals), report.verdict, sep="\n")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
