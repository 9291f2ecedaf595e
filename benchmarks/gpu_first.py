"""A verdict about a GPU in ten minutes: what it is (facts), whether it is right,
how fast it is, and what whole engines do. Run it by gpu_first.sh.

    benchmarks/gpu_first.sh                 the verdict, 10 minutes, no network
    benchmarks/gpu_first.sh --more          what is beside the verdict, 10 minutes more
    benchmarks/gpu_first.sh --smoke         tiny sizes, on a CPU if there is no GPU
    benchmarks/gpu_first.sh --only layers   one step, or several

Every step runs in processes of its own with a limit (gpu_ladder.py), and needs
only its own packages. The report is written after each step. The last line is

    RIGHT 67/67 · FAST 5/6 · 9:12 min · gpu_first.json

RIGHT counts checks that came out right, of all; FAST counts goals that were
met, of all. Exit code 0: all checks are right, and everything was measured
(goals may be missed); 1: something is wrong or failed; 3: something wasn't
measured, since a package or time was lacking (0 with --smoke).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_goals import goals, shown_goal
from gpu_ladder import Ladder, Outcome, Row, Step

HERE = Path(__file__).parent
_TORCH = ("torch", "numpy")
_ENGINE = (*_TORCH, "numba", "psutil")
PART_ENDS_S = {"facts": 100.0, "right": 275.0, "fast": 415.0, "engines": 580.0}
"""When each part has to be over, in seconds from the start: what comes late in
one doesn't take the next one's time. What a part leaves over the next one has."""
MORE_END_S = 580.0

STEPS = (
    Step("facts", "facts", 30),
    Step("compiled", "facts", 90, needs=_ENGINE),
    Step("copies", "right", 30, 20, _TORCH),
    Step("kernels", "right", 95, 30, _TORCH),
    Step("prompts", "right", 30, 20, _TORCH),
    Step("graphs", "right", 45, 30, _TORCH),
    Step("sampler", "right", 25, 20, _TORCH),
    Step("tokens", "right", 75, 30, _ENGINE),
    Step("ceilings", "fast", 30, needs=_TORCH),
    Step("layers", "fast", 45, needs=_TORCH),
    Step("instant", "fast", 60, needs=_TORCH),
    Step("prefill", "fast", 30, needs=_TORCH),
    Step("decode_attention", "fast", 45, needs=_TORCH),
    Step("whole_steps", "fast", 45, needs=_TORCH),
    Step("engines", "engines", 240, needs=_ENGINE),
    Step("tests", "right", 200, 60, (*_ENGINE, "pytest"), is_more=True),
    Step("sanitizer", "right", 60, 40, _TORCH, {"TORCH_CUDA_SANITIZER": "1"}, is_more=True),
    Step("all_layers", "fast", 90, needs=_TORCH, is_more=True),
    Step("staging", "fast", 30, needs=_TORCH, is_more=True),
    Step("copy_rates", "fast", 30, needs=_TORCH, is_more=True),
    Step("prompt_lengths", "fast", 40, needs=_TORCH, is_more=True),
    Step("host_turns", "fast", 90, needs=_TORCH, is_more=True),
    Step("swap", "fast", 90, needs=_TORCH, is_more=True),
    Step("more_engines", "engines", 300, needs=_ENGINE, is_more=True),
)
"""In the order of running."""


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    steps = [step for step in STEPS if step.name in options.only] or [
        step for step in STEPS if step.is_more == options.more
    ]
    report = _Report(options.out, options.smoke)
    ladder = Ladder(
        lambda step, rows, limit_s, after: _command(step, rows, limit_s, after, options.smoke),
        [sys.executable, str(HERE / "gpu_step.py"), "probe"] if has_gpu() else None,
    )
    try:
        for step in steps:
            end_s = MORE_END_S if options.more else PART_ENDS_S[step.part]
            end_s = options.limit_s if options.only else min(end_s, options.limit_s)
            report.begin(step)
            report.add(step, ladder.run(step, report.started_s + end_s))
    except KeyboardInterrupt:
        report.interrupt(steps)
    print(report.table())
    print(report.verdict())
    return report.exit_code


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on any device")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--more", action="store_true", help="what is beside the verdict")
    which.add_argument("--only", nargs="+", default=[], choices=[step.name for step in STEPS])
    parser.add_argument("--limit-s", type=float, default=580.0, help="for everything")
    parser.add_argument("--out", type=Path, help="default: gpu_first.json in benchmarks/results")
    options = parser.parse_args()
    name = "gpu_first_more.json" if options.more else "gpu_first.json"
    options.out = options.out or HERE / "results" / name
    if not options.smoke and not has_gpu():
        parser.error("no NVIDIA GPU is here: run it on a host that has one, or with --smoke")
    return options


def has_gpu() -> bool:
    """Without a package's help, which may be missing."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def _command(step: Step, rows: Path, limit_s: float, after: str | None, smoke: bool) -> list[str]:
    command = [sys.executable, str(HERE / "gpu_step.py"), step.name, "--rows", str(rows)]
    command += ["--limit-s", str(limit_s), *(["--smoke"] if smoke else [])]
    return command + (["--after", after] if after is not None else [])


