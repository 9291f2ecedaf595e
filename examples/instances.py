"""Prefill and decode on engines of their own (the split of DistServe).

    python examples/instances.py [MODEL_DIR]

Prompts run on the prefill instance. The decode instance fetches their K and V
and goes on, so no prompt delays a token. Here both are threads of one process;
``fastdecode instance`` runs them as processes, on this host or on others.
"""

import sys
from pathlib import Path

from fastdecode import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "model" / "checkpoint")
PROMPTS = ["Once upon a time", "The old map showed", "On a stormy night", "Gusster was a pony"]
PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=30)


def main() -> None:
    with LLM(MODEL, instances=["prefill", "decode"]) as llm:
        for output in llm.generate(PROMPTS, PARAMS):
            print(f"{output.prompt}{output.text}")
        print(f"prompts fetched by the decode instance: {llm.stats.num_handed_over}")


if __name__ == "__main__":
    main()
