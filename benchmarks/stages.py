"""Pipeline stages: do lanes keep them busy, and what do they cost on the same
cores?

    python benchmarks/stages.py --out benchmarks/results/stages.json

Two questions, each with a random Llama-shaped model on threads of one process:

* **cycle**: stages whose S-steps take long enough to be seen (each layer sleeps,
  so that two cores can show four stages), in N to 2N lanes. A *cycle* is one
  step of every sequence, and shouldn't take longer than the slowest stage needs
  for all lanes. Goal: 1.15 times that. What it needs is measured: an engine of
  one stage, with the first one's layers, embedding, head and sampler, runs a
  lane's sequences by itself (``alone_s``, and ``ratio`` to it). What its layers
  sleep is less than that, since they compute, too (``of_sleep``).
* **cores**: tokens a second of ``--pp 2`` against ``--pp 1`` on the same cores, in
  turns. Goal: 0.85. And CPU seconds, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from provenance import keep, provenance
from random_llama import llama_config, write_checkpoint

from fastdecode import LLM, SamplingParams
from sworker.model.skeleton import Layer

VOCAB = 512
SMALL = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
         "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": VOCAB}  # fmt: skip
LARGE = {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12,
         "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 4096}  # fmt: skip
LAYER_S = 0.01
"""That a layer sleeps, in its second half."""
BATCH = 64
TOKENS = 48


def generate_s(llm: LLM, num_tokens: int, batch: int = BATCH) -> float:
    """Seconds for so many tokens of each of a batch."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate([[5 + i, 7, 9] for i in range(batch)], params)
    assert all(output.ok for output in outputs)
    return time.perf_counter() - began


OPTIONS: dict[str, Any] = {"r_threads": 1, "kv_memory_gb": 0.05, "schedule": "greedy"}


def cycles(model: str, first_stage: str, num_stages: int) -> list[dict[str, Any]]:
    """Of stages that sleep, by number of lanes.

    Args:
        first_stage: a model of its layers alone.
    """
    found = []
    for lanes in range(num_stages, 2 * num_stages + 1):
        # A stage's R-worker is in its own thread where there are as many lanes as stages.
        alone_s = lanes * step_alone_s(first_stage, BATCH // lanes, with_r=lanes == num_stages)
        with LLM(model, pp=num_stages, lanes=lanes, pp_layers=even(num_stages), **OPTIONS) as llm:
            generate_s(llm, 4)
            # What a cycle takes, prompts and the way in and out aside.
            cycle_s = (generate_s(llm, 4 + TOKENS) - generate_s(llm, 4)) / TOKENS
        slept_s = lanes * LAYER_S * SMALL["num_hidden_layers"] / num_stages
        ratio, of_sleep = cycle_s / alone_s, cycle_s / slept_s
        found.append({"stages": num_stages, "lanes": lanes, "cycle_s": cycle_s, "alone_s": alone_s,
                      "ratio": ratio, "slept_s": slept_s, "of_sleep": of_sleep})  # fmt: skip
        print(
            f"{num_stages} stages, {lanes} lanes: {cycle_s * 1e3:.1f} ms, {ratio:.2f} of the "
            f"slowest stage, {of_sleep:.2f} of what its layers sleep",
            flush=True,
        )
    return found


def step_alone_s(model: str, batch: int, *, with_r: bool) -> float:
    """Seconds that a stage needs for a lane's step when there are no others.
    ``with_r``: its R-part, too."""
    with LLM(model, lanes=1, **OPTIONS) as llm:
        generate_s(llm, 4, batch)
        steps, wait_s = llm.stats.num_steps, llm.stats.wait_s
        took_s = generate_s(llm, 4 + TOKENS, batch)
        steps, wait_s = llm.stats.num_steps - steps, llm.stats.wait_s - wait_s
    return (took_s - (0.0 if with_r else wait_s)) / steps


def even(num_stages: int) -> str:
    """Stages of as many layers each."""
    return ",".join([str(SMALL["num_hidden_layers"] // num_stages)] * num_stages)


def sleeping() -> None:
    """Every layer takes ``LAYER_S`` longer, without a core."""
    post_attention = Layer.post_attention

    def slow(self: Layer, x: Any, o: Any) -> Any:
        time.sleep(LAYER_S)
        return post_attention(self, x, o)

    Layer.post_attention = slow  # type: ignore[method-assign]


def on_the_same_cores(model: str, rounds: int) -> dict[str, Any]:
    """Tokens a second of one stage and of two, in turns."""
    shared: dict[str, Any] = {"kv_memory_gb": 0.2, "max_num_sequences": BATCH}
    speeds: dict[int, list[float]] = {1: [], 2: []}
    cpu_s: dict[int, list[float]] = {1: [], 2: []}
    with LLM(model, **shared) as one, LLM(model, **shared, pp=2) as two:
        for llm in (one, two):
            generate_s(llm, 4)
        for _ in range(rounds):
            for num_stages, llm in ((1, one), (2, two)):
                began_s = time.process_time()
                speeds[num_stages].append(BATCH * TOKENS / generate_s(llm, TOKENS))
                cpu_s[num_stages].append(time.process_time() - began_s)
    ratios = [two / one for one, two in zip(speeds[1], speeds[2], strict=True)]
    ratio = statistics.median(ratios)
    cpu_ratio = statistics.median(cpu_s[2]) / statistics.median(cpu_s[1])
    print(
        f"pp 2 against pp 1: {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), of the CPU "
        f"seconds {cpu_ratio:.2f}",
        flush=True,
    )
    return {
        "tokens_per_s": speeds,
        "ratio": ratio,
        "ratios": ratios,
        "cpu_s": cpu_s,
        "cpu_ratio": cpu_ratio,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    result: dict[str, Any] = {"provenance": provenance()}
    with tempfile.TemporaryDirectory() as directory:
        halves = {f"one of {n}": SMALL | {"num_hidden_layers": 8 // n} for n in (2, 4)}
        for name, shape in {"small": SMALL, "large": LARGE, **halves}.items():
            Path(directory, name).mkdir()
            write_checkpoint(Path(directory, name), llama_config(**shape), name)
        result["cores"] = on_the_same_cores(str(Path(directory, "large")), options.rounds)
        sleeping()
        result["cycles"] = [
            one
            for stages in (2, 4)
            for one in cycles(
                str(Path(directory, "small")), str(Path(directory, f"one of {stages}")), stages
            )
        ]
    result["load_average_after"] = provenance()["load_average"]
    keep(result, options.out)


if __name__ == "__main__":
    main()
