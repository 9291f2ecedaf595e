"""The papers' whole systems, one configuration each.

    python examples/systems.py [MODEL_DIR]

Every system continues the same prompts, and says what a plain engine says. Here
the R-workers are threads and a device is the CPU. With GPUs, stages and prompt
stages take one each. Two systems have several S-workers that act as one
(tensor parallelism), which are ranks of an MPI job. That prints what it says, and a
plain engine says the same:

    mpirun -n 2 python examples/systems.py --of "Pensieve with tensor parallelism"
    mpirun -n 7 python examples/systems.py --of DistServe
    python examples/systems.py --of plain

Hybrid KV in int8, behind a server: ``fastdecode serve MODEL_DIR --kv-placement hybrid
--kv-dtype int8 --prefix-cache on --r-workers 2 --replicas 1``. There devices and
R-workers round differently, so a token may depend on where it was computed.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from fastdecode import LLM, SamplingParams

MODEL = str(Path(__file__).parent / "model" / "checkpoint")
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


def jobs() -> dict[str, dict[str, Any]]:
    """Only of systems that are MPI jobs."""
    device = {"kv_placement": "gpu", "prefix_cache": "on", "cache_memory_gb": 0.1}
    return {
        "plain": {},
        "Pensieve with tensor parallelism": {**device, "tp": 2},
        "DistServe": {"instances": ["prefill:1:tp=2", "decode:1:tp=2"]},
    }


def texts(model: str, **options: Any) -> list[str]:
    given = {"dtype": "float32", **options}
    if given.get("kv_placement") != "gpu":
        given["kv_memory_gb"] = 0.05
    with LLM(model, **given) as llm:
        return [output.text for output in llm.generate(PROMPTS, PARAMS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("--of", choices=jobs(), help="say what this one says")
    given = parser.parse_args()
    if given.of:
        print("\n".join(texts(given.model, **jobs()[given.of])))
        return
    plain = texts(given.model)
    with tempfile.TemporaryDirectory() as disk:
        for name, options in systems(disk).items():
            is_equal = texts(given.model, **options) == plain
            print(f"{name} says what a plain engine says: {is_equal}")


if __name__ == "__main__":
    main()
