"""A Llama-shaped model end to end, with its KV on R-workers, on the GPU, on both
sides, and in transformers: used by gpu_suite.py.

Twice: with all of the GPU's memory, and with so little of it that a tenth of
the KV cache fits beside the weights: the case that R-workers are for. Every
engine runs in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 500000.0,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 200}  # fmt: skip
WORKLOADS = ((256, 512, 64), (64, 2048, 48))  # requests, prompt tokens, new tokens
R_WORKERS, ON_GPU, BOTH_SIDES = "R-workers", "KV on the GPU", "KV on both sides"
TRANSFORMERS_ENGINE = "transformers"
ENGINES = (ON_GPU, BOTH_SIDES, R_WORKERS, TRANSFORMERS_ENGINE)
WITHOUT_GRAPHS = "KV on the GPU, no graphs"
INT8 = "KV on the GPU, int8"
LIMIT_S = 90.0
"""Of one engine."""
_COMPILE_LIMIT_S = 300.0
"""Of R-workers' kernels, which are compiled before anything is measured: else
the first engine that has R-workers would spend its time on that."""
_LEAST_S = 10.0
"""With less time left nothing is started."""

FASTDECODE = """
import json, random, sys, time
from fastdecode import LLM, SamplingParams
path, options = sys.argv[1], json.loads(sys.argv[2])
count, prompt, new, vocab = map(int, sys.argv[3:])
rng = random.Random(0)
prompts = [[rng.randrange(3, vocab) for _ in range(prompt)] for _ in range(count)]
with LLM(path, max_num_sequences=count, prefix_cache="off", **options) as llm:
    def run(n):
        started = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        outputs = llm.generate(prompts, params)
        assert all(output.ok for output in outputs), next(o.error for o in outputs if not o.ok)
        return time.perf_counter() - started
    run(new)  # kernels are compiled, graphs captured
    first, total = run(1), run(new)
    print(json.dumps({"total_s": total, "prefill_s": first, "tokens_per_s": count * new / total,
                      "decode_tokens_per_s": count * (new - 1) / max(total - first, 1e-9),
                      "kv_blocks": llm.facts.num_kv_blocks,
                      "ahead_share": llm.stats.num_ahead / llm.stats.num_steps,
                      "wait_share": llm.stats.wait_s / llm.stats.step_s}))
"""
TRANSFORMERS = """
import json, sys, time, torch, transformers
path, options = sys.argv[1], json.loads(sys.argv[2])
count, prompt, new, vocab = map(int, sys.argv[3:])
device = options["device"]
if "gpu_memory_fraction" in options:
    torch.cuda.set_per_process_memory_fraction(options["gpu_memory_fraction"])
model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device)
generator = torch.Generator().manual_seed(0)
ids = torch.randint(3, vocab, (count, prompt), generator=generator).to(device)
batch = count
def run(n):
    started = time.perf_counter()
    with torch.inference_mode():
        for part in ids.split(batch):
            model.generate(part, attention_mask=torch.ones_like(part), do_sample=False,
                           max_new_tokens=n, eos_token_id=None, pad_token_id=0).cpu()
    return time.perf_counter() - started
while True:  # the largest batch that fits: all, a half, a quarter, ...
    try:
        run(2)
        first, total = run(1), run(new)
        break
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        assert batch > 1, "not one sequence fits"
        batch //= 2
print(json.dumps({"total_s": total, "prefill_s": first, "tokens_per_s": count * new / total,
                  "decode_tokens_per_s": count * (new - 1) / max(total - first, 1e-9),
                  "batch": batch}))
