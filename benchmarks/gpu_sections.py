"""What gpu_suite.py measures: each section is a generator of rows, so that what
was measured before a failure stays.

    python benchmarks/gpu_sections.py SECTION --rows FILE [--limit-s N]
    [--smoke]

Shapes are Llama-2 7B's and Llama-3 8B's, with a few layers of random weights,
or all of them where a step's fixed costs would count for too much.
Times are medians of CUDA events, or of the host's clock where it is the host
that is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_end_to_end import end_to_end
from gpu_instant import instant_steps
from gpu_more import copies, host_turns, prompt_lengths
from gpu_swap import swap_steps
from gpu_whole import BLOCK_SIZE, decode_step, decode_ways, make_cache

from fastdecode.core.dtype import DType
from fastdecode.core.model.families import read_model_spec
from fastdecode.core.model.spec import ModelSpec
from sworker.buffers import Share, Staging, make_staging
from sworker.device import gpu_of
from sworker.graphs import MAX_GRAPH_ROWS, StepGraphs
from sworker.kernels.fused import fuse
from sworker.load.weights import random_model
from sworker.model.skeleton import Model, forward
from sworker.prefill import local_causal_attention

Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True)
class Setup:
    """Where, how large, and for how long."""

    device: torch.device
    dtype: torch.dtype
    smoke: bool
    deadline_s: float
    """On ``time.monotonic``."""

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, full: Any, tiny: Any) -> Any:
        return tiny if self.smoke else full

    def random(self, *shape: int) -> torch.Tensor:
        """Not zeros: with those a GPU's products are faster."""
        return torch.randn(shape, device=self.device).to(self.dtype)

    def spec(self, name: str, num_layers: int = 4) -> ModelSpec:
        hidden, inner, heads, kv_heads = {"7b": (4096, 11008, 32, 32), "8b": (4096, 14336, 32, 8)}[
            name
        ]
        if self.smoke:
            hidden, inner, heads, kv_heads = hidden // 64, inner // 64, 4, 4 * kv_heads // heads
        config = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
            "vocab_size": self.pick(32000, 500), "hidden_size": hidden, "intermediate_size": inner,
            "num_hidden_layers": self.pick(num_layers, 2), "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
            "hidden_act": "silu", "rope_theta": 500000.0, "tie_word_embeddings": False,
        }  # fmt: skip
        return read_model_spec(config, name=name)

    def seconds(self, run: Callable[[], object], repeats: int = 10) -> float:
        """Median of the device's time for one run, which is queued while the one before it runs."""
        repeats = self.pick(repeats, 2)
        for _ in range(2):
            run()
        if not self.is_cuda:
            times = []
            for _ in range(repeats):
                started = time.perf_counter()
                run()
                times.append(time.perf_counter() - started)
            return statistics.median(times)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))

    def host_seconds(self, run: Callable[[], object], repeats: int = 10) -> float:
        """Median time until the host has queued one run."""
        times = []
        for _ in range(self.pick(repeats, 2) + 2):
            if self.is_cuda:
                torch.cuda.synchronize()
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return statistics.median(times[2:])


