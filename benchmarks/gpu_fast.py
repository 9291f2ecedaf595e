"""How fast a GPU is at what the S-worker does on it: the steps of gpu_first.py that
measure rates. Each is a generator of rows, so that what was measured before a
failure stays.

Every row carries ``max_error``: how far what was measured is from the right
result, in parts of the greatest value; where that is too far no rate is shown.
Shapes are Llama-2 7B's and Llama-3 8B's, with a few layers of random weights,
or all of them where a step's fixed costs would count for too much. Times are
medians of CUDA events, or of the host's clock where it is the host that is
measured.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from gpu_instant import Instant
from gpu_paged import attended, decode_step, decode_ways, dense, make_cache, num_blocks_for
from gpu_setup import Found, Row, Rows, Setup, distance, measured, row_distance

from fastdecode.core.dtype import DType
from sworker.buffers import Share, Staging, make_staging
from sworker.device import gpu_of
from sworker.graphs import MAX_GRAPH_ROWS, StepGraphs
from sworker.kernels.fused import fuse
from sworker.load.weights import random_model
from sworker.model.skeleton import Model, forward
from sworker.paged import PagedKV
from sworker.prefill import local_causal_attention

KERNEL_BOUND = 3e-2
"""Of one product or attention in bfloat16."""
LAYERS_BOUND = 5e-2
"""Of a few layers, of which each rounds in another order."""
STEP_BOUND = 0.1
"""Of 32 layers."""
_NUM_LENGTHS = 40
_STALL_S = 0.01
"""No prompt's attention takes so long, unless something is planned for its length."""
_CHECKED_TOKENS = 64


