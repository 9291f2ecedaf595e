"""How much of a text one token can stand for: a bound that tells, without
encoding it, that a text is too long."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fastdecode.text.detokenizer import BYTE_ALPHABET

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Canonical decomposition makes a text at most three times as long in UTF-8, and
# so does what it undoes.
NFC_FACTOR = 9
KEEPS_EVERYTHING = ("ByteLevel", "Digits", "Metaspace")


def max_bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """The most bytes of UTF-8 of which an encoding can make one token; None if
    nothing bounds them.

    Nothing does where a part of the tokenizer drops text (white space around
    special tokens, say), or makes one "unknown" token of a whole word. What is
    left are those that spell every byte: byte-level and byte-fallback ones.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    factor = _shrinking(_state(tokenizer.normalizer))
    kept = _keeps(_state(tokenizer.pre_tokenizer))
    if factor is None or not kept or not _spells_every_byte(tokenizer):
        return None
    return factor * max(len(token.encode()) for token in tokenizer.get_vocab())


def _spells_every_byte(tokenizer: Tokenizer) -> bool:
    if getattr(tokenizer.model, "byte_fallback", False):
        letters = [f"<0x{byte:02X}>" for byte in range(256)]
    elif _has_byte_level(_state(tokenizer.pre_tokenizer)):
        letters = list(BYTE_ALPHABET)
    else:
        return False
    return all(tokenizer.token_to_id(letter) is not None for letter in letters)


def _has_byte_level(part: dict[str, Any]) -> bool:
    return part.get("type") == "ByteLevel" or any(
        map(_has_byte_level, part.get("pretokenizers", ()))
    )


def _keeps(part: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer drops nothing."""
    match part:
        case {"type": "Sequence", "pretokenizers": [*parts]}:
            return all(map(_keeps, parts))
        case {"type": "Split", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": kind}:
            return kind in KEEPS_EVERYTHING
    return True


def _shrinking(part: dict[str, Any]) -> int | None:
    """How many times shorter a normalizer can make a text; None if it isn't bounded."""
    match part:
        case {"type": "Sequence", "normalizers": [*parts]}:
            factor = 1
            for inner in map(_shrinking, parts):
                if inner is None:
                    return None
                factor *= inner
            return factor
        case {"type": "NFC"}:
            return NFC_FACTOR
        case {"type": "Prepend"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(new.encode()) >= len(old.encode()) else None
    return None if part else 1


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer as tokenizer.json has it; empty if there is none."""
    if part is None:
        return {}
    # Its pickled state is that; there is no other way to look inside.
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state
