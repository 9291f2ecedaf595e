"""Token ids to text, one token at a time.

A detokenizer gives text that is **final**: nothing that comes later can change it. What a later
token may still change (the first bytes of a character, a run of byte tokens) is held back. The
pieces together, with ``flush`` at the end, equal the decoding of all tokens at once, and a piece
never ends in half a character. The cost of a token doesn't grow with the sequence.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Detokenizer:
    """Turns the tokens of one sequence into text. This one gives none: there is no tokenizer."""

    def append(self, token_id: int) -> str:
        """Take one more token. Return the text that became final, often just the token's own."""
        return ""

    def peek(self) -> str:
        """Return what ``flush`` would give, if that has no partial character."""
        return ""

    def flush(self) -> str:
        """Return the text that was held back, with U+FFFD for partial characters."""
        return ""


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokenizer, as detokenizers use it."""

    tokenizer: Tokenizer
    skips_special: bool = True
    """Special tokens have no text. Otherwise their names are in it."""
    _bytes: dict[int, bytes] = field(default_factory=dict)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        added = self.tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @cached_property
    def skipped(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values() if self.skips_special else ())

    @cached_property
    def decoder_types(self) -> frozenset[str]:
        decoder = self.tokenizer.decoder
        # Its pickled state is its part of tokenizer.json: there is no other way to look inside.
        return frozenset(() if decoder is None else _types(json.loads(decoder.__getstate__())))

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of all tokens at once. Unknown ids have none."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=self.skips_special))

    def token(self, token_id: int) -> str | None:
        """Return the token as it stands in the vocabulary; None if it has no text."""
        return None if token_id in self.skipped else self.tokenizer.id_to_token(token_id)

    def byte_level_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token of a byte-level vocabulary stands for."""
        if token_id not in self._bytes:
            token = self.token(token_id) or ""
            is_plain = any(char not in BYTE_ALPHABET for char in token)  # an added token
            known = token.encode() if is_plain else bytes(BYTE_ALPHABET[char] for char in token)
            self._bytes[token_id] = known
        return self._bytes[token_id]

    def fallback_byte(self, token_id: int) -> bytes | None:
        """Return the byte that a token ``<0xNN>`` stands for, if the decoder knows such tokens."""
        token = self.token(token_id) if "ByteFallback" in self.decoder_types else None
        match = _BYTE_TOKEN.fullmatch(token or "")
        return bytes.fromhex(match[1]) if match else None


def detokenizer_for(
    vocabulary: Vocabulary | None, prompt_token_ids: Sequence[int] = ()
) -> Detokenizer:
    """Return the tokenizer's detokenizer, for the text that follows the prompt's."""
    if vocabulary is None:
        return Detokenizer()
    if vocabulary.decoder_types == {"ByteLevel"}:
        return ByteLevelDetokenizer(vocabulary)
    return WindowDetokenizer(vocabulary, prompt_token_ids)


class ByteLevelDetokenizer(Detokenizer):
    """Bytes through a UTF-8 decoder, for byte-level vocabularies (GPT-2, Llama 3, Qwen).

    Only part of a character is ever held back. Python's decoder replaces other bytes just as the
    tokenizers library does: one U+FFFD for each maximal ill-formed part (Unicode 3.9).
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def append(self, token_id: int) -> str:
        return self._decoder.decode(self._vocabulary.byte_level_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """Decodes a short window of the last tokens, for any other decoder.

    The window is the tokens of the last piece of text and all since. A new piece is what decoding
    the window gives beyond the piece before: decoders that treat the first token apart (dropping
    its space) treat both alike. Byte tokens ``<0xNN>`` are held back until their run ends: the
    library decodes a run that isn't valid UTF-8 to U+FFFD for each of its bytes.
    """

    def __init__(self, vocabulary: Vocabulary, prompt_token_ids: Sequence[int] = ()) -> None:
        self._vocabulary = vocabulary
        # One ordinary token of the prompt tells the decoder that the output doesn't begin a text.
        before = (
            [token_id]
            for token_id in reversed(prompt_token_ids)
            if vocabulary.token(token_id) is not None and vocabulary.fallback_byte(token_id) is None
        )
        self._window = next(before, [])
        self._num_read = len(self._window)
        """Tokens of the window whose text has been given."""
        self._read_text = vocabulary.text(self._window)
        self._run = bytearray()

    def append(self, token_id: int) -> str:
        vocabulary = self._vocabulary
        if vocabulary.token(token_id) is None:
            return ""
        self._window.append(token_id)
        byte = vocabulary.fallback_byte(token_id)
        if byte is not None:
            self._run += byte
            return ""
        self._run.clear()
        piece = self._held()
        # Of a decoder we don't know, the last characters may be half of one.
        if not piece or ("ByteLevel" in vocabulary.decoder_types and piece.endswith("\ufffd")):
            return ""
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._read_text = vocabulary.text(self._window)
        return piece

    def peek(self) -> str:
        try:
            return self._held() if self._run.decode() else ""
        except UnicodeDecodeError:
            return ""

    def flush(self) -> str:
        piece = self._held()
        self._window, self._num_read, self._read_text = [], 0, ""
        return piece

    def _held(self) -> str:
        return self._vocabulary.text(self._window)[len(self._read_text) :]


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_ALPHABET = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}
"""GPT-2's printable character for every byte → the byte."""
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def _types(decoder: dict[str, object]) -> set[str]:
    nested = decoder.get("decoders")
    if isinstance(nested, list):
        return set().union(*(_types(part) for part in nested))
    return {str(decoder.get("type"))}


@dataclass(frozen=True)
class TokenText:
    """Names tokens in answers: ``token_id:N`` where the model has no tokenizer."""

    _vocabulary: Vocabulary | None

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; a special token's name."""
        vocabulary = self._vocabulary
        if vocabulary is None:
            return f"token_id:{token_id}".encode()
        token = vocabulary.token(token_id)
        if token is None:
            return (vocabulary.tokenizer.id_to_token(token_id) or f"token_id:{token_id}").encode()
        if vocabulary.decoder_types == {"ByteLevel"}:
            return vocabulary.byte_level_bytes(token_id)
        # Decoding one token alone would drop the space before a word.
        return vocabulary.fallback_byte(token_id) or token.replace("\u2581", " ").encode()

    def text_of(self, token_id: int) -> str:
        """Return the token's text; ``bytes:\\xNN…`` if its bytes alone aren't characters."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def offsets_after(self, prompt_token_ids: Sequence[int]) -> Callable[[int], int]:
        """Return a function from each next token to where its text begins if none is cut off."""
        detokenizer, end = detokenizer_for(self._vocabulary, prompt_token_ids), 0

        def offset_of(token_id: int) -> int:
            nonlocal end
            begin = end
            end += len(detokenizer.append(token_id))
            return begin

        return offset_of
