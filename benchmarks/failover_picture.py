"""Draw tokens a second through a failure as SVG: without replicas, with them, and
where nothing happens.

    python benchmarks/failover_picture.py benchmarks/results/failover.json --out
    docs/images/replicas.svg

Of the results of ``failover.py`` the longest context is drawn, or ``--context``:
the tokens of each tenth of a second, as a rate, in the first round's runs, from
each one's first token on. A dashed line is when an R-worker is killed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT, HEIGHT, HEAD, FOOT = 960, 60, 16, 150, 30, 30
COLOURS = {"recomputed": "#e45756", "replicas": "#4c78a8", "undisturbed": "#54a24b"}
TITLES = {
    "recomputed": "an R-worker is killed; its sequences are recomputed",
    "replicas": "an R-worker is killed; its neighbour goes on (--replicas 1)",
    "undisturbed": "nothing happens",
}
TENTHS = 10


@dataclass(frozen=True)
class Scale:
    """What is how wide and high."""

    seconds: float
    tokens_per_s: float

    def x(self, at_s: float) -> float:
        return LEFT + at_s / self.seconds * (WIDTH - LEFT - RIGHT)

    def height(self, rate: float) -> float:
        return rate / self.tokens_per_s * (HEIGHT - HEAD - FOOT)


def draw(rows: list[dict[str, Any]]) -> str:
    """One picture below the other, all to one scale."""
    timelines = [row["timeline"] for row in rows]
    longest = max(len(each["tokens"]) for each in timelines)
    most = max(max(each["tokens"]) for each in timelines)
    scale = Scale(longest / TENTHS, most * TENTHS)
    parts = [part for place, row in enumerate(rows) for part in _one(row, place * HEIGHT, scale)]
    height = len(rows) * HEIGHT
    style = "text{font:12px sans-serif;fill:#222} .title{font-weight:bold}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "\n".join([head, f"<style>{style}</style>", ground, *parts, "</svg>"]) + "\n"


def _one(row: dict[str, Any], top: float, scale: Scale) -> list[str]:
    way, timeline = row["way"], row["timeline"]
    floor = top + HEIGHT - FOOT
    title = f"{TITLES[way]} (longest pause of a sequence: {row['stall_s']:.2f} s)"
    parts = [f'<text x="{LEFT}" y="{top + 20}" class="title">{escape(title)}</text>']
    for tenth, tokens in enumerate(timeline["tokens"]):
        if not tokens:
            continue
        high = scale.height(tokens * TENTHS)
        wide = scale.x(1 / TENTHS) - scale.x(0)
        parts.append(
            f'<rect x="{scale.x(tenth / TENTHS):.1f}" y="{floor - high:.1f}" '
            f'width="{wide:.1f}" height="{high:.1f}" fill="{COLOURS[way]}"/>'
        )
    parts += _axes(floor, scale)
    if timeline["killed_at_s"] is not None:
        x = scale.x(timeline["killed_at_s"])
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + HEAD}" y2="{floor}" stroke="#222" '
            'stroke-dasharray="4 3"/>'
        )
    return parts


def _axes(floor: float, scale: Scale) -> list[str]:
    most = scale.tokens_per_s
    top = floor - scale.height(most)
    parts = [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}" stroke="#222"/>',
        f'<text x="{LEFT - 6}" y="{floor}" text-anchor="end">0</text>',
        f'<text x="{LEFT - 6}" y="{top + 10:.1f}" text-anchor="end">{most:.0f}/s</text>',
    ]
    step = max(1, round(scale.seconds / 10))
    for second in range(0, int(scale.seconds) + 1, step):
        x = scale.x(second)
        parts.append(f'<text x="{x:.1f}" y="{floor + 16}" text-anchor="middle">{second} s</text>')
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--context", type=int, help="default: the longest there is")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = json.loads(options.results.read_text())["rows"]
    context = options.context or max(row["context"] for row in rows)
    chosen = [row for row in rows if row["context"] == context and row["way"] in TITLES]
    options.out.write_text(draw(chosen))


if __name__ == "__main__":
    main()
