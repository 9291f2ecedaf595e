"""``tekken.json``, Mistral's tokenizer file, as a ``tokenizer.json``.

It is complete data: tokens as bytes by rank, the pattern that splits a text, and
special tokens, whose ids come first. Merges are what the ranks imply: each
token is made of the two that byte-pair encoding with all lower ranks leaves.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fastdecode.core.errors import CheckpointError, ConfigError
from fastdecode.core.files import write_json
from fastdecode.core.host.user_cache import user_cache
from fastdecode.core.model.files import MAX_TOKENIZER_BYTES, read_model_file

TEKKEN_FILE: Final = "tekken.json"
_MAX_VOCAB = 1 << 21
_MAX_TOKEN_BYTES = 1 << 10
_FIRST_SPECIALS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]",
                   "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]",
                   "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
                   "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")  # fmt: skip
"""Of files that don't name theirs."""


def convert_tekken(path: Path, kept: Path | None = None) -> Path:
    """A ``tokenizer.json`` that says what a ``tekken.json`` says. Making it takes
    seconds, so it is kept in the user's cache, by the file's hash.

    Args:
        kept: where it is kept instead.

    Raises:
        CheckpointError: the file isn't such a one, or nothing can be kept.
    """
    content = read_model_file(path, MAX_TOKENIZER_BYTES)
    directory = kept or user_cache("tokenizers")
    made = directory / f"{hashlib.sha256(content).hexdigest()}.json"
    if made.is_file() and made.stat().st_uid == os.geteuid():
        return made
    try:
        tree = tokenizer_of(json.loads(content))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a tekken.json that can be read ({type(error).__name__}: {error}): "
            "fetch the file again"
        ) from None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(made, tree, "the tokenizer")
    except (OSError, ConfigError) as error:
        raise CheckpointError(
            f"{path}: the tokenizer.json made of it can't be kept in {directory} ({error}): set "
            "XDG_CACHE_HOME to a directory that can be written to"
        ) from None
    return made


def tokenizer_of(tekken: dict[str, Any]) -> dict[str, Any]:
    """The content of a ``tokenizer.json``.

    Raises:
        ValueError, KeyError, TypeError: the tree isn't that of a ``tekken.json``.
    """
    config = tekken["config"]
    num_specials = _count(config["default_num_special_tokens"])
    num_tokens = _count(config["default_vocab_size"]) - num_specials
    tokens = [_bytes_of(row, rank) for rank, row in enumerate(tekken["vocab"][:num_tokens])]
    known = set(tokens)
    if len(known) != len(tokens) or any(bytes([byte]) not in known for byte in range(256)):
        raise ValueError("tokens repeat, or single bytes are missing")
    specials = _specials(tekken.get("special_tokens"), num_specials)
    vocab = {name: rank for rank, name in enumerate(specials)}
    vocab |= {_written(token): num_specials + rank for rank, token in enumerate(tokens)}
    if len(vocab) != num_specials + len(tokens):
        raise ValueError("a special token has another token's name")
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": rank, "content": name, "special": True, "normalized": False, "lstrip": False,
             "rstrip": False, "single_word": False}
            for rank, name in enumerate(specials)
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(config["pattern"])},
                 "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                 "use_regex": False},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [vocab["<s>"]], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": True, "vocab": vocab,
                  "merges": [[_written(a), _written(b)] for a, b in _merges(tokens)]},
    }  # fmt: skip


def _count(value: object) -> int:
    if type(value) is not int or not 0 < value <= _MAX_VOCAB:
        raise ValueError(f"{value!r} is not a number of tokens")
    return value


def _bytes_of(row: dict[str, Any], rank: int) -> bytes:
    token = base64.b64decode(row["token_bytes"], validate=True)
    if row["rank"] != rank or not 0 < len(token) <= _MAX_TOKEN_BYTES:
        raise ValueError(f"the token of rank {rank} is out of place, empty or too long")
    return token


def _specials(listed: Sequence[dict[str, Any]] | None, count: int) -> list[str]:
    """Names by id; the unnamed are ``<SPECIAL_n>``."""
    names = [f"<SPECIAL_{rank}>" for rank in range(count)]
    rows = listed or [
        {"rank": rank, "token_str": name} for rank, name in enumerate(_FIRST_SPECIALS[:count])
    ]
    for row in rows:
        if not 0 <= row["rank"] < count:
            raise ValueError(f"the special token {row['token_str']!r} has no place")
        names[row["rank"]] = str(row["token_str"])
    return names


def _merges(tokens: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The two parts of every token that has two, by rank."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = []
    for rank, token in enumerate(tokens):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            best = min(pairs)
            if best >= rank:
                break
            at = pairs.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def _byte_letters() -> list[str]:
    """How a byte-level vocabulary writes each byte (GPT-2): as itself where that
    can be seen, else as a letter from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unseen = [byte for byte in range(256) if byte not in seen]
    letters = {byte: chr(byte) for byte in seen}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(unseen)}
    return [letters[byte] for byte in range(256)]


_LETTERS: Final = _byte_letters()


def _written(token: bytes) -> str:
    return "".join(_LETTERS[byte] for byte in token)
