"""What is aimed at on an H200, what a model says of it, and the worst that was
measured: used by gpu_first.py. Needs nothing but Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]
ON_GPU, BOTH_SIDES, R_WORKERS = "KV on the GPU", "KV on both sides", "R-workers"
MAX_GRAPH_ROWS = 512
"""As ``sworker.graphs`` has it: steps of more rows run as they are."""
GOALS = {
    "8B S-step of 256 rows or more, of the matmul rate": (0.6, None, "0.61"),
    "step of 2 lanes of 256 rows if 1, 4 or 16 R-workers answer at once, of the S-part": (
        None, 1.1, "1.00 with 1 R-worker",
    ),
    "the host's microseconds a layer with graphs": (None, 15.0, "8-11"),
    "prefill of 2k prompts, of the matmul rate": (0.5, None, "0.78"),
    "KV on both sides, all of it on the GPU: of the GPU alone": (0.99, None, "1"),
    "KV on both sides, a tenth of it on the GPU: of the GPU alone": (1.0, None, "1.4"),
    "step of a lane that is swapped, of the longer of computing and copying": (None, 1.15, "1"),
}  # fmt: skip
"""At least, at most, and what a model says."""
_OF_MORE = "step of a lane that is swapped"
"""Measured by --more only."""


def goals(steps: dict[str, list[Row]]) -> Iterator[Row]:
    """A row for each goal.

    Args:
        steps: rows of measurements by the step that made them. What went wrong
            has no rates in its row.
    """
    is_more = "swap" in steps
    for (goal, (least, most, model)), found in zip(GOALS.items(), _measured(steps), strict=True):
        if goal.startswith(_OF_MORE) != is_more:
            continue
        is_met = (
            None
            if found is None
            else (least is None or found >= least) and (most is None or found <= most)
        )
        bounds = {"at_least": least, "at_most": most}
        yield {"goal": goal, **bounds, "model": model, "measured": found, "met": is_met}


def _measured(steps: dict[str, list[Row]]) -> Iterator[float | None]:
    """What was found of each goal; None: it wasn't measured."""
    matmul = next(
        (row.get("tflops") for row in steps.get("ceilings", []) if row.get("what") == "matmul"),
        None,
    )

    def worst(
        step: str,
        key: str,
        pick: Callable[..., float],
        where: Callable[[Row], bool] = lambda row: True,
    ) -> float | None:
        rows = [row for row in steps.get(step, []) if where(row)]
        found = [row[key] for row in rows if key in row]
        return pick(found) if found and len(found) == len(rows) else None

    def of_matmul(tflops: float | None) -> float | None:
        return None if tflops is None or matmul is None else tflops / matmul

    yield of_matmul(worst("layers", "tflops", min, _is_large_step))
    yield worst("instant", "ratio", max, _is_large_batch)
    yield worst("layers", "host_us", max, lambda row: row.get("how") == "graph")
    yield of_matmul(worst("prefill", "tflops", min, lambda row: row.get("tokens") == 2048))
    yield from both_sides(steps.get("engines", []))
    yield worst("swap", "of_the_longer", max, lambda row: row.get("kv") == "swapped")


def _is_large_step(row: Row) -> bool:
    rows = row.get("rows", 0)
    how = "graph" if rows <= MAX_GRAPH_ROWS else "eager"  # as an engine runs it
    return row.get("model") == "8b" and rows >= 256 and row.get("how") == how


def _is_large_batch(row: Row) -> bool:
    return row.get("lanes") == 2 and row.get("rows_a_lane", 0) >= 256


def both_sides(rows: list[Row]) -> tuple[float | None, float | None]:
    """Tokens a second with KV on both sides over those of the GPU alone: the
    least where all KV fits on the GPU, and the least where a part of it does."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if "tokens_per_s" in row:
            case = (row["requests"], row["prompt"], row["new"], row.get("asked_kv_share"))
            found.setdefault(case, {})[row["engine"]] = row["tokens_per_s"]
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for case, rates in found.items():
        if BOTH_SIDES in rates and ON_GPU in rates:
            ratios[case[-1] is not None].append(rates[BOTH_SIDES] / rates[ON_GPU])
    return min(ratios[False], default=None), min(ratios[True], default=None)


def shown_goal(goal: Row) -> str:
    """The goal beside what was measured of it."""
    least, most, found = goal["at_least"], goal["at_most"], goal["measured"]
    bound = f">= {least:g}" if most is None else f"<= {most:g}"
    measured = "not measured" if found is None else f"measured {found:.3g}"
    verdict = {None: "", True: ": met", False: ": MISSED"}[goal["met"]]
    return f"{goal['goal']}: {bound}  model {goal['model']}  {measured}{verdict}"
