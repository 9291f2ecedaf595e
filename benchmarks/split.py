"""One long sequence, decoded from one R-worker of one thread, two that have a
part each, or one of two threads.

    OMP_NUM_THREADS=1 python benchmarks/split.py --out
    benchmarks/results/split.json

A random model with little S-part, so that steps are attention. The three take
turns; ratios are of medians of decode steps. One of two threads is what two
R-workers of one thread could come to at best where they share a machine. torch
is given one thread, since its others would spin for a while after every S-step,
on the R-workers' cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from provenance import provenance
from random_llama import llama_config, write_checkpoint

from fastdecode import LLM, SamplingParams
from fastdecode.core.sequence import PromptRequest

SHAPE = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
         "num_attention_heads": 24, "num_key_value_heads": 24, "head_dim": 128}  # fmt: skip


def step_times(llm: LLM, prompt: list[int], num_tokens: int) -> list[float]:
    """Seconds of each decode step of one request."""
    ends: list[float] = []
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for delta in llm.deltas([PromptRequest("r", prompt, params)]):  # one a step
        assert delta.error is None, delta.error
        ends.append(time.perf_counter())
    assert len(ends) == num_tokens, "the reader was slower than the steps"
    return [
        after - before
        for before, after in zip(ends[-num_tokens:], ends[1 - num_tokens :], strict=False)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=10000, help="prompt tokens (default: 10000)")
    parser.add_argument(
        "--tokens", type=int, default=100, help="decode steps in a turn (default: 100)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prompt = [i * 31 % 251 for i in range(options.context)]
    part = -(-(options.context + options.tokens) // 128) * 64  # half of it, in whole blocks
    setups: dict[str, dict[str, Any]] = {
        "one R-worker": {"r_workers": 2},  # the other one has nothing to do
        "two parts": {"r_workers": 2, "split_tokens": part},
        "one of two threads": {"r_workers": 1, "r_threads": 2},
    }
    times: dict[str, list[float]] = {name: [] for name in setups}
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(
            Path(directory), llama_config(**SHAPE, max_position_embeddings=1 << 17), "random"
        )
        shared = {"r_threads": 1, "kv_memory_gb": 1.0, "prefill_chunk": 2048, "lanes": 1}
        llms = {
            name: LLM(directory, prefix_cache="off", **{**shared, **how})
            for name, how in setups.items()
        }
        for _ in range(options.rounds):
            for name, llm in llms.items():
                times[name] += step_times(llm, prompt, options.tokens)
        for llm in llms.values():
            llm.close()
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    base = medians["one R-worker"]
    rows = [
        {"setup": name, "ms": s * 1e3, "tokens_per_s_ratio": base / s}
        for name, s in medians.items()
    ]
    for row in rows:
        print(
            *(
                f"{key} {value:.3g}" if isinstance(value, float) else value
                for key, value in row.items()
            ),
            sep="  ",
        )
    if options.out is not None:
        result = {**provenance(), "context": options.context, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
