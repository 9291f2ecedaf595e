"""Measure a checkpoint on held-out text: loss, and how often a fact told
earlier is recalled word for word.

    python examples/model/evaluate.py --checkpoint examples/model/checkpoint
    --out evaluation.json

Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from corpus import MAX_SIZE, documents
from packing import encode
from recall import RecallItem, read_items, recall_items
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

DISTANCES = (64, 128, 256, 512)
BATCH_ROWS = 32
RECALL_SEED = 78
LOSS_SEED = 79


def complete(model: Any, tokenizer: Any, items: Sequence[RecallItem]) -> list[str]:
    """The greedy continuation of every item's prompt, in the items' order."""
    texts = [""] * len(items)
    by_length = sorted(range(len(items)), key=lambda index: len(items[index].prompt))
    for first in range(0, len(by_length), BATCH_ROWS):
        rows = by_length[first : first + BATCH_ROWS]
        batch = tokenizer([items[row].prompt for row in rows], return_tensors="pt", padding=True)
        with torch.inference_mode():
            generated = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=max(items[row].max_tokens for row in rows),
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        new = generated[:, batch["input_ids"].shape[1] :]
        for row, text in zip(
            rows, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True
        ):
            texts[row] = text
    return texts


def load(checkpoint: Path) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer, which pads on the left."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model.eval(), tokenizer


def held_out_loss(model: Any, checkpoint: Path, count: int) -> dict[str, float]:
    """Nats a token: over all tokens, and over those that the text before them determines."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    total, recall_total = 0.0, 0.0
    tokens, recall_tokens = 0, 0
    for page in documents("held_out", LOSS_SEED, count, MAX_SIZE):
        row = encode(tokenizer, page)
        ids, recalled = torch.tensor([row.token_ids]), torch.tensor(row.recalled[1:])
        with torch.inference_mode():
            logits = model(input_ids=ids[:, :-1]).logits[0].float()  # [T-1, V]
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        total, tokens = total + losses.sum().item(), tokens + len(losses)
        recall_total += losses[recalled].sum().item()
        recall_tokens += int(recalled.sum())
    return {"all_tokens": total / tokens, "recall_tokens": recall_total / recall_tokens}


def accuracy_by(
    label: Callable[[RecallItem], str], items: Iterable[RecallItem], right: Iterable[bool]
) -> dict[str, dict[str, float]]:
    groups: dict[str, list[bool]] = defaultdict(list)
    for item, hit in zip(items, right, strict=True):
        groups[label(item)].append(hit)
    return {
        name: {"items": len(hits), "accuracy": sum(hits) / len(hits)}
        for name, hits in sorted(groups.items())
    }


def distance_label(item: RecallItem) -> str:
    low = 0
    for high in DISTANCES:
        if item.distance_tokens < high:
            return f"{low:4d} to {high - 1} tokens"
        low = high
    return f"{low:4d} tokens and more"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a checkpoint's held-out loss and recall.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument(
        "--items", type=Path, help="a file of recall items instead of freshly drawn ones"
    )
    parser.add_argument("--count", type=int, default=2000, help="recall items to draw")
    parser.add_argument("--loss-documents", type=int, default=400)
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    parser.add_argument("--show", type=int, default=5, help="wrong answers to print")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load(options.checkpoint)
    raw = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    items = (
        read_items(options.items)
        if options.items
        else list(recall_items(raw, RECALL_SEED, options.count))
    )
    texts = complete(model, tokenizer, items)
    right = [text.startswith(item.answer) for item, text in zip(items, texts, strict=True)]
    tables = {
        "by_distance": accuracy_by(distance_label, items, right),
        "by_kind": accuracy_by(lambda item: item.kind, items, right),
        "by_topic": accuracy_by(lambda item: item.topic, items, right),
    }
    for name, table in tables.items():
        print(f"\n{name.replace('_', ' '):24s} items  accuracy")
        for label, row in table.items():
            print(f"{label:24s} {row['items']:5.0f}    {row['accuracy']:6.1%}")
    accuracy = sum(right) / len(right)
    loss = held_out_loss(model, options.checkpoint, options.loss_documents)
    wrong = [(i, t) for i, t, hit in zip(items, texts, right, strict=True) if not hit]
    for item, text in wrong[: options.show]:
        print(f"\n{item.id} ({item.distance_tokens} tokens): wanted {item.answer!r}, got {text!r}")
    print(f"\nrecall {accuracy:.1%} of {len(items)} items, nats a token: {loss}")
    if options.out:
        result = {
            "recall_items": len(items),
            "recall_accuracy": accuracy,
            "held_out_loss": loss,
            **tables,
        }
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
