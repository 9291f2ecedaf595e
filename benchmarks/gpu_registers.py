"""What Triton's attention kernels take on GPUs that are not here: they are compiled
with ptxas for each compute capability, from the calls that the engine makes, and
registers, spilled bytes and shared memory are read from the machine code. Nothing is run.

Usage: python benchmarks/gpu_registers.py [--capabilities 86 90 100] [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "tests/sworker")]

import torch  # noqa: E402
import triton  # noqa: E402
from provenance import provenance  # noqa: E402

from fastdecode.core.spec import AttentionSpec  # noqa: E402

GROUPS = (1, 4, 8, 32)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def rows_of(capability: int, head_dims: list[int], directory: Path) -> Iterator[dict[str, Any]]:
    """One for each kernel, dtype, KV dtype, head dim and group."""
    compiles = importlib.import_module("test_triton_compiles")
    driver = importlib.import_module("triton.runtime.driver").driver
    paged = importlib.import_module("sworker.kernels.paged_triton")
    compiles.forget(paged)
    gpu = compiles.NoGpu(directory, capability)
    driver.set_active(gpu)
    paged._shared_memory = lambda device: compiles.SHARED_MEMORY[capability]
    for name, dtype in DTYPES.items():
        for is_int8 in (False, True):
            for head_dim in head_dims:
                for group in GROUPS:
                    gpu.compiled.clear()
                    spec = AttentionSpec(2 * group, 2, head_dim, 0.1)
                    cache = compiles.Cache(spec, dtype, is_int8)
                    for block_size in (16, 64):
                        cache.decode(block_size)
                    cache.attend_chunk()
                    cache.store()
                    for code in gpu.compiled:
                        yield {
                            "sm": capability,
                            "kernel": code.name,
                            "dtype": name,
                            "kv": "int8" if is_int8 else name,
                            "head_dim": head_dim,
                            "group": group,
                            "registers": code.registers,
                            "spilled_bytes": code.stack_bytes,
                            "shared_bytes": code.shared_bytes,
                        }


def table_of(rows: list[dict[str, Any]]) -> str:
    """For each card and KV dtype: the greatest of each figure of the attention kernels."""
    lines = [
        "| sm | KV | head dim | registers | shared KiB | spilled bytes |",
        "|---|---|---|---|---|---|",
    ]
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["kernel"] == "_attend":
            kv = "int8" if row["kv"] == "int8" else "16 bits"
            found.setdefault((row["sm"], kv, row["head_dim"]), []).append(row)
    for key, of_key in sorted(found.items()):
        least, most = (f(row["registers"] for row in of_key) for f in (min, max))
        shared = max(row["shared_bytes"] for row in of_key) / 1024
        spilled = max(row["spilled_bytes"] for row in of_key)
        cells = (*key, f"{least} to {most}", f"{shared:.0f}", spilled)
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--capabilities", type=int, nargs="+", default=[86, 90, 100])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 80, 96, 128])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for capability in options.capabilities:
            place = Path(directory) / str(capability)
            place.mkdir()
            rows += rows_of(capability, options.head_dims, place)
    print(table_of(rows))
    num_spilling = sum(row["spilled_bytes"] > 0 for row in rows)
    print(f"{len(rows)} kernels compiled with Triton {triton.__version__}; {num_spilling} spill")
    if options.out is not None:
        record = {**provenance(), "triton": triton.__version__, "kernels": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
