"""Draw a part of a Chrome trace as SVG: who was busy when.

    python benchmarks/trace_picture.py one.json two.json --names "one lane" "two
    lanes" --out docs/images/lanes.svg

Traces are those of ``--trace``. Each is drawn from its first S-step that begins
a step of every lane, all to one scale.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LABEL_WIDTH, ROW, GAP, HEAD = 960, 110, 22, 4, 26
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
"""Of lanes."""
S_WORKER = 1


@dataclass(frozen=True)
class Span:
    row: str
    name: str
    lane: int
    start: float
    """Microseconds, as is ``end``."""
    end: float


def read(path: Path) -> list[Span]:
    text = path.read_text().rstrip().rstrip(",")
    events: list[dict[str, Any]] = json.loads(text if text.endswith("]") else text + "]")
    lanes = {e["tid"]: int(e["args"]["name"].split()[1]) for e in events if is_lane(e)}
    spans = []
    for event in events:
        if event["ph"] != "X" or event["name"] == "wait":
            continue
        on_s = event["pid"] == S_WORKER
        lane = lanes[event["tid"]] if on_s else event["args"]["lane"]
        row = "S-worker" if on_s else f"R-worker {event['tid']}"
        spans.append(Span(row, event["name"], lane, event["ts"], event["ts"] + event["dur"]))
    return spans


def is_lane(event: dict[str, Any]) -> bool:
    named = event["ph"] == "M" and event["name"] == "thread_name"
    return named and event["pid"] == S_WORKER and event["args"]["name"].startswith("lane")


def draw(traces: list[tuple[str, list[Span]]], length: float) -> str:
    scale = (WIDTH - LABEL_WIDTH) / length
    parts, y = [], 8
    for title, spans in traces:
        first = min((s.start for s in spans if s.name == "S 0"), default=0.0)
        parts.append(f'<text x="0" y="{y + 14}" class="title">{escape(title)}</text>')
        y += HEAD
        for row in sorted({span.row for span in spans}, reverse=True):
            parts.append(f'<text x="0" y="{y + 15}">{escape(row)}</text>')
            for span in spans:
                start, end = max(span.start - first, 0.0), min(span.end - first, length)
                if span.row == row and end > start:
                    parts.append(box(span, LABEL_WIDTH + start * scale, (end - start) * scale, y))
            y += ROW + GAP
        y += GAP
    parts.append(axis(length, scale, y))
    style = (
        "text{font:12px sans-serif;fill:#444}.title{font-weight:bold}.in{fill:#fff;font-size:10px}"
    )
    height = y + 24
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return "\n".join([head, f"<style>{style}</style>", ground, *parts, "</svg>"]) + "\n"


def box(span: Span, x: float, width: float, y: int) -> str:
    colour = COLOURS[span.lane % len(COLOURS)]
    rect = (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.6, 0.4):.1f}" height="{ROW}" '
        f'fill="{colour}"/>'
    )
    shown = width > 7 * len(span.name)
    return rect + (
        f'<text x="{x + 3:.1f}" y="{y + 15}" class="in">{escape(span.name)}</text>' if shown else ""
    )


def axis(length: float, scale: float, y: int) -> str:
    step = next(s for s in (1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7) if length / s <= 12)
    ticks = [i * step for i in range(int(length / step) + 1)]
    return "\n".join(
        f'<text x="{LABEL_WIDTH + t * scale:.1f}" y="{y + 12}">{t / 1e3:g} ms</text>'
        for t in ticks[:-1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--names", nargs="+", required=True)
    parser.add_argument("--ms", type=float, default=100.0, help="to be drawn of each")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    traces = [(name, read(path)) for name, path in zip(options.names, options.traces, strict=True)]
    options.out.write_text(draw(traces, 1e3 * options.ms))


if __name__ == "__main__":
    main()
