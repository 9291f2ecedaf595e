"""What a file of turns holds, for whoever looks after it: read without a model,
and without changing it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from fastdecode.conversations.conversations import digest_of
from fastdecode.conversations.records import (
    ERASED,
    HEAD,
    HEADER_BYTES,
    MAGIC,
    OVER,
    TURN,
    is_followed,
    is_held,
    open_alone,
    overwrite,
    read_records,
)
from fastdecode.conversations.turn_log import LoggedTurn, read_turn
from fastdecode.core.errors import ConfigError
from fastdecode.core.os_errors import explained

FILE = "turns.log"
"""In a directory of conversations."""


@dataclass
class Contents:
    """Of one file."""

    path: str
    num_bytes: int
    identity: str
    """Of model and tokenizer."""
    is_held: bool
    """A process goes on with it."""
    conversations: int = 0
    turns: int = 0
    """Of them."""
    tokens: int = 0
    """That they have come to."""
    over: int = 0
    """Conversations that are, whose ids are remembered as digests."""
    erased_bytes: int = 0
    torn_bytes: int = 0
    """At its end, as a crash leaves them; cut off when it is opened."""
    last_active_s: float | None = None
    """When a turn was over last, in seconds since 1970."""
    damage: list[str] = field(default_factory=list)
    """What no crash has left so."""


def file_of(place: Path) -> Path:
    """The file that a directory of conversations has, or the file itself.

    Raises:
        ConfigError: there is none.
    """
    path = place / FILE if place.is_dir() else place
    if not path.is_file():
        raise ConfigError(f"there are neither conversations nor KV blocks in {place}")
    return path


def inspect(path: Path) -> Contents:
    """Every record is read, and its checksum compared.

    Raises:
        ConfigError: it holds no conversations, or can't be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {explained(error)}") from None
    try:
        header = os.pread(fd, HEADER_BYTES, 0)
        if not header.startswith(MAGIC):
            raise ConfigError(f"{path} holds no conversations")
        identity = header[len(MAGIC) : len(MAGIC) + 32].hex()
        found = Contents(str(path), os.fstat(fd).st_size, identity, is_held(fd))
        _read(fd, found)
        return found
    finally:
        os.close(fd)


def clear(path: Path) -> None:
    """Every conversation is over: zeros, and then no file.

    Raises:
        ConfigError: a process goes on with it, or it can't be written.
    """
    fd = open_alone(path)
    try:
        overwrite(fd)
        path.unlink()
    except OSError as error:
        raise ConfigError(f"can't clear {path}: {explained(error)}") from None
    finally:
        os.close(fd)


def _read(fd: int, found: Contents) -> None:
    lengths: dict[str, int] = {}
    turns: dict[str, int] = {}
    end = HEADER_BYTES
    for kind, place, payload in read_records(fd):
        end = place + HEAD.size + len(payload)
        if kind == OVER:
            found.over += 1
            for whose in [each for each in lengths if digest_of(each) == payload]:
                del lengths[whose], turns[whose]
        elif kind == ERASED:
            found.erased_bytes += HEAD.size + len(payload)
        elif (turn := _turn(kind, payload)) is None:
            found.damage.append(f"byte {place}: no turn, though its checksum is right")
        elif not 0 <= turn.step.num_kept <= lengths.get(turn.conversation_id, 0):
            found.damage.append(f"byte {place}: goes on from tokens that aren't there")
        else:
            whose = turn.conversation_id
            lengths[whose] = turn.step.num_kept + len(turn.step.token_ids)
            turns[whose] = turns.get(whose, 0) + 1
            found.last_active_s = max(found.last_active_s or 0.0, turn.at_s)
    found.torn_bytes = found.num_bytes - end
    if found.torn_bytes and is_followed(fd, end):
        found.damage.append(f"byte {end}: no whole record, and whole ones behind it")
    found.conversations, found.turns = len(lengths), sum(turns.values())
    found.tokens = sum(lengths.values())


def _turn(kind: int, payload: bytes) -> LoggedTurn | None:
    """None: it is none."""
    if kind == TURN:
        with contextlib.suppress(
            LookupError, TypeError, ValueError, ArithmeticError, RecursionError
        ):
            return read_turn(payload)
    return None
