"""The demo's prompts: held-out stories to go on with, and held-out questions to
answer.

    python examples/model/prompts.py --out examples/prompts.jsonl

One line a request, as ``fastdecode generate`` reads it: id, prompt, and
sampling parameters.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from corpus import Document, conversation, portraits, stock, story
from lexicon import Draw

Line = Mapping[str, Any]

GREEDY = {"temperature": 0.0}
OPENINGS: tuple[tuple[str, str, Line], ...] = (
    (
        "opening-three-ways",
        "Once there was a woman called",
        {"n": 3, "seed": 7, "temperature": 0.8},
    ),
    (
        "opening-ship",
        "The ship Silver Gull lay in the harbour of",
        {"seed": 11, "temperature": 0.9, "top_p": 0.9},
    ),
    (
        "opening-party",
        "On Sunday Rosina gave a party in",
        {"seed": 5, "temperature": 0.7, "top_k": 40},
    ),
    ("one-sentence", "Every autumn there is a great contest, and", {"stop": ["."], **GREEDY}),
)
"""Sampled beginnings, where no two seeds tell the same story."""


def cut_story(page: Document, share: float) -> str:
    """The story without its questions, up to the sentence that ends nearest
    after the given share of it."""
    told = page.text.partition("\n\nQ:")[0]
    end = told.find(". ", int(len(told) * share))
    assert end > 0, "the story has no sentence end there"
    return told[: end + 1]


def draws(seed: int) -> Iterator[Draw]:
    """One source of held-out words for every prompt."""
    number = 0
    while True:
        yield Draw(random.Random(f"prompts/{seed}/{number}"), "held_out")
        number += 1


def prompt_lines(seed: int) -> Iterator[Line]:
    """24 requests of very different lengths, in a mixed order."""
    source = draws(seed)
    lines: list[Line] = [
        {"id": name, "prompt": text, "max_tokens": 60, **more} for name, text, more in OPENINGS
    ]
    for number, share in enumerate((0.15, 0.25, 0.35, 0.45, 0.55, 0.6, 0.65)):
        size = number % 3
        prompt = cut_story(story(next(source), size), share)
        lines.append({"id": f"story-{number + 1}", "prompt": prompt, "max_tokens": 80, **GREEDY})
    for kind, tell, sizes in (
        ("questions", story, (0, 2, 3)),
        ("people", portraits, (0, 1, 3)),
        ("things", stock, (1, 3)),
        ("talk", conversation, (0, 1, 2, 3, 3)),
    ):
        for number, size in enumerate(sizes):
            page = tell(next(source), size)
            while not page.answers:
                page = tell(next(source), size)
            prompt = page.text[: page.answers[-1].start]
            line = {"id": f"{kind}-{number + 1}", "prompt": prompt, "max_tokens": 40, **GREEDY}
            lines.append({**line, "stop": ["\n"]} if number % 2 == 0 else line)
    return iter(next(source).shuffled(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo's prompts.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with options.out.open("w", encoding="utf-8") as file:
        for line in prompt_lines(options.seed):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
