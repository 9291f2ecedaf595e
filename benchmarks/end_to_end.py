"""Whole batches, end to end: FastDecode beside transformers, and beside any other engine that a command can run.

    python benchmarks/end_to_end.py --out benchmarks/results/end_to_end.json

Two Llama-shaped random checkpoints and three workloads of random token ids, greedy, EOS ignored, bfloat16, all cores.
Every engine runs in a process of its own, one after the other, so that none keeps another's memory or threads; seconds
are those that the engine itself reports for its second, warm run.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from provenance import provenance

MODELS = {
    "gqa100m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
                "intermediate_size": 2048},
    "mha32m": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
               "intermediate_size": 1408},
}  # fmt: skip
VOCAB = 8192
# requests, prompt tokens, new tokens
WORKLOADS = {"A": (32, 512, 128), "B": (32, 2048, 64), "C": (128, 128, 128)}

TRANSFORMERS = """
import json, resource, sys, time, torch, transformers
path, count, prompt, new = sys.argv[1], *map(int, sys.argv[2:])
model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
ids = torch.randint(3, model.config.vocab_size, (count, prompt), generator=torch.Generator().manual_seed(0))
def run(n):
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n, eos_token_id=None,
                       pad_token_id=0)
    return time.perf_counter() - started
run(2)
prefill, total = run(1), run(new)
print(json.dumps({"total_s": total, "prefill_s": prefill, "decode_tokens_per_s": count * (new - 1) / (total - prefill),
                  "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}))
"""

FASTDECODE = """
import json, random, resource, sys, time
from fastdecode import LLM, SamplingParams
path, count, prompt, new = sys.argv[1], *map(int, sys.argv[2:])
rng = random.Random(0)
prompts = [[rng.randrange(3, 8192) for _ in range(prompt)] for _ in range(count)]
with LLM(path, dtype="bfloat16", kv_memory_gb=6) as llm:
    def run(n):
        before = (llm.stats.prefill_s, llm.stats.decode_s, llm.stats.wait_s)
        started = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))
        after = (llm.stats.prefill_s, llm.stats.decode_s, llm.stats.wait_s)
        return time.perf_counter() - started, *(b - a for a, b in zip(before, after))
    run(2)
    total, prefill, decode, wait = run(new)
    only_prefill = run(1)[0]
print(json.dumps({"total_s": total, "prefill_s": only_prefill, "wait_s": wait,
                  "decode_tokens_per_s": count * (new - 1) / (total - only_prefill),
                  "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}))
"""


def make_checkpoint(directory: Path, shape: dict[str, int]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=4096, tie_word_embeddings=False, **shape)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def run(python: str, script: str, model: Path, workload: tuple[int, int, int], limit_s: float) -> dict[str, Any]:
    """One engine on one workload; the JSON line that it prints, or why there is none."""
    command = [python, "-c", script, str(model), *map(str, workload)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {limit_s:g} s"}
    except subprocess.CalledProcessError as error:
        return {"error": error.stderr.strip().splitlines()[-1] if error.stderr else f"exit code {error.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON=SCRIPT",
                        help="another engine: interpreter, and script taking MODEL COUNT PROMPT NEW")  # fmt: skip
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of each run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    engines = {"fastdecode": (sys.executable, FASTDECODE)}
    if not options.no_transformers:
        engines["transformers"] = (sys.executable, TRANSFORMERS)
    for peer in options.peer:
        name, python, script = peer.split("=", 2)
        engines[name] = (python, Path(script).read_text())
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.models:
            path = Path(scratch) / model
            make_checkpoint(path, MODELS[model])
            for workload in options.workloads:
                order = random.Random(f"{model}{workload}").sample(list(engines), len(engines))
                for engine in order:
                    result = run(*engines[engine], path, WORKLOADS[workload], options.limit_s)
                    rows.append({"model": model, "workload": workload, "engine": engine, **result})
                    print(json.dumps(rows[-1]), flush=True)
    if options.out is not None:
        report = {**provenance(), "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