def ceilings(setup: Setup) -> Rows:
    """The device's own rates, by which everything else is judged."""
    n, num_bytes = setup.pick(8192, 128), setup.pick(4 << 30, 1 << 20)
    a, b = setup.random(n, n), setup.random(n, n)
    error = distance((a @ b)[:4], a[:4].double() @ b.double())
    tflops = 2 * n**3 / setup.seconds(lambda: a @ b) / 1e12
    yield measured({"what": "matmul"}, Found(error, KERNEL_BOUND), tflops=tflops)
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    host = torch.empty(num_bytes // 16, dtype=torch.uint8, pin_memory=setup.is_cuda)
    piece, back = source[: len(host)], target[: len(host)]
    for what, times, num, run, end in (
        ("device copy", 2, num_bytes, lambda: target.copy_(source), target),
        ("to host", 1, len(host), lambda: host.copy_(piece, non_blocking=True), host),
        ("from host", 1, len(host), lambda: back.copy_(host, non_blocking=True), back),
    ):
        end.zero_()
        seconds = setup.seconds(run)
        setup.finish()
        expected = source[: len(end)].to(end.device)
        wrong = Found(float(not torch.equal(end, expected)), 0.0)
        yield measured({"what": what}, wrong, gbps=times * num / seconds / 1e9)


def layers(setup: Setup) -> Rows:
    """T(B) of 8B's layers as engines run them."""
    return _layers(setup, ("8b",), setup.pick((64, 256, 512), (1, 16)), with_plain=False)


def all_layers(setup: Setup) -> Rows:
    """T(B) of both models' layers: as they are and as graphs, with Triton's
    kernels and without; and what graphs take of time and memory."""
    batches = setup.pick((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048), (1, 16))
    return _layers(setup, ("8b", "7b"), batches, with_plain=True)


def _layers(
    setup: Setup, names: Sequence[str], batches: Sequence[int], *, with_plain: bool
) -> Rows:
    for name in names:
        spec = setup.spec(name)
        plain, model = (
            random_model(spec, device=setup.device, dtype=setup.dtype) for _ in range(2)
        )
        if not fuse(model, setup.device) and setup.is_cuda:
            yield {"model": name, "error": f"{name}: Triton's kernels can't be used: see the log"}
        exact = copy.deepcopy(plain).float()
        captured = None if with_plain else [x for x in batches if x <= MAX_GRAPH_ROWS]
        graphs = {"graph": StepGraphs(model, setup.device, capture=setup.is_cuda)}
        if with_plain:
            graphs["graph, unfused"] = StepGraphs(plain, setup.device, capture=setup.is_cuda)
        for each in graphs.values():
            of_graphs = _prepared(setup, each, captured)
            if setup.is_cuda:
                yield {"model": name, "what": "a graph", "max_error": 0.0, **of_graphs}
        for batch in batches:
            yield from _layers_of(setup, name, model, exact, graphs, batch)
        del plain, model, exact, graphs, each


def _layers_of(
    setup: Setup, name: str, model: Model, exact: Model, graphs: dict[str, StepGraphs], batch: int
) -> Rows:
    spec, num = model.spec, model.spec.num_layers - 1
    x, o = (
        setup.random(batch, *shape)
        for shape in ((spec.hidden_size,), (spec.num_q_heads, spec.head_dim))
    )
    expected = _through_layers(exact, x.float(), o.float())
    ways: dict[str, Callable[[], torch.Tensor]] = {"eager": partial(_through_layers, model, x, o)}
    if batch <= MAX_GRAPH_ROWS:
        ways |= {how: partial(_through_graphs, each, batch) for how, each in graphs.items()}
    flops = 2 * batch * (spec.layer_parameters(0) - 2 * spec.hidden_size)
    weights = spec.layer_parameters(0) * setup.dtype.itemsize
    for how, run in ways.items():
        if how in graphs:
            lane = graphs[how].buffers(0)
            lane.x[:batch].copy_(x)
            lane.o[:batch].copy_(o)
        found = Found(distance(run(), expected), LAYERS_BOUND)
        layer_s, host_s = setup.seconds(run) / num, setup.host_seconds(run) / num
        yield measured(
            {"model": name, "rows": batch, "how": how}, found, layer_us=layer_s * 1e6,
            host_us=host_s * 1e6, tflops=flops / layer_s / 1e12,
            weights_gbps=weights / layer_s / 1e9,
        )  # fmt: skip


def _through_layers(model: Model, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """All units between the first and the last, as they are → hidden states."""
    positions = torch.arange(len(x), device=x.device)
    for before, after in zip(model.layers, list(model.layers)[1:], strict=False):
        x, _ = after.pre_attention(*before.post_attention(x, o), positions)
    return x


def _through_graphs(graphs: StepGraphs, batch: int) -> torch.Tensor:
    bucket = graphs.buckets.of(batch)
    for unit in range(1, graphs.num_units - 1):
        graphs.run(0, unit, bucket)
    return graphs.buffers(0).x[:batch]


def _prepared(setup: Setup, graphs: StepGraphs, buckets: list[int] | None) -> Row:
    """What capturing graphs takes: of the device's memory, and of time."""
    if not setup.is_cuda:
        graphs.prepare(buckets)
        return {}
    started, free = time.perf_counter(), torch.cuda.mem_get_info(graphs.device)[0]
    graphs.prepare(buckets)
    setup.finish()
    num, elapsed_s = graphs.num_graphs, time.perf_counter() - started
    if not num:
        return {"error": "no graph could be captured: see the log"}
    taken = free - torch.cuda.mem_get_info(graphs.device)[0]
    return {"graphs": num, "kb_each": taken / num / 1024, "ms_each": elapsed_s / num * 1e3}


def instant(setup: Setup) -> Rows:
    """Whole decode steps when 1, 4 or 16 R-workers answer at once: what copies,
    messages and the host leave uncovered."""
    num_layers = setup.pick(32, 2)
    model = random_model(setup.spec("8b", num_layers), device=setup.device, dtype=setup.dtype)
    fuse(model, setup.device)
    for num_r_workers, lanes, batch in setup.pick(
        ((1, 2, 256), (4, 2, 256), (16, 2, 256), (1, 1, 256), (1, 2, 64), (16, 2, 64)),
        ((1, 2, 4), (4, 2, 4)),
    ):
        steps = Instant(model, setup.device, lanes, batch, setup.is_cuda, num_r_workers)
        step_s, s_part_s = steps.seconds(setup.pick(20, 3))
        yield measured(
            {"model": "8b", "r_workers": num_r_workers, "lanes": lanes, "rows_a_lane": batch},
            Found(steps.max_error(), LAYERS_BOUND), step_us=step_s * 1e6,
            s_part_us=s_part_s * 1e6, ratio=step_s / s_part_s,
        )  # fmt: skip
        del steps


def host_turns(setup: Setup) -> Rows:
    """What the host takes a lane and layer, by the number of R-workers: of
    steps that are so small that the device waits for it."""
    model = random_model(setup.spec("8b", 32), device=setup.device, dtype=setup.dtype)
    fuse(model, setup.device)
    for num_r_workers in (1, 4, 16):
        steps = Instant(model, setup.device, 2, 16, setup.is_cuda, num_r_workers)
        step_s, s_part_s = steps.seconds(setup.pick(20, 2))
        num_turns = 2 * (model.spec.num_layers + 1)
        yield measured(
            {"r_workers": num_r_workers, "rows_a_lane": 16},
            Found(steps.max_error(), LAYERS_BOUND), turn_us=step_s / num_turns * 1e6,
            unit_us=s_part_s / num_turns * 1e6,
        )  # fmt: skip
        del steps


def prefill(setup: Setup) -> Rows:
    """Prompts through all layers, attention included."""
    for name in ("8b", "7b"):
        spec = setup.spec(name)
        model = random_model(spec, device=setup.device, dtype=setup.dtype)
        exact = copy.deepcopy(model).float()
        fuse(model, setup.device)
        for num_prompts, length in setup.pick(
            ((1, 2048), (4, 2048), (16, 512), (128, 64)), ((2, 32),)
        ):
            total = num_prompts * length
            ids = torch.randint(0, spec.vocab_size, (total,), device=setup.device)
            positions = torch.arange(length, device=setup.device).repeat(num_prompts)
            run = partial(forward, model, ids, positions, _attend_prompts(model, total, length))
            error = _prompt_error(exact, ids, run(), length)
            seconds = setup.seconds(run, repeats=5)
            attention = 2 * total * length * spec.num_q_heads * spec.head_dim
            flops = spec.num_layers * (2 * total * spec.layer_parameters(0) + attention)
            yield measured(
                {"model": name, "prompts": num_prompts, "tokens": length},
                Found(error, LAYERS_BOUND),
                tokens_per_s_and_layer=total * spec.num_layers / seconds,
                tflops=flops / seconds / 1e12,
            )  # fmt: skip
        del model, exact, run


def _attend_prompts(model: Model, total: int, length: int) -> Callable[..., torch.Tensor]:
    starts = range(0, total, length)

    def attend(layer: int, q: Any, k: Any, v: Any) -> torch.Tensor:
        spec = model.spec.attention[layer]
        return local_causal_attention(q, k, v, starts, spec, want_lse=False)[0]

    return attend


def _prompt_error(exact: Model, ids: torch.Tensor, found: torch.Tensor, length: int) -> float:
    """Of the first tokens of the first and the last prompt: later ones don't change them."""
    num = min(length, _CHECKED_TOKENS)
    positions = torch.arange(num, device=ids.device)

    def attend(layer: int, q: Any, k: Any, v: Any) -> torch.Tensor:
        return dense(q, k, v, exact.spec.attention[layer])

    starts = (0, len(ids) - length)
    return max(
        distance(found[a : a + num], forward(exact, ids[a : a + num], positions, attend))
        for a in starts
    )


def decode_attention(setup: Setup) -> Rows:
    """Attention over paged KV on the device, against the memory bandwidth: of
    equal and of very unequal lengths, and by the kernel's pipeline stages."""
    equal = [(f"{n} x {c}", [c] * n) for n, c in ((4, 32768), (16, 2048), (64, 2048), (256, 1024))]
    skewed = [("1 x 100000, 63 x 493", [100_000] + [493] * 63)]
    full = (
        ("8b", DType.BFLOAT16, [*equal, *skewed]), ("8b", DType.INT8, equal[2:] + skewed),
        ("7b", DType.BFLOAT16, equal[2:3]),
    )  # fmt: skip
    tiny = (("8b", DType.BFLOAT16, [("2 x 40", [40] * 2)]), ("8b", DType.INT8, [("3", [90, 4, 4])]))
    for name, dtype, cases in setup.pick(full, tiny):
        for lengths, lens in cases:
            yield from _decode_attention_of(setup, name, dtype, lengths, lens)


def _decode_attention_of(
    setup: Setup, name: str, dtype: DType, lengths: str, lens: list[int]
) -> Rows:
    spec = setup.spec(name)
    step = decode_step(lens, setup.device)
    cache = make_cache(spec, 1, dtype, num_blocks_for(lens), setup.device)
    heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = (setup.random(len(lens), h, spec.head_dim) for h in heads)
    rows = sorted({0, len(lens) // 2, len(lens) - 1})
    case = {"model": name, "kv": dtype.value, "lengths": lengths}
    cache.store(0, k, v, step.slots)
    expected = attended(q, cache, step, rows)
    for stages, run in _attention_ways(cache, q, k, v, step):
        found = Found(row_distance(run()[rows], expected), KERNEL_BOUND)
        seconds = setup.seconds(_captured(setup, run))
        yield measured(
            {**case, **stages}, found, attend_us=seconds * 1e6,
            kv_gbps=sum(lens) * cache.kv.token_bytes / seconds / 1e9,
        )  # fmt: skip


def _captured(setup: Setup, run: Callable[[], object]) -> Callable[[], object]:
    """As an engine runs it: as part of a graph. Kernel by kernel the host would be slower
    than the device."""
    gpu = gpu_of(setup.device)
    if gpu is None:
        return run

    def queue() -> None:
        run()

    return gpu.capture(queue, gpu.new_pool()).replay


def _attention_ways(
    cache: PagedKV, q: Any, k: Any, v: Any, step: Any
) -> Iterator[tuple[Row, Callable[[], torch.Tensor]]]:
    """As engines run it; and with K and V in tiles of other sizes and numbers of buffers."""
    yield {}, partial(cache.attend, 0, q, k, v, step)
    if cache.kernels is None:
        return
    from sworker.kernels.paged_triton import Tiling, WithTiling

    for tile, num_stages in ((64, 2), (64, 3), (64, 4), (32, 3), (32, 4)):
        other = copy.copy(cache)
        other.kernels = WithTiling(Tiling(tile, num_stages=num_stages))
        way = {"tile": tile, "buffers": num_stages - 1}
        yield way, partial(other.attend, 0, q, k, v, step)


def whole_steps(setup: Setup) -> Rows:
    """Decode steps with KV on the device, through all layers: of the device and
    of the host. A step with prompts among its rows runs unit by unit; layer by layer, every
    kernel launched, is how steps of more rows run than graphs are captured for."""
    model = random_model(setup.spec("8b", 32), device=setup.device, dtype=setup.dtype)
    fuse(model, setup.device)
    spec = model.spec
    for dtype in (DType.BFLOAT16, DType.INT8):
        for batch, context in setup.pick(((16, 1024), (64, 1024), (256, 1024)), ((2, 40),)):
            lens = [context] * batch
            cache = make_cache(spec, spec.num_layers, dtype, num_blocks_for(lens), setup.device)
            # All are made before one is run: to capture a step writes to the first slot.
            ways = dict(decode_ways(model, cache, lens, setup.is_cuda))
            expected = ways.pop("gathered")().clone()
            for how, run in ways.items():
                found = Found(distance(run(), expected), STEP_BOUND)
                step_s, host_s = setup.seconds(run), setup.host_seconds(run)
                yield measured(
                    {"kv": dtype.value, "sequences": batch, "context": context, "how": how},
                    found, step_us=step_s * 1e6, host_us=host_s * 1e6, tokens_per_s=batch / step_s,
                )  # fmt: skip
            del cache, run, ways


def staging(setup: Setup) -> Rows:
    """q, k, v to the host and o back, as a lane does it."""
    for name in ("8b", "7b"):
        for batch in setup.pick((16, 64, 256, 1024), (4,)):
            yield _staging_of(setup, name, batch)


def _staging_of(setup: Setup, name: str, batch: int) -> Row:
    spec = setup.spec(name)
    heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = (setup.random(batch, h, spec.head_dim) for h in heads)
    out_bytes = sum(x.nbytes for x in (q, k, v))
    lane: Staging = make_staging(gpu_of(setup.device), out_bytes)
    rows = slice(0, batch)
    lane.begin_step([Share(rows, (), rows, rows)])
    answer = lane.send(q, k, v)
    answer.wait()
    arrived = answer.shipments[0][0].copy()

    def out() -> None:
        lane.send(q, k, v).wait()

    def back() -> torch.Tensor:
        o = lane.begin_layer(q.shape, q.dtype)
        lane.receive(arrived, o, rows)
        lane.join()
        if setup.is_cuda:
            torch.cuda.current_stream().synchronize()
        return o

    wrong = Found(float(not torch.equal(back(), q)), 0.0)
    out_s, back_s = setup.host_seconds(out), setup.host_seconds(back)
    return measured(
        {"model": name, "rows": batch}, wrong, out_us=out_s * 1e6,
        out_gbps=out_bytes / out_s / 1e9, back_us=back_s * 1e6, back_gbps=q.nbytes / back_s / 1e9,
    )  # fmt: skip


def copy_rates(setup: Setup) -> Rows:
    """Between the device and the host: memory that was registered, as messages'
    buffers are, against memory that CUDA has allocated."""
    gpu = gpu_of(setup.device)
    for num_bytes in setup.pick((1 << 19, 1 << 20, 1 << 21, 1 << 22), (1 << 12,)):
        expected = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=setup.device)
        allocated = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=gpu is not None)
        registered = torch.zeros_like(allocated) if gpu is None else gpu.pinned(num_bytes)
        for memory, host in (("registered", registered), ("allocated", allocated)):
            back = torch.zeros_like(expected)
            out_s = setup.seconds(partial(host.copy_, expected, non_blocking=True))
            back_s = setup.seconds(partial(back.copy_, host, non_blocking=True))
            setup.finish()
            yield measured(
                {"memory": memory, "mb": num_bytes / 1e6},
                Found(float(not torch.equal(back, expected)), 0.0), out_us=out_s * 1e6,
                back_us=back_s * 1e6, out_gbps=num_bytes / out_s / 1e9,
                back_gbps=num_bytes / back_s / 1e9,
            )  # fmt: skip


def prompt_lengths(setup: Setup) -> Rows:
    """Attention of single prompts, each of a length that comes for the first
    time: a kernel that is planned by length shows as milliseconds."""
    spec, longest = setup.spec("8b"), setup.pick(2048, 64)
    found: dict[int, float] = {}
    worst_error = 0.0
    for number in range(_NUM_LENGTHS + 2):
        length = max(1, longest - 7 * number)
        heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
        q, k, v = (setup.random(length, h, spec.head_dim) for h in heads)
        setup.finish()
        started = time.perf_counter()
        o, _ = local_causal_attention(q, k, v, (0,), spec.attention[0], want_lse=False)
        setup.finish()
        found[length] = time.perf_counter() - started
        expected = dense(q[-1:].double(), k.double(), v.double(), spec.attention[0])
        worst_error = max(worst_error, distance(o[-1:], expected))
    new = list(found.items())[2:]  # the first ones load the kernel
    worst = max(new, key=lambda one: one[1])
    yield measured(
        {"lengths": len(new)}, Found(worst_error, KERNEL_BOUND),
        median_ms=statistics.median(s for _, s in new) * 1e3, worst_ms=worst[1] * 1e3,
        worst_length=worst[0], stalls=sum(s > _STALL_S for _, s in new),
    )  # fmt: skip
