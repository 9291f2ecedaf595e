"""The papers' whole systems, one configuration each.

    python examples/systems.py [MODEL_DIR]

Every system continues the same prompts, and says what a plain engine says. Here
the R-workers are threads and a device is the CPU. With GPUs, stages and prompt
stages take one each. Hybrid KV takes ``kv_dtype="int8"``, too, but devices and
R-workers round that differently. Two systems are MPI jobs, as tensor parallelism is:

* Pensieve on two devices: ``mpirun -n 2 fastdecode generate --tp 2 --kv-placement
  gpu --prefix-cache on --cache-memory-gb 8 ...``
* DistServe: ``mpirun -n 7 fastdecode generate --instances
  prefill:1:tp=2,decode:1:tp=2 ...``
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from fastdecode import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "model" / "checkpoint")
PROMPTS = ["Once upon a time", "The old map showed", "On a stormy night", "Gusster was a pony"]
PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=20, ignore_eos=True)


def systems(disk: str) -> dict[str, dict[str, Any]]:
    """Options by name. ``disk``: a directory for kept KV blocks."""
    device = {"kv_placement": "gpu", "prefix_cache": "on", "cache_memory_gb": 0.1}
    kept_twice = {"prefix_cache": "on", "r_workers": 2, "replicas": 1}
    return {
        "DejaVu": {"pp": 2, "prompt_pp": 1, "r_workers": 2, "replicas": 1},
        "DejaVu on devices": {
            "pp": 3, "kv_placement": "swap", "replicas": 1, "kv_memory_gb": 0.02,
        },
        "Pensieve + DejaVu": {**kept_twice, "cache_disk": disk, "cache_disk_gb": 0.1},
        "Pensieve on two devices": {**device, "pp": 2},
        "hybrid KV": {**kept_twice, "kv_placement": "hybrid", "device_kv_gb": 0.004},
        "FastDecode's schedule": {"prompt_pp": 1, "schedule": "stabilized"},
    }  # fmt: skip


def texts(**options: Any) -> list[str]:
    given = {"dtype": "float32", **options}
    if given.get("kv_placement") != "gpu":
        given["kv_memory_gb"] = 0.05
    with LLM(MODEL, **given) as llm:
        return [output.text for output in llm.generate(PROMPTS, PARAMS)]


def main() -> None:
    plain = texts()
    with tempfile.TemporaryDirectory() as disk:
        for name, options in systems(disk).items():
            print(f"{name} says what a plain engine says: {texts(**options) == plain}")


if __name__ == "__main__":
    main()