"""


def end_to_end(device: torch.device, *, smoke: bool, deadline_s: float) -> Iterator[dict[str, Any]]:
    """One row for each engine, workload and memory; those that there is no time
    for are left out, and named.

    Args:
        deadline_s: when to end, on ``time.monotonic``.
    """
    config = {**CONFIG, **(TINY if smoke else {})}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch)
        num_bytes = make_checkpoint(path, config, device)
        yield _compile(path, device, config["vocab_size"], deadline_s)
        for (count, prompt, new), is_short, engine in _runs(smoke, device):
            kv_bytes = (
                count
                * (prompt + new)
                * 4
                * config["num_hidden_layers"]
                * config["num_key_value_heads"]
            )
            kv_bytes *= config["hidden_size"] // config["num_attention_heads"]
            row = {"engine": engine, "requests": count, "prompt": prompt, "new": new}
            script, options = _engines(device, kv_bytes)[engine]
            if is_short:
                total = torch.cuda.get_device_properties(device).total_memory
                row["gpu_fraction"] = min(0.9, (num_bytes + 6e9 + kv_bytes / 10) / total)
                options["gpu_memory_fraction"] = row["gpu_fraction"]
            left_s = deadline_s - time.monotonic()
            if left_s < _LEAST_S:
                yield {**row, "error": "no time was left"}
            else:
                workload = (count, prompt, new, config["vocab_size"])
                yield {**row, **_run(script, path, options, workload, min(LIMIT_S, left_s))}


def _compile(path: Path, device: torch.device, vocab: int, deadline_s: float) -> dict[str, Any]:
    """Have R-workers' kernels compiled, and kept for all processes."""
    script, options = _engines(device, 1)[R_WORKERS]
    started = time.monotonic()
    limit_s = min(_COMPILE_LIMIT_S, deadline_s - started)
    found = _run(script, path, options, (2, 20, 3, vocab), limit_s)
    error = {"error": found["error"]} if "error" in found else {}
    return {"what": "R-workers' kernels", "compiled_s": time.monotonic() - started, **error}


def _runs(smoke: bool, device: torch.device) -> Iterator[tuple[tuple[int, int, int], bool, str]]:
    """Workload, whether the device's memory is short, and engine; what matters most comes first."""
    if smoke:
        yield from (((6, 20, 6), False, engine) for engine in (*ENGINES, WITHOUT_GRAPHS, INT8))
        return
    shorts = (False, True) if device.type == "cuda" else (False,)
    yield from ((WORKLOADS[0], is_short, engine) for is_short in shorts for engine in ENGINES)
    yield from ((WORKLOADS[1], False, engine) for engine in (ON_GPU, R_WORKERS))
    yield WORKLOADS[0], False, WITHOUT_GRAPHS
    yield WORKLOADS[0], device.type == "cuda", INT8


def _engines(device: torch.device, kv_bytes: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → script and options."""
    ours = {"device": device.type, "dtype": "bfloat16"}
    remote = {**ours, "kv_placement": "r", "kv_memory_gb": max(0.01, 1.5 * kv_bytes / 1e9)}
    local = {
        **ours,
        "kv_placement": "gpu",
        **({} if device.type == "cuda" else {"kv_memory_gb": 0.01}),
    }
    both = {**remote, "kv_placement": "hybrid", "r_workers": 2}
    return {
        ON_GPU: (FASTDECODE, local),
        BOTH_SIDES: (FASTDECODE, both),
        R_WORKERS: (FASTDECODE, remote),
        TRANSFORMERS_ENGINE: (TRANSFORMERS, {"device": device.type}),
        WITHOUT_GRAPHS: (FASTDECODE, {**local, "cuda_graphs": "off"}),
        INT8: (FASTDECODE, {**local, "kv_dtype": "int8"}),
    }


def _run(
    script: str, path: Path, options: dict[str, Any], workload: tuple[int, ...], limit_s: float
) -> dict[str, Any]:
    command = [sys.executable, "-c", script, str(path), json.dumps(options), *map(str, workload)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {limit_s:.0f} s"}
    except subprocess.CalledProcessError as error:
        return {
            "error": error.stderr.strip().splitlines()[-1][:300]
            if error.stderr
            else f"exit {error.returncode}"
        }
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def make_checkpoint(path: Path, config: dict[str, Any], device: torch.device) -> int:
    """Write a random checkpoint. Returns the bytes of its weights."""
    from safetensors.torch import save_file

    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden,
            inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (vocab, hidden),
        "model.norm": (hidden,),
    }
    shapes["lm_head"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        weight = torch.ones(shape, device=device)
        if len(shape) == 2:
            weight.normal_(0.0, shape[1] ** -0.5, generator=generator)
        tensors[f"{name}.weight"] = weight.to(torch.bfloat16).cpu()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())
