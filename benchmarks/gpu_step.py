"""A step of gpu_first.py, in its own process; gpu_ladder.py says what it writes.

python benchmarks/gpu_step.py STEP --rows FILE [--limit-s N] [--after CHECK] [--smoke]
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAKERS = {
    "facts": "gpu_facts:facts",
    "compiled": "gpu_engines:compile_kernels",
    "copies": "gpu_right:copies",
    "kernels": "gpu_right:kernels",
    "prompts": "gpu_right:prompts",
    "graphs": "gpu_right:graphs",
    "sampler": "gpu_right:sampler",
    "tokens": "gpu_right:tokens",
    "sanitizer": "gpu_right:ordered",
    "tests": "gpu_tests:tests",
    "ceilings": "gpu_fast:ceilings",
    "layers": "gpu_fast:layers",
    "all_layers": "gpu_fast:all_layers",
    "instant": "gpu_fast:instant",
    "prefill": "gpu_fast:prefill",
    "decode_attention": "gpu_fast:decode_attention",
    "whole_steps": "gpu_fast:whole_steps",
    "staging": "gpu_fast:staging",
    "copy_rates": "gpu_fast:copy_rates",
    "prompt_lengths": "gpu_fast:prompt_lengths",
    "host_turns": "gpu_fast:host_turns",
    "swap": "gpu_swap:swap",
    "engines": "gpu_engines:engines",
    "more_engines": "gpu_engines:more_engines",
}
"""Step → what makes its checks (a list), or its rows (a generator)."""
_OF_ENGINES = ("tokens", "tests")
_LEAST_S = 1.0
Write = Callable[[dict[str, Any]], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("step", choices=[*MAKERS, "probe"])
    parser.add_argument("--rows", type=Path, help="append a line of JSON for each row")
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--after", help="go on behind this check")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.step == "probe":
        return _probe()
    module, name = MAKERS[options.step].split(":")
    with options.rows.open("a") as out:

        def write(row: dict[str, Any]) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()

        make = getattr(importlib.import_module(module), name)
        until_s = time.monotonic() + options.limit_s
        if options.step == "facts":  # needs no package
            for row in make(options.smoke):
                write(row)
            return 0
        is_of_engines = options.step in _OF_ENGINES
        return _run(make, options.smoke, until_s, options.after, write, is_of_engines=is_of_engines)


def _probe() -> int:
    """Whether the GPU computes."""
    import torch

    return 0 if int(torch.ones(2, device="cuda").sum()) == 2 else 1


def _run(
    make: Callable[..., Any],
    smoke: bool,
    until_s: float,
    after: str | None,
    write: Write,
    *,
    is_of_engines: bool,
) -> int:
    import torch
    from gpu_setup import Check, Setup

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif not smoke:
        raise SystemExit("torch sees no CUDA device: is it built for CUDA, and for this driver?")
    # Engines have threads of their own, and say themselves where they infer.
    with torch.inference_mode(not is_of_engines):
        made = make(Setup(device, torch.bfloat16, smoke, until_s))
        if isinstance(made, list) and all(isinstance(each, Check) for each in made):
            return run_checks(made, after, until_s, write)
        for row in made:
            write(row)
    return 0


def run_checks(checks: list[Any], after: str | None, until_s: float, write: Write) -> int:
    """Make the checks behind ``after``. The first one that raises is the last:
    the device may be of no use any more to this process."""
    from gpu_setup import UnavailableError

    names = [check.name for check in checks]
    write({"plan": names})
    for check in checks[0 if after is None else names.index(after) + 1 :]:
        if time.monotonic() > until_s - _LEAST_S:
            write({"check": check.name, "ok": None, "why": "no time was left"})
            continue
        write({"begin": check.name})
        row: dict[str, Any] = {"check": check.name}
        try:
            found = check.run()
        except UnavailableError as lacking:
            write({**row, "ok": None, "why": str(lacking)})
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:2000]
            write({**row, "ok": False, "why": why})
            return 1
        else:
            error = found.max_error if math.isfinite(found.max_error) else str(found.max_error)
            why = {} if found.is_right else {"why": f"off by {error}, at most {found.bound:g} is"}
            write({**row, "ok": found.is_right, "max_error": error, "bound": found.bound, **why})
    return 0


if __name__ == "__main__":
    sys.exit(main())
