"""Python calls of one decode step on a CPU, by how many sequences decode: what no
neighbour on the machine changes.

    python benchmarks/cpu_step.py --out benchmarks/results/cpu_step.json

The model is ``gqa100m`` of ``end_to_end.py``, with an R-worker in the S-worker's
thread and no prefix cache. Functions in Python are counted apart from calls into C.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from functools import partial
from pathlib import Path

import pytest
from end_to_end import MODELS, make_checkpoint
from host_loop import calls_of
from provenance import keep, provenance

from fastdecode import LLM, SamplingParams
from fastdecode.engine.engine import Engine

NUM_SEQUENCES = (4, 128)
PROMPT_TOKENS, NEW_TOKENS, STEP = 32, 16, 10
"""The counted step is one that only decodes."""


def count_calls(model: Path, num_sequences: int) -> dict[str, int]:
    """Calls of one step, in Python and in C."""
    calls: list[tuple[int, int]] = []
    run_step = Engine.step

    def step(engine: Engine) -> None:
        calls.append(calls_of(partial(run_step, engine)))

    draw = random.Random(0)
    prompts = [
        [draw.randrange(3, 8000) for _ in range(PROMPT_TOKENS)] for _ in range(num_sequences)
    ]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with (
        pytest.MonkeyPatch.context() as patch,
        LLM(str(model), dtype="bfloat16", kv_memory_gb=1, prefix_cache="off") as llm,
    ):
        patch.setattr(Engine, "step", step)
        llm.generate(prompts, params)
    in_python, in_c = calls[STEP - 1]
    return {"sequences": num_sequences, "python": in_python, "c": in_c}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoint(Path(directory), MODELS["gqa100m"])
        rows = [count_calls(Path(directory), number) for number in NUM_SEQUENCES]
    for row in rows:
        print(f"{row['sequences']} sequences: {row['python']} Python functions, {row['c']} in C")
    keep({"rows": rows, "provenance": provenance()}, args.out)


if __name__ == "__main__":
    main()
