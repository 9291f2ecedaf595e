"""Reading files of JSON Lines of unknown origin: bounded lines, counted as an
editor counts them, and hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import IO, Any

from fastdecode.core.errors import RequestError

MAX_LINE_BYTES = 64 * 1024 * 1024


class LineReader:
    """The lines of a file that aren't blank, each with its number; None for a
    line that is too long to be read.

    Args:
        file: opened in binary, at its beginning.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.num_bytes = 0
        self.number = 0
        """Of the line that was read last."""

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        while raw := self._read():
            self.number += 1
            if len(raw) > MAX_LINE_BYTES:
                while raw and not raw.endswith(b"\n"):
                    raw = self._read()
                yield self.number, None
            elif not raw.isspace():
                yield self.number, raw

    @property
    def sha256(self) -> str:
        """Of what has been read so far, in hex."""
        return self._hash.hexdigest()

    def _read(self) -> bytes:
        raw = self._file.readline(MAX_LINE_BYTES + 1)
        self._hash.update(raw)
        self.num_bytes += len(raw)
        return raw


def too_long(number: int) -> RequestError:
    return RequestError(
        f"line {number} is longer than {MAX_LINE_BYTES} bytes: split it", code="line_too_long"
    )


def load_object(raw: bytes, number: int, code: str = "invalid_json") -> dict[str, Any]:
    """The JSON object of a line. Raises RequestError with this code."""
    try:
        line = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"line {number} is not valid JSON: {error}", code=code) from None
    if not isinstance(line, dict):
        raise RequestError(
            f"line {number} is not a JSON object but {type(line).__name__}", code=code
        )
    return line


def utf8(text: str, what: str) -> str:
    """The text, if it is one: JSON escapes can spell lone surrogates, which no
    tokenizer or UTF-8 file takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f'"{what}" has a lone surrogate, which is no character', code="invalid_text"
        ) from None
    return text
