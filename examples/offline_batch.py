"""Offline batch generation with the Python API.

    python examples/offline_batch.py [MODEL_DIR]
    mpirun -n 3 python examples/offline_batch.py [MODEL_DIR]

The model's weights stay with the S-worker (here the CPU; ``device="cuda"`` for
a GPU); the KV cache and attention live on two R-workers: threads of this
process, or with mpirun the other ranks.
"""

import sys
from pathlib import Path

from fastdecode import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "model" / "checkpoint")
PROMPTS = [
    "Once upon a time there was a baker who",
    "The old map showed",
    "",  # a bad prompt gets an error of its own; the others go on
]


def main() -> None:
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=40)
    with LLM(MODEL, r_workers=2) as llm:
        for output in llm.generate(PROMPTS, params, progress=True):
            if output.error is not None:
                print(f"[{output.request_id}] failed: {output.error}")
            else:
                print(f"[{output.request_id}] {output.prompt}{output.text}")


if __name__ == "__main__":
    main()
