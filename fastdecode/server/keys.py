"""Keys that let requests in: an operator's, and a client's own."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.json_file import read_bytes
from fastdecode.core.secret_file import shown

if TYPE_CHECKING:
    from fastdecode.server.options import ServeOptions

KEYS_VARIABLE = "FASTDECODE_API_KEYS"
MAX_KEYS = 10_000
MIN_KEY_CHARS = 8
_MAX_KEYS_BYTES = 4 << 20


def key_hashes(options: ServeOptions, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """SHA-256, in hex, of every key that lets in; none: no key is needed.

    Raises:
        ConfigError: If the file can't be read, or others may read it; a key is too
            short; or there is none though others can reach the address.
    """
    found = set(filter(None, re.split(r"[,\s]+", environ.get(KEYS_VARIABLE, ""))))
    for key in found:
        if why := _unfitness(key):
            raise ConfigError(f"a key in {KEYS_VARIABLE} {why}")
    if options.api_key_file is not None:
        for number, key in _read(Path(options.api_key_file), is_secret=True):
            if why := _unfitness(key):
                raise _refusal(Path(options.api_key_file), f"the key {why}", number)
            found.add(key)
    if len(found) > MAX_KEYS:
        raise ConfigError(f"there are {len(found)} API keys: {MAX_KEYS} at most")
    if options.api_key_file is not None and not found:
        raise _refusal(Path(options.api_key_file), "it has no key in it")
    if not found and not options.is_loopback:
        raise ConfigError(
            Given("host", options.host),
            " can be reached by others, so a key is needed: give ",
            Given("api_key_file"),
            f", or keys in {KEYS_VARIABLE}",
        )
    return tuple(sorted(hashlib.sha256(key.encode()).hexdigest() for key in found))


def first_key(path: Path) -> str:
    """Return the first key of a file. Raises: ConfigError: If it has none that can be sent."""
    number, key = next(_read(path, is_secret=False), (0, ""))
    if why := _unfitness(key, least_chars=1):
        raise _refusal(path, f"the key {why}" if key else "it has no key in it", number)
    return key


def _read(path: Path, *, is_secret: bool) -> Iterator[tuple[int, str]]:
    """Yield the keys of a file, each with its line's number. Raises ConfigError."""
    refuse = partial(_refusal, path)
    content = read_bytes(path, most_bytes=_MAX_KEYS_BYTES, refuse=refuse, is_secret=is_secret)
    for number, raw in enumerate(content.splitlines(), start=1):
        try:
            line = raw.decode().strip()
        except UnicodeDecodeError:
            raise refuse("it is no text (UTF-8)", number) from None
        if line and not line.startswith("#"):
            yield number, line


def _refusal(path: Path, why: str, number: int = 0) -> ConfigError:
    where = f", line {number}" if number else ""
    return ConfigError(Given("api_key_file"), f" {shown(path)}{where}: {why}")


def _unfitness(key: str, least_chars: int = MIN_KEY_CHARS) -> str:
    """Return why a key is refused, or "" if it is fit. The key itself isn't shown."""
    if not (key.isascii() and key.isprintable()) or " " in key:
        return "has a space, or a character that isn't printable ASCII: put one key on a line"
    if len(key) < least_chars:
        return f"is too short: give {least_chars} characters or more"
    return ""
