"""Whole engines of a model with Llama-3 8B's shapes and random weights, which are
made on the device: KV on the GPU, on R-workers, on both sides. Steps of
gpu_first.py; every engine runs in a process of its own:

    python benchmarks/gpu_engines.py JSON

Twice: with room for all KV on the GPU, and for a tenth of it, the case that
R-workers are for. What an engine says of a few prompts is held against a plain
forward pass with the same weights: ``max_error`` is the greatest difference of
log-probabilities of the likeliest tokens.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu_goals import BOTH_SIDES, ON_GPU, R_WORKERS
from gpu_setup import Found, Row, Rows, Setup, measured

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 500000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 200}  # fmt: skip
KERNEL_SHAPES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
                 "vocab_size": 200}  # fmt: skip
"""8B's heads, and little else: what R-workers' kernels are compiled for. The
shipped model's are, too, for the step "tokens"."""
PROCESSES = "R-workers, processes over loopback"
WITHOUT_GRAPHS, INT8 = "KV on the GPU, no graphs", "KV on the GPU, int8"
TRANSFORMERS = "transformers"
TENTH = 0.1
LIMIT_S = 75.0
"""Of one engine."""
BOUND = 0.3
"""Of log-probabilities, in bfloat16."""
_LEAST_S = 10.0
"""With less time left nothing is started."""
_CHECKED = 4
"""Prompts whose first tokens are looked at."""
_TOP = 5
_NUM_PROCESSES = 2
_REPEATS, _ENOUGH_S = 3, 5.0
R_WORKER = ("-m", "fastdecode.cli.main", "r-worker", "--bind", "tcp://127.0.0.1:*")


@dataclass(frozen=True)
class Workload:
    """Requests that come at once."""

    requests: int
    prompt: int
    """Tokens of each."""
    new: int
    """Tokens that each is given."""

    @property
    def num_tokens(self) -> int:
        return self.requests * (self.prompt + self.new)

    def prompts(self, vocab: int) -> list[list[int]]:
        rng = random.Random(0)
        return [[rng.randrange(3, vocab) for _ in range(self.prompt)] for _ in range(self.requests)]


USUAL, LONG = Workload(64, 512, 64), Workload(64, 2048, 48)


@dataclass(frozen=True)
class Engine:
    """One row's."""

    name: str
    options: dict[str, Any]
    num_processes: int = 0
    """R-workers in processes of their own."""
    kv_share: float | None = None
    """Of the workload's KV, what the GPU is given room for; None: all."""


def compile_kernels(setup: Setup) -> Rows:
    """Have R-workers' kernels compiled, and kept for all processes: else the
    first engines that have R-workers would spend their time on that."""
    shipped = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    for dtype, shapes in (("bfloat16", KERNEL_SHAPES), ("float32", {**KERNEL_SHAPES, **shipped})):
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            _write_config(directory, {**CONFIG, **shapes})
            options = {"device": "cpu", "dtype": dtype, "kv_memory_gb": 0.05, "r_threads": 1}
            found = _run(directory, options, Workload(2, 20, 3), setup.left_s)
        error = {"error": found["error"]} if "error" in found else {}
        seconds = time.monotonic() - started
        yield {"what": f"R-workers' kernels, {dtype}", "compiled_s": seconds, **error}


def engines(setup: Setup) -> Rows:
    """What matters most, first."""
    workload = setup.pick(USUAL, Workload(6, 20, 6))
    yield from _engines(setup, workload, _first_engines(setup, workload))


def more_engines(setup: Setup) -> Rows:
    """What is beside the verdict."""
    usual = setup.pick(USUAL, Workload(6, 20, 6))
    local = {**_base(setup), "kv_placement": "gpu", **_local_kv(setup)}
    more = [
        Engine(TRANSFORMERS, {"device": setup.device.type}),
        Engine(INT8, {**local, "kv_dtype": "int8"}),
        Engine(WITHOUT_GRAPHS, {**local, "cuda_graphs": "off"}),
    ]
    yield from _engines(setup, usual, more)
    long = setup.pick(LONG, Workload(3, 40, 4))
    yield from _engines(setup, long, _first_engines(setup, long)[:2])


def _first_engines(setup: Setup, workload: Workload) -> list[Engine]:
    kv_gb = workload.num_tokens * _token_bytes(_config(setup)) / 1e9
    base = _base(setup)
    remote = {**base, "kv_placement": "r", "kv_memory_gb": max(0.01, 1.5 * kv_gb)}
    local = {**base, "kv_placement": "gpu", **_local_kv(setup)}
    both = {**remote, "kv_placement": "hybrid", "r_workers": 2}
    if not setup.is_cuda:
        both["device_kv_gb"] = max(0.01, 1.5 * kv_gb)
    # A tiny workload's tenth holds no sequence.
    tenth_gb = max(TENTH * kv_gb, 2 * kv_gb / workload.requests)
    return [
        Engine(ON_GPU, local),
        Engine(R_WORKERS, remote),
        Engine(BOTH_SIDES, both),
        Engine(PROCESSES, remote, num_processes=_NUM_PROCESSES),
        Engine(ON_GPU, {**local, "kv_memory_gb": tenth_gb}, kv_share=TENTH),
        Engine(BOTH_SIDES, {**both, "device_kv_gb": tenth_gb}, kv_share=TENTH),
    ]