def ceilings(setup: Setup) -> Rows:
    """The device's own rates, by which everything else is judged."""
    n, num_bytes = setup.pick(8192, 128), setup.pick(4 << 30, 1 << 20)
    a, b = setup.random(n, n), setup.random(n, n)
    yield {"what": "matmul", "tflops": 2 * n**3 / setup.seconds(lambda: a @ b) / 1e12}
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    yield {
        "what": "device copy",
        "gbps": 2 * num_bytes / setup.seconds(lambda: target.copy_(source)) / 1e9,
    }
    host = torch.empty(num_bytes // 16, dtype=torch.uint8, pin_memory=setup.is_cuda)
    piece = source[: len(host)]
    out_s = setup.seconds(lambda: host.copy_(piece, non_blocking=True))
    yield {"what": "to host", "gbps": len(host) / out_s / 1e9}
    back_s = setup.seconds(lambda: piece.copy_(host, non_blocking=True))
    yield {"what": "from host", "gbps": len(host) / back_s / 1e9}


def layers(setup: Setup) -> Rows:
    """T(B) of a layer, run as it is and as a graph, and what the host spends on
    it; with Triton's kernels, and without them."""
    for name in ("8b", "7b"):
        spec = setup.spec(name)
        plain, model = (
            random_model(spec, device=setup.device, dtype=setup.dtype) for _ in range(2)
        )
        if not fuse(model, setup.device) and setup.is_cuda:
            yield {
                "model": name,
                "what": "Triton's kernels",
                "error": "can't be used here: see the log",
            }
        graphs, plain_graphs = (
            StepGraphs(x, setup.device, capture=setup.is_cuda) for x in (model, plain)
        )
        plain_graphs.prepare()
        of_graphs = _prepared(graphs) if setup.is_cuda else {}
        for lane in (graphs.buffers(0), plain_graphs.buffers(0)):
            for buffer in (lane.x, lane.o):
                buffer.copy_(setup.random(*buffer.shape))
        for batch in setup.pick((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048), (1, 16)):
            flops = 2 * batch * (spec.num_layer_parameters - 2 * spec.hidden_size)
            ways = {"eager": _eager_layers(setup, model, batch)}
            if batch <= MAX_GRAPH_ROWS:
                ways |= {
                    "graph": _graph_layers(graphs, batch),
                    "graph, unfused": _graph_layers(plain_graphs, batch),
                }
            for how, run in ways.items():
                num = spec.num_layers - 1
                layer_s, host_s = setup.seconds(run) / num, setup.host_seconds(run) / num
                weights_gbps = spec.num_layer_parameters * setup.dtype.itemsize / layer_s / 1e9
                yield {"model": name, "rows": batch, "how": how, "layer_us": layer_s * 1e6,
                       "host_us": host_s * 1e6, "tflops": flops / layer_s / 1e12,
                       "weights_gbps": weights_gbps}  # fmt: skip
        if setup.is_cuda:
            yield {"model": name, "what": "a graph's memory", **of_graphs}
        del plain, model, graphs, plain_graphs, ways, run


def _eager_layers(setup: Setup, model: Model, batch: int) -> Callable[[], None]:
    spec = model.spec
    x = setup.random(batch, spec.hidden_size)
    o = setup.random(batch, spec.num_q_heads, spec.head_dim)
    positions = torch.arange(batch, device=setup.device)

    def run() -> None:
        y = x
        for before, after in zip(model.layers, list(model.layers)[1:], strict=False):
            y, _ = after.pre_attention_of_sum(*before.post_attention_apart(y, o), positions)

    return run


def _graph_layers(graphs: StepGraphs, batch: int) -> Callable[[], None]:
    bucket = graphs.buckets.of(batch)

    def run() -> None:
        for unit in range(1, graphs.num_units - 1):
            graphs.run(0, unit, bucket)

    return run


def _prepared(graphs: StepGraphs) -> dict[str, Any]:
    """What capturing all graphs takes: of the device's memory, and of time."""
    started, free = time.perf_counter(), torch.cuda.mem_get_info(graphs.device)[0]
    graphs.prepare()
    torch.cuda.synchronize(graphs.device)
    num, elapsed_s = graphs.num_graphs, time.perf_counter() - started
    taken = free - torch.cuda.mem_get_info(graphs.device)[0]
    return {"graphs": num, "kb_each": taken / num / 1024, "ms_each": elapsed_s / num * 1e3}


def staging(setup: Setup) -> Rows:
    """q, k, v to the host and o back, as a lane does it."""
    for name in ("8b", "7b"):
        spec = setup.spec(name)
        for batch in setup.pick((16, 64, 256, 1024), (4,)):
            heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
            q, k, v = (setup.random(batch, h, spec.head_dim) for h in heads)
            lane = make_staging(gpu_of(setup.device), sum(x.nbytes for x in (q, k, v)))
            rows = slice(0, batch)
            lane.begin_step([Share(rows, (), rows, rows)])
            answer = lane.send(q, k, v)
            answer.wait()
            arrived = answer.shipments[0][0].copy()

            def out(lane: Staging = lane, q: Any = q, k: Any = k, v: Any = v) -> None:
                lane.send(q, k, v).wait()

            def back(
                lane: Staging = lane, q: Any = q, arrived: Any = arrived, rows: slice = rows
            ) -> None:
                lane.receive(arrived, lane.begin_layer(q.shape, q.dtype), rows)
                lane.join()
                if setup.is_cuda:
                    torch.cuda.current_stream().synchronize()

            out_s, back_s = setup.host_seconds(out), setup.host_seconds(back)
            out_bytes = sum(x.nbytes for x in (q, k, v))
            yield {"model": name, "rows": batch, "out_us": out_s * 1e6,
                   "out_gbps": out_bytes / out_s / 1e9, "back_us": back_s * 1e6,
                   "back_gbps": q.nbytes / back_s / 1e9}  # fmt: skip


def decode_attention(setup: Setup) -> Rows:
    """Attention over the paged cache of the GPU-only mode, against the memory bandwidth."""
    for name, dtype in (("8b", DType.BFLOAT16), ("8b", DType.INT8), ("7b", DType.BFLOAT16)):
        spec = setup.spec(name)
        for batch, context in setup.pick(((4, 32768), (64, 2048), (256, 1024)), ((2, 40),)):
            step = decode_step(batch, context, setup.device)
            cache = make_cache(spec, 1, dtype, step.tables.numel(), setup.device)
            heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
            q, k, v = (setup.random(batch, h, spec.head_dim) for h in heads)
            seconds = setup.seconds(partial(cache.attend, 0, q, k, v, step))
            yield {"model": name, "kv": dtype.value, "sequences": batch, "context": context,
                   "attend_us": seconds * 1e6,
                   "kv_gbps": batch * context * cache.kv.token_bytes / seconds / 1e9}  # fmt: skip
            del cache


def whole_steps(setup: Setup) -> Rows:
    """Decode steps with KV on the device, through all layers: of the device and of the host."""
    model = random_model(setup.spec("8b", 32), device=setup.device, dtype=setup.dtype)
    fuse(model, setup.device)
    spec = model.spec
    for dtype in (DType.BFLOAT16, DType.INT8):
        for batch, context in setup.pick(((16, 1024), (64, 1024), (256, 1024)), ((2, 40),)):
            num_blocks = batch * -(-context // BLOCK_SIZE)
            cache = make_cache(spec, spec.num_layers, dtype, num_blocks, setup.device)
            for how, run in decode_ways(model, cache, batch, context, setup.is_cuda):
                step_s, host_s = setup.seconds(run), setup.host_seconds(run)
                yield {"kv": dtype.value, "sequences": batch, "context": context, "how": how,
                       "step_us": step_s * 1e6, "host_us": host_s * 1e6,
                       "tokens_per_s": batch / step_s}  # fmt: skip
            del cache, run


def prefill(setup: Setup) -> Rows:
    """Prompts through all layers, attention included."""
    for name in ("8b", "7b"):
        spec = setup.spec(name)
        model = random_model(spec, device=setup.device, dtype=setup.dtype)
        fuse(model, setup.device)
        for num_prompts, length in setup.pick(
            ((1, 2048), (4, 2048), (16, 512), (128, 64)), ((2, 32),)
        ):
            total = num_prompts * length
            ids = torch.randint(0, spec.vocab_size, (total,), device=setup.device)
            positions = torch.arange(length, device=setup.device).repeat(num_prompts)
            starts = range(0, total, length)

            def attend(
                layer: int, q: Any, k: Any, v: Any, spec: Any = spec, starts: Any = starts
            ) -> Any:
                return local_causal_attention(
                    q, k, v, starts, spec.attention[layer], want_lse=False
                )[0]

            seconds = setup.seconds(partial(forward, model, ids, positions, attend), repeats=5)
            attention = 2 * total * length * spec.num_q_heads * spec.head_dim
            flops = spec.num_layers * (2 * total * spec.num_layer_parameters + attention)
            yield {"model": name, "prompts": num_prompts, "tokens": length,
                   "tokens_per_s_and_layer": total * spec.num_layers / seconds,
                   "tflops": flops / seconds / 1e12}  # fmt: skip
        del model


def instant(setup: Setup) -> Rows:
    """Whole decode steps when R-workers answer at once: what copies and
    messages leave uncovered."""
    for name in ("8b", "7b"):
        model = random_model(setup.spec(name, 32), device=setup.device, dtype=setup.dtype)
        fuse(model, setup.device)
        for lanes in (1, 2):
            for batch in setup.pick((64, 256), (4,)):
                step_s, s_part_s = instant_steps(
                    model, setup.device, lanes, batch, setup.pick(30, 3), setup.is_cuda
                )
                yield {"model": name, "lanes": lanes, "rows_a_lane": batch, "step_us": step_s * 1e6,
                       "s_part_us": s_part_s * 1e6, "ratio": step_s / s_part_s}  # fmt: skip
        del model


SECTIONS: dict[str, Callable[[Setup], Rows]] = {
    "ceilings": ceilings,
    "layers": layers,
    "staging": staging,
    "instant": instant,
    "prefill": prefill,
    "decode_attention": decode_attention,
    "whole_steps": whole_steps,
    "copies": lambda setup: copies(
        setup.device, setup.pick((1 << 19, 1 << 20, 1 << 21, 1 << 22), (1 << 12,)), setup.seconds
    ),
    "prompt_lengths": lambda setup: prompt_lengths(
        setup.spec("8b"), setup.device, setup.dtype, setup.pick(2048, 64)
    ),
    "host_turns": lambda setup: host_turns(
        setup.spec("8b", 32), setup.device, setup.dtype, 16, setup.pick(20, 2)
    ),
    "swap": lambda setup: swap_steps(
        setup.spec("8b"),
        setup.device,
        setup.dtype,
        setup.pick(((24, 1024), (96, 1024), (24, 8192)), ((3, 40),)),
        setup.pick(8, 1),
    ),
    "end_to_end": lambda setup: end_to_end(
        setup.device, smoke=setup.smoke, deadline_s=setup.deadline_s
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument(
        "--rows", type=Path, required=True, help="append a line of JSON for each row"
    )
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    setup = Setup(device, torch.bfloat16, options.smoke, time.monotonic() + options.limit_s)
    with options.rows.open("a") as out, torch.inference_mode():
        for row in SECTIONS[options.section](setup):
            out.write(json.dumps(row) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
