"""The S-part on a GPU against what the GPU can do: matmul rate, copies,
launches; then engines end to end.

    benchmarks/gpu_suite.sh [--smoke]               tests, then this, --call measure
    benchmarks/gpu_suite.sh [--smoke] --end-to-end  whole engines
    benchmarks/gpu_suite.sh [--smoke] --more        what later design hangs on

Every section (gpu_sections.py) runs in a process of its own with a time limit:
whatever goes wrong in one costs no other its results. Goals (H200): an S-step
of 256 rows or more at 60% of the matmul rate; less than 15 us of launches a
layer with graphs; steps at most 1.1 times the S-part if R-workers answer at
once; prefill of 2k prompts at 50% of the matmul rate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from device_goals import figures
from gpu_end_to_end import BOTH_SIDES, ON_GPU

from fastdecode.core.host.facts import lacks_for_triton
from fastdecode.core.host.machine import this_machine
from sworker.graphs import MAX_GRAPH_ROWS

LIMITS_S = {
    "ceilings": 40,
    "layers": 60,
    "instant": 60,
    "prefill": 50,
    "staging": 30,
    "decode_attention": 40,
    "whole_steps": 60,
    "copies": 30,
    "prompt_lengths": 40,
    "host_turns": 90,
    "swap": 90,
    "end_to_end": 565,
}
"""Of each section, in the order of running."""
_MORE = ("copies", "prompt_lengths", "host_turns", "swap")
CALLS = {
    "measure": tuple(name for name in LIMITS_S if name not in (*_MORE, "end_to_end")),
    "end-to-end": ("end_to_end",),
    "more": _MORE,
}
"""Sections that are run together, in one call of gpu_suite.sh."""
CALL_LIMIT_S = 570.0
Report = dict[str, Any]


def run_section(
    section: str, *, smoke: bool, limit_s: float
) -> tuple[list[dict[str, Any]], str | None]:
    """Its rows, and what went wrong, if something did."""
    if limit_s < 1:
        return [], "no time was left"
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory, "rows.jsonl")
        rows.touch()
        command = [
            sys.executable,
            str(Path(__file__).with_name("gpu_sections.py")),
            section,
            "--rows",
            str(rows),
        ]
        # It is told of a nearer end than it has, so that it can still say what it left out.
        command += ["--limit-s", str(0.9 * limit_s), *(["--smoke"] if smoke else [])]
        failure = _run(command, limit_s)
        return list(_whole_rows(rows.read_text())), failure


def _run(command: list[str], limit_s: float) -> str | None:
    """What went wrong, if something did. Nothing that the command started outlives it."""
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        ) as process,
    ):
        try:
            exit_code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"took more than {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):  # none is left
                os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        return (
            f"exit code {exit_code}: {errors.read().decode(errors='replace').strip()[-2000:]}"
            if exit_code
            else None
        )


def _whole_rows(text: str) -> Iterator[dict[str, Any]]:
    """Who was killed while writing leaves half a line."""
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes, on a CPU if there is no GPU"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--sections", nargs="+", choices=LIMITS_S, default=list(LIMITS_S))
    which.add_argument("--call", choices=CALLS, help="the sections of a call of gpu_suite.sh")
    parser.add_argument(
        "--limit-s", type=float, default=CALL_LIMIT_S, help="for all sections together"
    )
    parser.add_argument("--tests-exit-code", type=int, help="of the GPU tests, to be noted")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.smoke:
        parser.error("torch sees no CUDA device: run it with --smoke, or on a machine with a GPU")
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    report: Report = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit.stdout.strip(),
        "machine": asdict(
            this_machine(name, ("torch", "triton", "numpy", "numba", "transformers"))
        ),
        "smoke": options.smoke,
        "tests_exit_code": options.tests_exit_code,
        "sections": {},
        "failed": {},
    }
    until_s = time.monotonic() + options.limit_s
    if lacks := lacks_for_triton():
        report["failed"]["Triton's kernels"] = [lacks]
        print(f"Triton's kernels can't be built: {lacks}", flush=True)
    for section in CALLS[options.call] if options.call else options.sections:
        started = time.monotonic()
        limit_s = min(LIMITS_S[section], until_s - started)
        rows, failure = (
            ([], "no time was left")
            if limit_s < 1
            else run_section(section, smoke=options.smoke, limit_s=limit_s)
        )
        report["sections"][section] = rows
        failures = [failure] if failure else []
        failures += [str(row["error"]) for row in rows if "error" in row]
        if failures:
            report["failed"][section] = failures
        print(
            f"{section}: {len(rows)} rows in {time.monotonic() - started:.0f} s",
            *failures,
            sep="\n  ",
            flush=True,
        )
        if options.out is not None:
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    report["goals"] = list(goals(report["sections"]))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(summary(report))
    return 1 if report["failed"] else 0


def goals(sections: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """What was aimed at on an H200, and the worst that was measured of it."""
    matmul = next(
        (row["tflops"] for row in sections.get("ceilings", []) if row["what"] == "matmul"), None
    )

    def worst(
        section: str, key: str, pick: Callable[..., float], where: Callable[[dict[str, Any]], bool]
    ) -> Any:
        found = [row[key] for row in sections.get(section, []) if key in row and where(row)]
        return pick(found) if found else None

    def of_matmul(tflops: float | None) -> float | None:
        return None if tflops is None or matmul is None else tflops / matmul

    def is_large_step(row: dict[str, Any]) -> bool:
        how = "graph" if row["rows"] <= MAX_GRAPH_ROWS else "eager"  # as an engine runs it
        return bool(row["model"] == "8b" and row["rows"] >= 256 and row["how"] == how)

    s_step = worst("layers", "tflops", min, is_large_step)
    prompts = worst("prefill", "tflops", min, lambda row: row["tokens"] == 2048)
    graphs = worst("layers", "host_us", max, lambda row: row["how"] == "graph")
    instant = worst(
        "instant", "ratio", max, lambda row: row["lanes"] == 2 and row["rows_a_lane"] >= 256
    )
    alone, short = both_sides(sections.get("end_to_end", []))
    says = _models()
    for goal, least, most, model, found in (
        (
            "8B S-step of 256 rows or more, of the matmul rate",
            0.6,
            None,
            says["s_step"],
            of_matmul(s_step),
        ),
        (
            "step of 2 lanes of 256 rows if R-workers answer at once, of the S-part",
            None,
            1.1,
            says["instant"],
            instant,
        ),
        ("the host's microseconds a layer with graphs", None, 15.0, says["launches"], graphs),
        (
            "prefill of 2k prompts, of the matmul rate",
            0.5,
            None,
            says["prefill"],
            of_matmul(prompts),
        ),
        ("KV on both sides, all of it on the GPU: of the GPU alone", 0.99, None, "1", alone),
        ("KV on both sides, a tenth of it on the GPU: of the GPU alone", 1.0, None, "1.4", short),
        (
            "step of a lane that is swapped, of the longer of computing and copying",
            None,
            1.15,
            "1",
            worst("swap", "of_the_longer", max, lambda row: True),
        ),
        ("vLLM's decode rate, of the GPU's alone", None, 1.3, "none", None),
    ):
        is_met = (
            None
            if found is None
            else (least is None or found >= least) and (most is None or found <= most)
        )
        bounds = {"at_least": least, "at_most": most}
        yield {"goal": goal, **bounds, "model": model, "measured": found, "met": is_met}


def _models() -> dict[str, str]:
    """What a model says (device_goals.py)."""
    found = figures()
    return {
        "s_step": f"{found['s_step_share_256']:.2f}",
        "instant": f"{found['instant_ratio_2_lanes']:.2f}",
        "launches": f"{found['launches_us_best']:.0f}-{found['launches_us_worst']:.0f}",
        "prefill": f"{found['prefill_share']:.2f}",
    }


def both_sides(rows: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    """Tokens a second with KV on both sides over those of the GPU alone: the
    least where the GPU has all of its memory, and the least where it is
    short."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if "tokens_per_s" in row:
            case = (row["requests"], row["prompt"], row["new"], row.get("gpu_fraction"))
            found.setdefault(case, {})[row["engine"]] = row["tokens_per_s"]
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for case, rates in found.items():
        if BOTH_SIDES in rates and ON_GPU in rates:
            ratios[case[-1] is not None].append(rates[BOTH_SIDES] / rates[ON_GPU])
    return min(ratios[False], default=None), min(ratios[True], default=None)


