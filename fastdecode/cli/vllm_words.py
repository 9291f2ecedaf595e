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
"""vLLM's name of a server's option → the name here."""
_DONE_ANYWAY: Final = (
    "enable_auto_tool_choice", "disable_log_requests", "disable_fastapi_docs",
    "disable_frontend_multiprocessing", "enable_request_id_headers", "enable_prompt_tokens_details",
    "disable_uvicorn_access_log",
)  # fmt: skip
"""Switches of vLLM's server that ask for what happens here without them."""
_MISSING: Final = "\0"
_SWITCHES: Final = ("enable_prefix_caching", "enforce_eager", *_DONE_ANYWAY)
_BY_VALUE: Final = ("dtype", "load_format")
"""Options of the same name whose values may be vLLM's."""


def as_here(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return a command line with vLLM's options by their names here.

    Args:
        flags: of the command; they stay as they are.

    Raises:
        ConfigError: If there is nothing like an option of vLLM here.
    """
    made: list[str] = []
    waiting = iter(words)
    for word in waiting:
        if word == "--":
            return [*made, word, *waiting]
        flag, has_value, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        name = name.removeprefix("no_") if flag.startswith("--no-") else name
        if flag == "--api-key" and "--api-key-file" in flags:
            why = " would show the key to everybody on this host: use --api-key-file FILE"
            raise ConfigError(Given("api_key"), why)
        if not flag.startswith("--") or not _is_vllms(name, flag, flags):
            made.append(word)
            continue
        if _is_switch(name):
            given: Any = not flag.startswith("--no-")
        else:
            given = _value(value if has_value else next(waiting, _MISSING))
            if given == _MISSING:
                raise ConfigError(Given(name), " needs a value behind it")
        made += _said(name, given, words, flags)
    return made


def _is_vllms(name: str, flag: str, flags: Collection[str]) -> bool:
    if flag in flags:
        return name in _BY_VALUE
    if name in _SERVER_NAMES:
        return _flag(_SERVER_NAMES[name]) in flags
    return name in OPTION_NAMES or name in OPTIONS_NOT_SUPPORTED or name in _DONE_ANYWAY


def _is_switch(name: str) -> bool:
    nothing, _ = OPTIONS_NOT_SUPPORTED.get(name, ((), ""))
    return name in _SWITCHES or any(isinstance(value, bool) for value in nothing)


def _said(name: str, given: Any, words: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return an option of vLLM as words of a command line here."""
    if name in _DONE_ANYWAY:
        return []
    if name in _SERVER_NAMES:
        return [f"{_flag(_SERVER_NAMES[name])}={given}"]
    model = str(given) if words.count(str(given)) > 1 else ""  # the tokenizer is the model's
    known = {flag[2:].replace("-", "_") for flag in flags}
    here = engine_options({name: given}, known, model)
    return [f"{_flag(each)}={value}" for each, value in here.items()]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _value(text: str) -> Any:
    """Return a value as Python's API would have it."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text
