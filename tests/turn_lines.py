"""Lines of conversations for ``generate``, and what is to come of them whoever
keeps their KV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NEW_TOKENS = 20


def write_turns(path: Path) -> None:
    """Three turns of each of two conversations, in turns."""
    lines = [
        {
            "id": f"{whose}{turn}",
            "prompt_token_ids": [place * 7 + turn] * NEW_TOKENS,
            "conversation_id": whose,
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": 9,
        }
        for turn in range(3)
        for place, whose in enumerate("ab", 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def check_turns(plain: Path, kept: Path) -> None:
    """Answers without a cache and with one: the same tokens, and every turn but
    the first runs what is new and the last drawn token."""
    before, after = _answers(plain), _answers(kept)
    assert [line["token_ids"] for line in after] == [line["token_ids"] for line in before]
    for line in after:
        usage = line["usage"]
        is_first = line["id"].endswith("0")
        spared = 0 if is_first else usage["prompt_tokens"] - NEW_TOKENS - 1
        assert usage.get("cached_tokens", 0) == spared, line["id"]


def token_ids(path: Path) -> list[list[int]]:
    """Of every answer."""
    return [line["token_ids"] for line in _answers(path)]


def _answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