def summary(report: Report) -> str:
    """One table a section, shares of the measured ceilings beside; then goals and failures."""
    ceiling = {row["what"]: row for row in report["sections"].get("ceilings", [])}
    lines = []
    for section, rows in report["sections"].items():
        lines.append(f"\n{section}")
        for row in rows:
            shown = dict(row)
            if "tflops" in row and "matmul" in ceiling:
                shown["of_matmul"] = row["tflops"] / ceiling["matmul"]["tflops"]
            if "kv_gbps" in row and "device copy" in ceiling:
                shown["of_copy"] = row["kv_gbps"] / ceiling["device copy"]["gbps"]
            lines.append("  " + _shown(shown))
    note = " (tiny sizes: they say nothing)" if report["smoke"] else ""
    lines.append(f"\ngoals on an H200, what a model says, and what was measured{note}")
    lines += [f"  {_goal(goal)}" for goal in report["goals"]]
    if report["tests_exit_code"]:
        lines.append(f"\nFAILED: tests (exit code {report['tests_exit_code']})")
    lines += [
        f"\nFAILED: {section}: {failures[0].splitlines()[-1]}"
        for section, failures in report["failed"].items()
    ]
    return "\n".join(lines)


def _goal(goal: dict[str, Any]) -> str:
    """The goal beside what was measured of it."""
    least, most, found = goal["at_least"], goal["at_most"], goal["measured"]
    bound = f">= {least:g}" if most is None else f"<= {most:g}"
    measured = "not measured in this call" if found is None else f"measured {found:.3g}"
    verdict = {None: "", True: ": met", False: ": MISSED"}[goal["met"]]
    return f"{goal['goal']}: {bound}  model {goal['model']}  {measured}{verdict}"


def _shown(row: dict[str, Any]) -> str:
    return "  ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
    )


if __name__ == "__main__":
    sys.exit(main())
