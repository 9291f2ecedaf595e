"""Tokenizer files other than tokenizer.json."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from fastdecode.core.errors import CheckpointError
from fastdecode.text.codec import TextCodec
from fastdecode.text.tokenizer_files import find_tokenizer

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NUM_SPECIAL = 20
TOKENS = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" a", b" an", b" ant", b"beyond"]
"""By rank. The last one is beyond the vocabulary."""


def ids_of(*tokens: bytes) -> list[int]:
    return [NUM_SPECIAL + TOKENS.index(token) for token in tokens]


def write_tekken(directory: Path) -> None:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(TOKENS)
    ]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(vocab),
        "version": "v3",
        "default_vocab_size": NUM_SPECIAL + len(TOKENS) - 1,
        "default_num_special_tokens": NUM_SPECIAL,
    }
    names = ["<unk>", "<s>", "</s>", "[INST]", *(f"<SPECIAL_{r}>" for r in range(4, NUM_SPECIAL))]
    special = [{"rank": rank, "token_str": name} for rank, name in enumerate(names)]
    tree = {"config": config, "vocab": vocab, "special_tokens": special}
    (directory / "tekken.json").write_text(json.dumps(tree))


def test_refusal_of_tekken_has_the_line_that_converts_it(tmp_path: Path) -> None:
    write_tekken(tmp_path)
    with pytest.raises(CheckpointError, match="Convert it once") as refusal:
        TextCodec.load(tmp_path)
    exec(str(refusal.value).split('python -c "')[1].removesuffix('"'), {})
    codec = TextCodec.load(tmp_path)
    expected = {
        "": [],
        "the ant": ids_of(b"the", b" ant"),
        "thaté": ids_of(b"th", b"a", b"t", b"\xc3", b"\xa9"),
        "a an 12": ids_of(b"a", b" an", b" ", b"1", b"2"),
        "beyond": ids_of(*(bytes([byte]) for byte in b"beyond")),
        "[INST]a": [3, *ids_of(b"a")],
    }
    for text, ids in expected.items():
        assert codec.encode(text) == [1, *ids]
        assert codec.decode(codec.encode(text)) == text.removeprefix("[INST]")
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
    for read in (TextCodec.load, find_tokenizer):
        with pytest.raises(CheckpointError, match=match):
            read(tmp_path)
