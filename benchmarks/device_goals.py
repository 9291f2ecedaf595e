"""What models say of the goals on a GPU, as docs/evidence/device_checks.md has it.

    python benchmarks/device_goals.py --out benchmarks/results/device_goals.json

Llama-3 8B in bfloat16 on an H200, kernel by kernel (``cost_model/device_model.py``),
and KV on both sides from what ``hybrid_grid.py`` has kept. Nothing of it was
measured on a GPU. With ``--page``, the rows are put into that page, in the place
of those that are there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from provenance import provenance

from cost_model.device_model import DeviceModel
from cost_model.shapes import model_named
from cost_model.workload import TokenCosts
from fastdecode.core.dtype import DType

GRID = Path(__file__).parent / "results" / "hybrid_grid.json"
CONTEXT = 1024
PROMPT = 2048


def figures() -> dict[str, float]:
    """What is asked for, and what the model says of it."""
    spec = model_named("Llama-3 8B")
    model = DeviceModel(spec, TokenCosts(spec, DType.BFLOAT16, "bfloat16"))
    warm, cold = model.instant_ratio(2, 256)
    best_s, worst_s = model.launches_s()
    return {
        "s_step_share_256": model.s_step_share(256),
        "s_step_share_512": model.s_step_share(512),
        "unit_us_256": model.unit_s(256) * 1e6,
        "instant_ratio_2_lanes": warm,
        "instant_ratio_2_lanes_cold_copy": cold,
        "instant_ratio_1_lane": model.instant_ratio(1, 256)[0],
        "launches_us_best": best_s * 1e6,
        "launches_us_worst": worst_s * 1e6,
        "prefill_share": model.prefill_share(PROMPT),
        "decode_over_floor_64": model.decode_over_floor(64, CONTEXT),
        "decode_over_floor_256": model.decode_over_floor(256, CONTEXT),
    }


def lines(found: dict[str, float]) -> list[str]:
    """Rows of the table: the goal, the model's figure, whether that is enough."""
    f = found
    return [
        "| S-step of 256 rows at 60% of the matmul rate | "
        f"{f['s_step_share_256']:.0%} (a unit takes {f['unit_us_256']:.0f} us); "
        f"{f['s_step_share_512']:.0%} of 512 rows | met, narrowly |",
        "| a step of two lanes at most 1.1 x the S-part, if R-workers answer at once | "
        f"{f['instant_ratio_2_lanes']:.2f} (one lane: {f['instant_ratio_1_lane']:.1f}); "
        f"{f['instant_ratio_2_lanes_cold_copy']:.1f} where answers are copied on the host, out "
        "of its memory, as over ZeroMQ | met where they aren't |",
        "| launches under 15 us a layer | "
        f"{f['launches_us_best']:.0f}-{f['launches_us_worst']:.0f} us | met |",
        f"| prompts of 2,048 tokens at 50% of the matmul rate | {f['prefill_share']:.0%} | met |",
        "| decode with KV on the GPU within 1.3 x of vLLM at 64 and 256 sequences | nothing is "
        "known of vLLM; over what products and KV take at least, at the best rates: "
        f"{f['decode_over_floor_64']:.2f} x at 64, {f['decode_over_floor_256']:.2f} x at 256 "
        f"({CONTEXT:,} tokens each) | met at 64, and at 256 unless vLLM comes within "
        f"{f['decode_over_floor_256'] / 1.3 - 1:.0%} of that |",
    ]


def grid_lines(cells: list[dict[str, Any]]) -> list[str]:
    """A row for each context and demand; ratios by R-workers."""
    found = ["| context | asked for | 1 R-worker | 4 R-workers |", "|---|---|---|---|"]
    for context, demand in dict.fromkeys((row["context"], row["demand"]) for row in cells):
        of_cell = [row for row in cells if (row["context"], row["demand"]) == (context, demand)]
        asked = "all fits" if demand == 1 else f"{demand:g} x"
        shown = " | ".join(_cell(of_cell, num) for num in (1, 4))
        found.append(f"| {context:,} | {asked} | {shown} |")
    return found


def _cell(rows: list[dict[str, Any]], num_r_workers: int) -> str:
    rows = [row for row in rows if row["r_workers"] == num_r_workers]
    by_arrivals = {row["arrivals"]: row for row in rows}
    at_once, at_random = by_arrivals["at once"], by_arrivals["random"]
    off = at_once["ratio_costs_off"]
    steady = at_once["steady"]["ratio"]
    return f"{at_once['ratio']:.2f}, {at_random['ratio']:.2f}, {off:.2f}; {steady:.2f}"


def put_into(page: str, tables: list[list[str]]) -> str:
    """The page with these rows, each table in the place of the one whose first
    cell its first row has."""
    found = page.split("\n")
    for rows in tables:
        head = rows[0].split("|")[1]
        first = next(i for i, line in enumerate(found) if line.startswith(f"|{head}|"))
        end = first
        while found[end].startswith("|") and end < first + len(rows):
            end += 1
        found[first:end] = rows
    return "\n".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="docs/evidence/device_checks.md")
    options = parser.parse_args()
    found = figures()
    tables = [lines(found)]
    if GRID.exists():
        tables.append(grid_lines(json.loads(GRID.read_text("utf-8"))["cells"]))
    print("\n".join(line for rows in tables for line in rows))
    if options.page is not None:
        page = put_into(options.page.read_text("utf-8"), tables)
        options.page.write_text(page, "utf-8")
    if options.out is not None:
        text = json.dumps({"provenance": provenance(), "figures": found}, indent=1)
        options.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
