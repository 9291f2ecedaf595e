"""The KV cache on the device first, and on R-workers what it has no room for.

    python examples/hybrid.py [MODEL_DIR]

The device here is the CPU with 4 MB for KV, so that the example runs anywhere;
with a GPU give ``device="cuda"`` and leave ``device_kv_gb`` out. A rule decides
for every request where its KV goes, by when all known work would be done. Where
both sides share the same cores, as here, R-workers do not pay, and it keeps
every step on the device.
"""

import sys
from pathlib import Path

from fastdecode import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "model" / "checkpoint")
PROMPTS = [f"Once upon a time there were {number} ponies" for number in range(2, 34)]
PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=80, ignore_eos=True)


def main() -> None:
    with LLM(MODEL, kv_placement="hybrid", device_kv_gb=0.004, r_workers=1) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        hybrid = llm.stats.hybrid
    print(f"{sum(output.ok for output in outputs)} of {len(PROMPTS)} answered")
    if hybrid is not None:
        print(f"steps by placement: {dict(hybrid.steps)}")


if __name__ == "__main__":
    main()
