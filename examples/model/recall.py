"""The recall task: a held-out text up to a question, and the one right answer.

    python examples/model/recall.py --checkpoint examples/model/checkpoint --out
    examples/model/recall_eval.jsonl

Names, towns, things and numbers of three digits or more in these texts occur in
no training text, so an answer can only come from the text before the question:
from the KV cache.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from corpus import MAX_SIZE, Answer, Document, documents
from tokenizers import Tokenizer

SPARE_TOKENS = 4
"""Room beyond the right answer's tokens, so that a wrong answer may be longer."""


@dataclass(frozen=True)
class RecallItem:
    """A completion of the prompt is right if it starts with ``answer``."""

    id: str
    prompt: str
    answer: str
    max_tokens: int
    kind: str
    topic: str
    distance_tokens: int
    """Tokens from where the words to recall were last said to the end of the prompt."""


def recall_item(tokenizer: Tokenizer, page: Document, answer: Answer, item_id: str) -> RecallItem:
    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    prompt, expected = page.text[: answer.start], page.text[answer.start : answer.end]
    return RecallItem(
        id=item_id,
        prompt=prompt,
        answer=expected,
        max_tokens=count(expected) + SPARE_TOKENS,
        kind=page.kind,
        topic=answer.topic,
        distance_tokens=count(page.text[answer.told : answer.start]),
    )


def recall_items(tokenizer: Tokenizer, seed: int, count: int) -> Iterator[RecallItem]:
    """``count`` held-out items, one question a document."""
    rng = random.Random(seed)
    index = 0
    for page in documents("held_out", seed, 4 * count, MAX_SIZE):
        if page.answers and index < count:
            answer = page.answers[int(rng.random() * len(page.answers))]
            yield recall_item(tokenizer, page, answer, f"recall-{index:04d}")
            index += 1


def read_items(path: Path) -> list[RecallItem]:
    with path.open(encoding="utf-8") as lines:
        return [RecallItem(**json.loads(line)) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a file of recall items.")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="directory with tokenizer.json"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=77)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    with options.out.open("w", encoding="utf-8") as file:
        for item in recall_items(tokenizer, options.seed, options.count):
            file.write(json.dumps(asdict(item), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
