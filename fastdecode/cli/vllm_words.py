"""Command lines for ``vllm serve``: its options by the names and values that they have here."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, Final

from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.vllm_names import OPTION_NAMES, OPTIONS_NOT_SUPPORTED, engine_options

_SERVER_NAMES: Final = {
    "ssl_keyfile": "tls_key",
    "ssl_certfile": "tls_cert",
    "uds": "unix_socket",
    "tool_call_parser": "tool_parser",
}
_DONE_ANYWAY: Final = ("enable_auto_tool_choice", "disable_log_requests")
"""Switches of vLLM's server that ask for what happens here without them."""
_SWITCHES: Final = ("enable_prefix_caching", "enforce_eager", *_DONE_ANYWAY)
_BY_VALUE: Final = ("dtype", "load_format")  # options whose values may be vLLM's


def as_here(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return a command line with vLLM's options by their names here. Raises ConfigError: If there
    is nothing like one of them here."""
    known = {flag[2:].replace("-", "_") for flag in flags}
    made: list[str] = []
    waiting = iter(words)
    for word in waiting:
        if word == "--":
            return [*made, word, *waiting]
        flag, has_value, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        name = name.removeprefix("no_") if flag.startswith("--no-") else name
        if flag == "--api-key" and "api_key_file" in known:
            why = " would show the key to all users of this host. Use --api-key-file FILE"
            raise ConfigError(Given("api_key"), why)
        if not flag.startswith("--") or not _is_vllms(name, flag in flags, known):
            made.append(word)
            continue
        nothing, _ = OPTIONS_NOT_SUPPORTED.get(name, ((), ""))
        given: Any = not flag.startswith("--no-")
        if name not in _SWITCHES and not any(isinstance(each, bool) for each in nothing):
            given = value if has_value else next(waiting, None)
            if given is None:
                raise ConfigError(Given(name), " needs a value behind it")
            with suppress(ValueError, RecursionError):
                given = json.loads(given)
        if name in _SERVER_NAMES:
            made.append(_said(_SERVER_NAMES[name], given))
        elif name not in _DONE_ANYWAY:
            # The tokenizer may be named if it is the model's.
            model = str(given) if words.count(str(given)) > 1 else ""
            made += [_said(*each) for each in engine_options({name: given}, known, model).items()]
    return made


def _is_vllms(name: str, is_here: bool, known: Collection[str]) -> bool:
    if is_here:
        return name in _BY_VALUE
    if name in _SERVER_NAMES:
        return _SERVER_NAMES[name] in known
    return name in OPTION_NAMES or name in OPTIONS_NOT_SUPPORTED or name in _DONE_ANYWAY


def _said(name: str, value: object) -> str:
    return f"--{name.replace('_', '-')}={value}"