def _base(setup: Setup) -> dict[str, Any]:
    blocks = {"block_size": 16} if setup.smoke else {}
    return {"device": setup.device.type, "dtype": "bfloat16", **blocks}


def _local_kv(setup: Setup) -> dict[str, Any]:
    return {} if setup.is_cuda else {"kv_memory_gb": 0.01}


def _config(setup: Setup) -> dict[str, Any]:
    return {**CONFIG, **(TINY if setup.smoke else {})}


def _token_bytes(config: dict[str, Any]) -> int:
    """K and V of a token in bfloat16."""
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    return int(2 * 2 * layers * heads * config["head_dim"])


def _write_config(directory: str, config: dict[str, Any]) -> None:
    Path(directory, "config.json").write_text(json.dumps(config))


def _engines(setup: Setup, workload: Workload, wanted: Sequence[Engine]) -> Rows:
    """A row for each engine; those that there is no time for are left out, and named."""
    with tempfile.TemporaryDirectory() as directory:
        _write_config(directory, _config(setup))
        asked = {"device": setup.device.type, "is_reference": True}
        reference = _run(directory, asked, workload, min(LIMIT_S, setup.left_s))
        if "error" in reference:
            yield {"what": "reference", "error": f"reference: {reference['error']}"}
        for engine in wanted:
            case: Row = {"engine": engine.name, "requests": workload.requests,
                         "prompt": workload.prompt, "new": workload.new}  # fmt: skip
            if engine.kv_share is not None:
                case["asked_kv_share"] = engine.kv_share
            if setup.left_s < _LEAST_S:
                yield {**case, "left_out": f"{engine.name}: no time was left"}
                continue
            yield _row(setup, case, directory, engine, workload, reference)


def _row(
    setup: Setup,
    case: Row,
    directory: str,
    engine: Engine,
    workload: Workload,
    reference: dict[str, Any],
) -> Row:
    lacking = "zmq" if engine.num_processes else ""
    lacking = "transformers" if engine.name == TRANSFORMERS else lacking
    if lacking and importlib.util.find_spec(lacking) is None:
        return {**case, "left_out": f"{engine.name}: not installed: {lacking}"}
    limit_s = min(LIMIT_S, setup.left_s)
    try:
        with _r_workers(engine, limit_s) as addresses:
            options = engine.options
            if addresses:  # which have their own memory
                options = {k: v for k, v in options.items() if k != "kv_memory_gb"} | addresses
            found = _run(directory, options, workload, limit_s)
    except OSError as error:
        found = {"error": str(error)}
    if "error" in found:
        return {**case, "error": f"{engine.name}: {found['error']}"}
    if engine.name == TRANSFORMERS:
        return {**case, **found, "max_error": "not compared: it has other weights"}
    error = _error(found.pop("top"), reference.get("top"))
    return measured(case, Found(error, BOUND), **found)


def _error(found: list[list[Any]], expected: list[list[Any]] | None) -> float:
    """The greatest difference of log-probabilities of tokens that both name."""
    if expected is None:
        return math.nan
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        a, b = ({int(token): value for token, value in each} for each in (one, other))
        shared = a.keys() & b.keys()
        worst = max([worst, *(abs(a[token] - b[token]) for token in shared)])
        if not shared:
            return math.inf
    return worst


