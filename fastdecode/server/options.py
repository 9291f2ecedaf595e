"""What a user may choose about a server, and the keys that let requests in."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastdecode.core.config.options import check_options, option
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.json_file import read_bytes
from fastdecode.core.model.local_models import hub_name
from fastdecode.core.secret_file import shown
from fastdecode.text.chat_format import ChatOptions

KEYS_VARIABLE = "FASTDECODE_API_KEYS"
MAX_KEYS = 10_000
MIN_KEY_CHARS = 8
_MAX_KEYS_BYTES = 4 << 20
_FOREVER_S = 1e7


def _seconds(default: float | None, text: str, low: float = 0.1) -> Any:
    return option(default, text, low=low, high=_FOREVER_S, unit="s", metavar="S")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ChatOptions):
    """Raises ConfigError: If a value is out of bounds, or options contradict each other."""

    host: str = option(
        "127.0.0.1", "address to listen at; any but loopback needs a key", metavar="HOST",
        common=True,
    )  # fmt: skip
    port: int = option(8000, "TCP port; 0: any free port", low=0, high=65535, common=True)
    unix_socket: str | None = option(
        None, "listen at this Unix socket in place of a port", metavar="FILE"
    )
    served_model_name: tuple[str, ...] = option(
        (), 'what a request\'s "model" may say; repeatable (default: the last part of the model '
        "directory)", metavar="NAME", common=True,
    )  # fmt: skip
    api_key_file: str | None = option(
        None, f"file with keys, one per line, # for comments; or give them in {KEYS_VARIABLE}. It "
        "is read again upon SIGHUP", metavar="FILE", common=True,
    )  # fmt: skip
    tls_cert: str | None = option(None, "serve TLS with this certificate (PEM)", metavar="FILE")
    tls_key: str | None = option(None, "and this key (PEM)", metavar="FILE")
    allowed_origins: tuple[str, ...] = option(
        (), "pages of this site (such as https://HOST) may ask from a browser; *: of any; "
        "repeatable", metavar="ORIGIN",
    )  # fmt: skip
    open_metrics: bool = option(False, "/metrics, /status.json and /history.json need no key")
    request_log: str | None = option(
        None, "append a JSON line there for every request; -: to stdout", metavar="FILE"
    )
    max_queued_requests: int = option(
        1024, "more requests that wait for their first token are refused (429)", high=1 << 24, low=1
    )
    max_queued_tokens: int | None = option(
        None, "and more tokens of those, prompts and expected answers (default: 4 times what the "
        "KV caches hold)", low=1, high=1 << 40,
    )  # fmt: skip
    max_connections: int = option(4096, "more connections are refused", low=1, high=1 << 20)
    max_body_mb: float = option(
        8.0, "larger bodies are refused (413)", low=0.001, high=1024, unit="MiB", metavar="MIB"
    )
    header_timeout_s: float = _seconds(10.0, "time for a request's header")
    body_timeout_s: float = _seconds(60.0, "time for a request's body")
    write_timeout_s: float = _seconds(
        60.0,
        "cut off a client that takes nothing for this time; and an HTTP process that was stopped",
    )
    queue_timeout_s: float | None = _seconds(
        None, "end requests (503) whose first token takes longer (default: never)", 0.001
    )
    request_timeout_s: float | None = _seconds(
        None, "end requests that take longer (default: never)", 0.001
    )
    drain_timeout_s: float = _seconds(30.0, "upon SIGTERM, time for running requests to end", 0)
    stall_s: float = _seconds(60.0, "not healthy when there is work, but no step within this time")

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "served_model_name", tuple(self.served_model_name))
        for name in self.served_model_name:
            if not (1 <= len(name) <= 256 and name.isprintable()):
                raise ConfigError(
                    Given("served_model_name", name), " is not a name of 1 to 256 characters"
                )
        for origin in self.allowed_origins:
            if not re.fullmatch(r"\*|https?://[^/\s]+", origin):
                raise ConfigError(
                    Given("allowed_origins", origin), " is neither * nor like https://HOST"
                )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(Given("tls_cert"), " and ", Given("tls_key"), " go together")

    @property
    def is_loopback(self) -> bool:
        return self.unix_socket is not None or is_loopback(self.host)

    def names(self, model: str) -> tuple[str, ...]:
        name = hub_name(model)
        usual = (Path(os.path.abspath(model)).name,) if name is None else (name, Path(name).name)
        return self.served_model_name or usual


def is_loopback(host: str) -> bool:
    """Return True if a host's name or address is a loopback one."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def key_hashes(options: ServeOptions, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the SHA-256, in hex, of every key. If there is none, requests need no key.

    Raises ConfigError: If the file can't be read, or others may read it; a key is too short; or
    there is none though others can reach the address.
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
            raise refuse("it is not text (UTF-8)", number) from None
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