class _Report:
    """What has been found so far, as JSON in a file and as text for people."""

    def __init__(self, out: Path, smoke: bool) -> None:
        self.started_s = time.monotonic()
        self._out, self._smoke = out, smoke
        self._outcomes: dict[str, tuple[Step, Outcome]] = {}

    def begin(self, step: Step) -> None:
        print(f"{step.part}: {step.name} ...", end="", flush=True)

    def add(self, step: Step, outcome: Outcome) -> None:
        self._outcomes[step.name] = (step, outcome)
        print(f" {outcome.seconds:.0f} s", *_said_of(outcome), sep="\n  ", flush=True)
        self._write()

    def interrupt(self, steps: list[Step]) -> None:
        for step in steps:
            if step.name not in self._outcomes:
                self._outcomes[step.name] = (step, Outcome(left_out=["it was interrupted"]))
        self._write()

    def _write(self) -> None:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        part = self._out.with_suffix(".part")
        part.write_text(json.dumps(self.as_json, indent=1) + "\n")
        os.replace(part, self._out)

    @property
    def as_json(self) -> Row:
        right, of = self.right
        return {
            "command": " ".join(["python", *sys.argv]),
            "commit": _commit(),
            "smoke": self._smoke,
            "seconds": round(time.monotonic() - self.started_s, 1),
            "right": {"passed": right, "of": of},
            "fast_though_not_right": right < of,
            "steps": {
                name: {"part": step.part, **outcome.as_json}
                for name, (step, outcome) in self._outcomes.items()
            },
            "goals": self.goals,
            "verdict": self.verdict(),
        }

    @property
    def rows(self) -> dict[str, list[Row]]:
        """By step."""
        return {name: outcome.rows for name, (_, outcome) in self._outcomes.items()}

    @property
    def goals(self) -> list[Row]:
        return list(goals(self.rows))

    @property
    def right(self) -> tuple[int, int]:
        """Checks that came out right, and all. A step of which no check is
        known counts as one."""
        found = [outcome for step, outcome in self._outcomes.values() if step.part == "right"]
        oks = [check.get("ok") for outcome in found for check in outcome.checks.values()]
        unknown = sum(not outcome.checks for outcome in found)
        return sum(ok is True for ok in oks), len(oks) + unknown

    @property
    def exit_code(self) -> int:
        outcomes = [outcome for _, outcome in self._outcomes.values()]
        checks = [check.get("ok") for outcome in outcomes for check in outcome.checks.values()]
        if any(outcome.failed for outcome in outcomes) or False in checks:
            return 1
        is_partial = None in checks or any(outcome.left_out for outcome in outcomes)
        return 3 if is_partial and not self._smoke else 0

    def table(self) -> str:
        """A line a row, shares of the measured ceilings beside; then goals."""
        right, of = self.right
        ceiling = {row.get("what"): row for row in self.rows.get("ceilings", [])}
        lines = []
        for name, (step, outcome) in self._outcomes.items():
            is_marked = step.part in ("fast", "engines") and right < of
            mark = "  (read with care: not all checks are right)" if is_marked else ""
            lines.append(f"\n{name}{mark}")
            lines += [f"  {_shown(_with_shares(row, ceiling))}" for row in outcome.rows]
            lines += [f"  {_shown_check(check)}" for check in outcome.checks.values()]
            lines += [f"  FAILED: {_last_line(text)}" for text in outcome.failed]
            lines += [f"  not measured: {text}" for text in outcome.left_out]
        note = " (tiny sizes: they say nothing)" if self._smoke else ""
        lines.append(f"\ngoals on an H200, what a model says, and what was measured{note}")
        lines += [f"  {shown_goal(goal)}" for goal in self.goals]
        return "\n".join(lines)

    def verdict(self) -> str:
        """The line to copy."""
        right, of = self.right
        met = sum(goal["met"] is True for goal in self.goals)
        minutes, seconds = divmod(round(time.monotonic() - self.started_s), 60)
        took = f"{minutes}:{seconds:02d} min"
        return f"RIGHT {right}/{of} · FAST {met}/{len(self.goals)} · {took} · {self._out.name}"


def _said_of(outcome: Outcome) -> Iterator[str]:
    wrong = [check for check in outcome.checks.values() if check.get("ok") is False]
    yield from (f"WRONG: {check['check']}: {_last_line(check.get('why', ''))}" for check in wrong)
    yield from (f"FAILED: {_last_line(text)}" for text in outcome.failed)
    yield from (f"not measured: {text}" for text in outcome.left_out)


def _with_shares(row: Row, ceiling: dict[Any, Row]) -> Row:
    shown = dict(row)
    if "tflops" in row and "tflops" in ceiling.get("matmul", {}):
        shown["of_matmul"] = row["tflops"] / ceiling["matmul"]["tflops"]
    if "kv_gbps" in row and "gbps" in ceiling.get("device copy", {}):
        shown["of_copy"] = row["kv_gbps"] / ceiling["device copy"]["gbps"]
    return shown


def _shown(row: Row) -> str:
    return "  ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
    )


def _shown_check(check: Row) -> str:
    word = {True: "right", False: "WRONG", None: "not run"}[check.get("ok")]
    more = {key: value for key, value in check.items() if key not in ("check", "ok", "why")}
    why = _last_line(check["why"]) if check.get("why") else ""
    return f"{word}: {check['check']}  {_shown(more)}{why}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if len(lines) < 2 else f"{lines[0].split(':')[0]}: {lines[-1]}"


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True, text=True, check=False, cwd=HERE,
        )  # fmt: skip
    except OSError:
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