@contextlib.contextmanager
def _r_workers(engine: Engine, limit_s: float) -> Iterator[dict[str, Any]]:
    """R-workers in processes of their own, where an engine wants some. Gives the
    options by which it reaches them.

    Raises:
        OSError: one didn't start.
    """
    if not engine.num_processes:
        yield {}
        return
    cores = len(os.sched_getaffinity(0))
    command = [sys.executable, *R_WORKER, "--kv-memory-gb", str(engine.options["kv_memory_gb"]),
               "--threads", str(max(1, (cores - 1) // engine.num_processes))]  # fmt: skip
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(engine.num_processes):
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        yield {"r_worker_addresses": [_address_of(process) for process in processes]}


def _address_of(process: subprocess.Popen[str]) -> str:
    """Once it says where it listens."""
    assert process.stdout is not None
    for line in process.stdout:
        if " listens at " in line:
            return line.split(" listens at ")[1].split()[0]
    raise OSError(f"an R-worker ended before it listened, with exit code {process.wait()}")


def _run(
    directory: str, options: dict[str, Any], workload: Workload, limit_s: float
) -> dict[str, Any]:
    """What an engine says of itself, or ``error``."""
    if limit_s < 1:
        return {"error": "no time was left"}
    asked = {"model": directory, "options": options, "workload": vars(workload)}
    command = [sys.executable, __file__, json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {limit_s:.0f} s"}
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        return {"error": said[-1][:300] if said else f"exit code {error.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    asked = json.loads(sys.argv[1])
    options, workload = asked["options"], Workload(**asked["workload"])
    if options.pop("is_reference", False):
        found = reference(asked["model"], options["device"], workload)
    elif "dtype" in options:
        found = measure(asked["model"], options, workload)
    else:
        found = measure_transformers(asked["model"], options["device"], workload)
    print(json.dumps(found))


def measure(model: str, options: dict[str, Any], workload: Workload) -> dict[str, Any]:
    """Rates of one engine, the share of the workload's KV that its device has
    room for, and what it says of the first prompts."""
    from fastdecode import LLM, SamplingParams

    count, new = workload.requests, workload.new
    with LLM(
        model, load_format="random", max_num_sequences=count, prefix_cache="off", **options
    ) as llm:
        prompts = workload.prompts(llm.facts.vocab_size)

        def run(number: int) -> float:
            started = time.perf_counter()
            params = SamplingParams(temperature=0, max_tokens=number, ignore_eos=True)
            outputs = llm.generate(prompts, params)
            assert all(output.ok for output in outputs), next(o.error for o in outputs if not o.ok)
            return time.perf_counter() - started

        run(new)  # kernels are compiled
        first = statistics.median(run(1) for _ in range(_REPEATS))
        total = _median_s(partial(run, new))
        likeliest = SamplingParams(temperature=0, max_tokens=1, logprobs=_TOP)
        said = llm.generate(prompts[:_CHECKED], likeliest)
        top = [list(output.completions[0].logprobs[0].top) for output in said]
        decode_s = max(total - first, 1e-9)
        return {"total_s": total, "prefill_s": first, "tokens_per_s": count * new / total,
                "decode_tokens_per_s": count * (new - 1) / decode_s,
                "decode_step_ms": decode_s / (new - 1) * 1e3, "kv_share": _kv_share(llm, workload),
                "start_s": llm.facts.load_s, "top": top,
                "ahead_share": llm.stats.num_ahead / llm.stats.num_steps,
                "wait_share": llm.stats.wait_s / llm.stats.step_s}  # fmt: skip


def _median_s(run: Callable[[], float]) -> float:
    """Of some runs, where they are short: how long one takes differs by some percent."""
    seconds = [run()]
    while len(seconds) < _REPEATS and sum(seconds) < _ENOUGH_S:
        seconds.append(run())
    return statistics.median(seconds)


def _kv_share(llm: Any, workload: Workload) -> float:
    """Of the workload's KV, what the device has room for, as it was resolved."""
    resolved, block_size = llm._running.resolved, llm.config.r_part.block_size
    if llm.facts.kv_placement == "gpu":
        return float(llm.facts.num_kv_blocks * block_size / workload.num_tokens)
    kv = llm._running.spec.kv_spec(llm.facts.kv_dtype)
    return float(resolved.device_kv_bytes / (workload.num_tokens * kv.token_bytes))


def reference(model: str, device: str, workload: Workload) -> dict[str, Any]:
    """The likeliest first tokens of the first prompts, by a plain forward pass
    without fused kernels, its attention in float32."""
    import torch
    from gpu_paged import dense

    from fastdecode.core.model.checkpoint import open_checkpoint
    from sworker.load.weights import load_model
    from sworker.model.skeleton import forward

    checkpoint = open_checkpoint(model, "random")
    spec, loaded = load_model(checkpoint, device=device, dtype=torch.bfloat16)

    def attend(layer: int, q: Any, k: Any, v: Any) -> torch.Tensor:
        return dense(q.float(), k.float(), v.float(), spec.attention[layer]).to(q.dtype)

    top = []
    with torch.inference_mode():
        for prompt in workload.prompts(spec.vocab_size)[:_CHECKED]:
            ids = torch.tensor(prompt, device=device)
            positions = torch.arange(len(prompt), device=device)
            hidden = forward(loaded, ids, positions, attend)[-1:]
            values, tokens = loaded.logits(hidden)[0].float().log_softmax(-1).topk(_TOP)
            top.append(list(zip(tokens.tolist(), values.tolist(), strict=True)))
    return {"top": top}


def measure_transformers(model: str, device: str, workload: Workload) -> dict[str, Any]:
    """The same workload in transformers, with weights of its own making, in the
    largest batch that fits: all, a half, a quarter, ..."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.tensor(workload.prompts(config.vocab_size), device=device)
    batch = workload.requests

    def run(number: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            for part in ids.split(batch):
                made.generate(
                    part, attention_mask=torch.ones_like(part), do_sample=False,
                    max_new_tokens=number, eos_token_id=None, pad_token_id=0,
                ).cpu()  # fmt: skip
        return time.perf_counter() - started

    while True:
        try:
            run(2)
            first, total = run(1), run(workload.new)
            break
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            assert batch > 1, "not one sequence fits"
            batch //= 2
    count, new = workload.requests, workload.new
    return {"total_s": total, "prefill_s": first, "tokens_per_s": count * new / total,
            "decode_tokens_per_s": count * (new - 1) / max(total - first, 1e-9),
            "batch": batch}  # fmt: skip


if __name__ == "__main__":
    main()
