"""Messages whose fields are anything: as an instance or a controller would send them that means
harm. On the wire they look like the messages that they are named after."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins

from fastdecode.core.errors import FastDecodeError
from fastdecode.wire.traits import Message


class RawSubmit(Message, frozen=True, tag=130):
    requests: Any
    every_step: Any = True

    is_long = True


class RawDeltas(Message, frozen=True, tag=194):
    deltas: Any

    is_long = True


def said(message: Any) -> Any:
    """Return a message's or a value's fields in builtin types, to be changed."""

    def plain(error: FastDecodeError) -> list[str]:
        return [type(error).__name__, error.message, error.code]

    return to_builtins(message, enc_hook=plain)
