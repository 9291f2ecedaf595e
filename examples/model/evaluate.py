"""Measure how often a checkpoint recalls, word for word, what its prompt says.

    python examples/model/evaluate.py [--checkpoint DIR] [--r-workers N]

``recall_eval.jsonl`` holds 200 held-out questions. Their names, things and numbers occur in no
training text, so an answer can only come from the KV cache.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

from fastdecode import LLM, SamplingParams

HERE = Path(__file__).parent
LIMITS = (64, 128, 256, 512)
"""Tokens from a fact to its question."""


def distance(tokens: int) -> str:
    for limit in LIMITS:
        if tokens < limit:
            return f"under {limit:3d} tokens"
    return f"{LIMITS[-1]:9d} or more"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure recall of held-out questions.")
    parser.add_argument("--checkpoint", type=Path, default=HERE / "checkpoint")
    parser.add_argument("--items", type=Path, default=HERE / "recall_eval.jsonl")
    parser.add_argument("--r-workers", type=int, default=2)
    options = parser.parse_args()
    items = [json.loads(line) for line in options.items.read_text("utf-8").splitlines()]
    params = [SamplingParams(temperature=0, max_tokens=item["max_tokens"]) for item in items]
    with LLM(str(options.checkpoint), r_workers=options.r_workers) as llm:
        outputs = llm.generate([item["prompt"] for item in items], params, progress=True)
    groups: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for item, output in zip(items, outputs, strict=True):
        is_right = output.text.startswith(item["answer"])
        groups["all", "questions"].append(is_right)
        groups["kind", item["kind"]].append(is_right)
        groups["distance", distance(item["distance_tokens"])].append(is_right)
    for (label, name), hits in sorted(groups.items()):
        print(f"{label:12s} {name:24s} {len(hits):4d} items {sum(hits) / len(hits):7.1%}")


if __name__ == "__main__":
    main()
