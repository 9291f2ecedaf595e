"""Pipeline stages, with R-workers of their own, inside one process.

    python examples/stages.py [MODEL_DIR]

``pp=2`` puts half of the layers on each of two S-workers; each stage has its
own R-workers. With GPUs each stage takes one. As ranks of an MPI job it is
``mpirun -n 4 fastdecode generate --pp 2 …`` (two stages, two R-workers).
"""

import sys
from pathlib import Path

from fastdecode import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "model" / "checkpoint")
PROMPTS = ["Once upon a time", "The old map showed", "On a stormy night", "Gusster was a pony"]
PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=30)


def texts(**options: int) -> list[str]:
    with LLM(MODEL, **options) as llm:
        return [output.text for output in llm.generate(PROMPTS, PARAMS)]


def main() -> None:
    one, two = texts(r_workers=1), texts(pp=2, r_workers=2)
    for prompt, text in zip(PROMPTS, two, strict=True):
        print(f"{prompt}{text}")
    print(f"two stages say what one says: {one == two}")


if __name__ == "__main__":
    main()
