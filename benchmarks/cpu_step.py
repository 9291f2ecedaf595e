"""Python calls of one decode step on a CPU, by how many sequences decode: what no
neighbour on the machine changes.

    python benchmarks/cpu_step.py --out benchmarks/results/cpu_step.json

The model is ``gqa100m`` of ``end_to_end.py``, with an R-worker in the S-worker's
thread and no prefix cache. Functions in Python are counted apart from calls into C.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from end_to_end import MODELS, make_checkpoint
from provenance import keep, provenance

from fastdecode import LLM, SamplingParams
from fastdecode.engine.engine import Engine

NUM_SEQUENCES = (4, 128)
PROMPT_TOKENS, NEW_TOKENS, STEP = 32, 16, 10
"""The counted step is one that only decodes."""


def count_calls(model: Path, num_sequences: int) -> dict[str, int]:
    """Calls of one step, ``call`` and ``c_call``."""
    calls: Counter[str] = Counter()
    num_steps, step = 0, Engine.step

    def listen(frame: FrameType, event: str, argument: object) -> None:
        calls[event] += 1

    def counted(engine: Engine, *arguments: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        sys.setprofile(listen if num_steps == STEP else None)
        try:
            step(engine, *arguments)
        finally:
            sys.setprofile(None)

    draw = random.Random(0)
    prompts = [
        [draw.randrange(3, 8000) for _ in range(PROMPT_TOKENS)] for _ in range(num_sequences)
    ]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with (
        pytest.MonkeyPatch.context() as patch,
        LLM(str(model), dtype="bfloat16", kv_memory_gb=1, prefix_cache="off") as llm,
    ):
        patch.setattr(Engine, "step", counted)
        llm.generate(prompts, params)
    return {"sequences": num_sequences, "python": calls["call"], "c": calls["c_call"]}


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
