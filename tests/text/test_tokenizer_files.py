"""Tokenizer files other than tokenizer.json."""

from __future__ import annotations

import base64
import itertools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fastdecode.core.errors import CheckpointError
from fastdecode.text.codec import TextCodec
from fastdecode.text.tokenizer_files import find_tokenizer

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT = re.compile(r"[^\r\n\w]?[^\W\d_]+|\d| ?[^\s\w]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
"""The same for the texts of these tests."""
WORDS = "the cat in a hat that sat and a an ant heart 12 --- ... naïve über 你好 😀 aaaaa  \n\n"


def learned_tokens(text: bytes, count: int) -> list[bytes]:
    """Single bytes, and what byte-pair encoding learns from a text."""
    tokens = [bytes([byte]) for byte in range(256)]
    parts = [bytes([byte]) for byte in text]
    while len(tokens) < count:
        pairs: dict[bytes, int] = {}
        for a, b in itertools.pairwise(parts):
            pairs[a + b] = pairs.get(a + b, 0) + 1
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        parts = merged(parts, best)
        if best not in tokens:
            tokens.append(best)
    return tokens


def merged(parts: Sequence[bytes], token: bytes) -> list[bytes]:
    out: list[bytes] = []
    for part in parts:
        if out and out[-1] + part == token:
            out[-1] = token
        else:
            out.append(part)
    return out


def encoded(text: str, tokens: Sequence[bytes], first: int) -> list[int]:
    """As tiktoken does: of the neighbours that make a token, those of the lowest
    rank are merged, the leftmost first."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    ids: list[int] = []
    for piece in SPLIT.findall(text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while len(parts) > 1 and piece.encode() not in ranks:
            pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
            at = pairs.index(min(pairs))
            if pairs[at] == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        parts = [piece.encode()] if piece.encode() in ranks else parts
        ids += [first + ranks[part] for part in parts]
    return ids


TOKENS = learned_tokens((WORDS * 3).encode(), 330)


def tekken(**changes: Any) -> dict[str, Any]:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate([*TOKENS, b"beyond the vocabulary"])
    ]
    config = {"pattern": PATTERN, "num_vocab_tokens": len(vocab), "version": "v3",
              "default_vocab_size": 20 + len(TOKENS), "default_num_special_tokens": 20}  # fmt: skip
    return {"config": config, "vocab": vocab, **changes}


def write(directory: Path, tree: dict[str, Any]) -> Path:
    (directory / "tekken.json").write_text(json.dumps(tree))
    return directory


def test_refusal_of_tekken_has_the_line_that_converts_it(tmp_path: Path) -> None:
    names = ["<unk>", "<s>", "</s>", "[INST]", *(f"<SPECIAL_{rank}>" for rank in range(4, 20))]
    special = [{"rank": rank, "token_str": name} for rank, name in enumerate(names)]
    with pytest.raises(CheckpointError, match="Convert it once") as refusal:
        TextCodec.load(write(tmp_path, tekken(special_tokens=special)))
    exec(str(refusal.value).split('python -c "')[1].removesuffix('"'), {})
    codec = TextCodec.load(tmp_path)
    random_text, letters = random.Random(0), [*WORDS, "x", "7", "\t", "é"]
    texts = ["", "aaa", "aaaa aaaaa", WORDS]
    texts += ["".join(random_text.choices(letters, k=random_text.randint(1, 40)))
              for _ in range(100)]  # fmt: skip
    try:
        for text in texts:
            ids = codec.encode(text)
            assert ids == [1, *encoded(text, TOKENS, 20)], text
            assert codec.decode(ids) == text
        assert codec.encode("[INST]a") == [1, 3, 20 + ord("a")]
    finally:
        codec.close()


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("tokenizer.model", r"tokenizer\.model.*sentencepiece.*AutoTokenizer.*save_pretrained"),
        ("qwen.tiktoken", r"qwen\.tiktoken.*TikTokenConverter.*PATTERN.*tokenizer\.json"),
        ("tiktoken.model", r"tiktoken\.model.*TikTokenConverter"),
        ("tekken.json", r"tekken\.json.*convert_tekken_tokenizer.*save_pretrained"),
    ],
)
def test_files_to_be_converted_are_refused_with_the_line_that_does(
    name: str, match: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=match):
        TextCodec.load(tmp_path)
    with pytest.raises(CheckpointError, match=match):
        find_tokenizer(tmp_path)
