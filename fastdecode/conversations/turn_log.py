"""A file that conversations outlive a process in: a record a turn, appended.

::

    0    magic, identity of model and tokenizer, zeros to 64 bytes
    64   records: length and kind of what follows, CRC-32 of both and of it (12
         bytes, little endian), then
           a turn: length of JSON (4 bytes), JSON, the tokens added (int32)
           a conversation that is over: the digest of its id
           nothing any more: zeros, in the place of what is forgotten; the
           checksum is of length and kind alone

A record that was not written to its end ends the file: it is cut off there. If
whole ones come behind it, no crash has left it so, and the file is refused: to
cut it there would make conversations begin anew. What is forgotten gets its new
head first, so that a crash leaves a record whatever the zeros have reached. One
process at a time holds the file, by ``flock``; only its owner may read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import struct
import time
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from fastdecode.conversations.conversations import Kept, digest_of
from fastdecode.conversations.history import History, Spelled, Step
from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.core.model.files import MAX_TOKENIZER_BYTES, read_model_file

logger = logging.getLogger(__name__)

MAGIC: Final = b"FDTURNS\x02"
HEADER_BYTES: Final = 64
MAX_RECORD_BYTES: Final = 1 << 28
_HEAD = struct.Struct("<III")
_ERASED, _TURN, _OVER = 0, 1, 2
_SIGN: Final = b'{"id": '
"""What turns begin with, behind their heads and the length of their JSON; no
JSON has it within."""
_WINDOW_BYTES: Final = 1 << 20


def identity_of(model: Path) -> bytes:
    """What the meaning of tokens depends on. Raises CheckpointError."""
    digest = blake2b(digest_size=32)
    for name in ("config.json", "tokenizer.json"):
        path = model / name
        content = read_model_file(path, MAX_TOKENIZER_BYTES) if path.exists() else b""
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


class TurnLog:
    """See the module. Close it.

    Args:
        path: of the file, which is made if there is none.
        identity: 32 bytes; a file of another one is refused.
        counts: whether a turn of this name counts; those that don't are
            forgotten.
        sync_turns: fsync after so many turns,
        sync_s: or so many seconds after the last time.

    Raises:
        ConfigError: it is no such file, of another model, held by another
            process, or can't be used.
    """

    def __init__(
        self,
        path: Path,
        identity: bytes,
        *,
        counts: Callable[[str], bool] = lambda name: True,
        sync_turns: int = 100,
        sync_s: float = 5.0,
    ) -> None:
        self._path = path
        self._sync_turns, self._sync_s = sync_turns, sync_s
        self._num_unsynced = 0
        self._synced_s = time.monotonic()
        self._places: dict[str, list[tuple[int, int]]] = {}
        """Of each conversation's records: where, and their lengths."""
        self._kept: dict[str, Kept] = {}
        self._over: set[bytes] = set()
        self._whose: dict[bytes, str] = {}
        """Digest → the id, of conversations that were found."""
        self.names: set[str] = set()
        """Of the turns that were found."""
        self._fd: int | None = _open(path)
        # Whoever can't be reached any more holds nothing either.
        self._let_go = weakref.finalize(self, os.close, self._fd)
        try:
            self._end = self._begin(self._fd, identity)
            self._recover(self._fd, counts)
        except OSError as error:
            self._drop()
            raise ConfigError(f"can't keep conversations in {path}: {error.strerror}") from None
        except BaseException:
            self._drop()
            raise

    def recovered(self) -> tuple[dict[str, Kept], set[bytes]]:
        """See ``TurnStore``. To be asked once."""
        found, self._kept = self._kept, {}
        return found, self._over

    def append(
        self, conversation_id: str, name: str, history: History, step: Step, now_s: float
    ) -> None:
        """A conversation has had a turn.

        Raises:
            FastDecodeError: (code ``output_failed``) the disk is full, or gone.
        """
        about = {
            "id": conversation_id,
            "turn": name,
            "kept": step.num_kept,
            "begun": history.begun.isoformat(),
            "at": now_s,
            "messages": step.messages,
            "spelled": _as_json(step.spelled),
        }
        said = json.dumps(about).encode()
        payload = len(said).to_bytes(4, "little") + said + array("i", step.token_ids).tobytes()
        place = self._write(_TURN, payload)
        self._places.setdefault(conversation_id, []).append((place, len(payload)))
        self._num_unsynced += 1
        is_late = time.monotonic() - self._synced_s >= self._sync_s
        if self._num_unsynced >= self._sync_turns or is_late:
            self.sync()

    def forget(self, conversation_ids: Sequence[str]) -> None:
        """These conversations are over, and nothing of them is left in the file
        when this returns."""
        for conversation_id in conversation_ids:
            self._write(_OVER, digest_of(conversation_id))
        self.sync()
        self._erase([place for each in conversation_ids for place in self._places.get(each, [])])
        for conversation_id in conversation_ids:
            self._places.pop(conversation_id, None)

    def sync(self) -> None:
        """Have what was written survive a power cut."""
        if self._fd is not None:
            with self._told_as_ours():
                os.fsync(self._fd)
        self._num_unsynced = 0
        self._synced_s = time.monotonic()

    def close(self) -> None:
        """Sync, and let go of the file. Safe to call twice."""
        if self._fd is None:
            return
        try:
            self.sync()
        finally:
            self._drop()

    def _drop(self) -> None:
        self._fd = None
        self._let_go()

    def _begin(self, fd: int, identity: bytes) -> int:
        """Where the records begin: of an empty file, after the header that it
        gets."""
        assert len(identity) == 32
        header = (MAGIC + identity).ljust(HEADER_BYTES, b"\0")
        found = os.pread(fd, HEADER_BYTES, 0)
        if len(found) < HEADER_BYTES and header.startswith(found):
            os.pwrite(fd, header, 0)
        elif found[: len(MAGIC)] != MAGIC:
            raise ConfigError(f"{self._path} holds no conversations: name another place for them")
        elif found != header:
            raise ConfigError(
                f"{self._path} holds conversations with another model or tokenizer: use that one, "
                "or name another place for them"
            )
        with contextlib.suppress(PermissionError):  # a file system without modes
            os.fchmod(fd, 0o600)
        return HEADER_BYTES

    def _recover(self, fd: int, counts: Callable[[str], bool]) -> None:
        """Take in what is there, and cut a torn end off."""
        gone: list[tuple[int, int]] = []
        for kind, place, payload in _records(fd):
            self._end = place + _HEAD.size + len(payload)
            if kind == _OVER:
                self._over.add(payload)
                whose = self._whose.pop(payload, "")
                self._kept.pop(whose, None)
                gone += self._places.pop(whose, [])
            elif (kind == _TURN and not self._taken(place, payload, counts)) or (
                kind == _ERASED and any(payload)
            ):
                gone.append((place, len(payload)))
        num_torn = os.fstat(fd).st_size - self._end
        if num_torn:
            if _is_followed(fd, self._end):
                raise self._damaged(self._end)
            logger.warning("%s ends in %d bytes of no turn: cut off", self._path, num_torn)
            os.ftruncate(fd, self._end)
        self._erase(gone)

    def _taken(self, place: int, payload: bytes, counts: Callable[[str], bool]) -> bool:
        try:
            return self._take(place, payload, counts)
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
            raise self._damaged(place) from None

    def _damaged(self, place: int) -> ConfigError:
        return ConfigError(
            f"{self._path} is damaged at byte {place}, and not as a crash leaves it: restore the "
            "file, or name another place for conversations"
        )

    def _take(self, place: int, payload: bytes, counts: Callable[[str], bool]) -> bool:
        """A turn that was found. Returns whether it counts."""
        num_said = int.from_bytes(payload[:4], "little")
        about = json.loads(payload[4 : 4 + num_said])
        conversation_id, name = about["id"], about["turn"]
        if digest_of(conversation_id) in self._over or not counts(name):
            return False
        tokens = array("i", payload[4 + num_said :])
        spelled = None if about["spelled"] is None else _from_json(about["spelled"])
        step = Step(about["kept"], tuple(tokens), tuple(about["messages"]), spelled)
        kept = self._kept.get(conversation_id)
        history = History(datetime.fromisoformat(about["begun"])) if kept is None else kept.history
        if not 0 <= step.num_kept <= len(history.token_ids):
            raise ValueError("it goes on from tokens that aren't there")
        self._kept[conversation_id] = Kept(history.then(step), about["at"])
        self._places.setdefault(conversation_id, []).append((place, len(payload)))
        self._whose[digest_of(conversation_id)] = conversation_id
        self.names.add(name)
        return True

    def _write(self, kind: int, payload: bytes) -> int:
        """Append a record. Returns where it is."""
        if self._fd is None:
            raise FastDecodeError("the conversations were closed", code="closed")
        if len(payload) > MAX_RECORD_BYTES:
            raise FastDecodeError(
                f"a turn of {len(payload)} bytes is too long to be kept in {self._path}",
                code="output_failed",
            )
        place, record = self._end, _record(kind, payload)
        with self._told_as_ours():
            try:
                _write_at(self._fd, record, place)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, place)
                raise
        self._end += len(record)
        return place

    def _erase(self, places: list[tuple[int, int]]) -> None:
        """Nothing of these records is left when this returns."""
        if not places:
            return
        assert self._fd is not None, "closed"
        with self._told_as_ours():
            for place, num_bytes in places:
                _write_at(self._fd, _head(_ERASED, num_bytes), place)
        self.sync()
        with self._told_as_ours():
            for place, num_bytes in places:
                _write_at(self._fd, bytes(num_bytes), place + _HEAD.size)
        self.sync()

    @contextlib.contextmanager
    def _told_as_ours(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FastDecodeError(
                f"can't write the conversations in {self._path}: {error.strerror}",
                code="output_failed",
            ) from None


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise ConfigError(f"can't keep conversations in {path}: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(
            f"another process keeps conversations in {path}: wait for it to end, or name another "
            "place"
        ) from None
    except OSError:
        pass  # a file system without locks; then whoever runs two at once has to know
    return fd


def _record(kind: int, payload: bytes) -> bytes:
    return _head(kind, len(payload), payload) + payload


def _head(kind: int, num_bytes: int, payload: bytes = b"") -> bytes:
    checked = b"" if kind == _ERASED else payload
    crc = zlib.crc32(checked, zlib.crc32(struct.pack("<II", num_bytes, kind)))
    return _HEAD.pack(num_bytes, kind, crc)


def _records(fd: int) -> Iterator[tuple[int, int, bytes]]:
    """Each record's kind, place and payload, up to the first that isn't whole."""
    place = HEADER_BYTES
    while (record := _record_at(fd, place)) is not None:
        kind, payload = record
        yield kind, place, payload
        place += _HEAD.size + len(payload)


def _record_at(fd: int, place: int) -> tuple[int, bytes] | None:
    """A record's kind and payload; None: there is no whole one."""
    head = os.pread(fd, _HEAD.size, place)
    if len(head) < _HEAD.size:
        return None
    num_bytes, kind, _ = _HEAD.unpack(head)
    if num_bytes > MAX_RECORD_BYTES:
        return None
    payload = os.pread(fd, num_bytes, place + _HEAD.size)
    if len(payload) < num_bytes or _head(kind, num_bytes, payload) != head:
        return None
    return kind, payload


def _is_followed(fd: int, place: int) -> bool:
    """Whether there is a whole turn anywhere behind this place."""
    at = place + 1
    while window := os.pread(fd, _WINDOW_BYTES, at):
        found = window.find(_SIGN)
        if found < 0:
            at += max(1, len(window) - len(_SIGN) + 1)
            continue
        begin = at + found - _HEAD.size - 4
        if begin > place and _record_at(fd, begin) is not None:
            return True
        at += found + 1
    return False


def _write_at(fd: int, data: bytes, place: int) -> None:
    num_written = 0
    while num_written < len(data):
        num_written += os.pwrite(fd, data[num_written:], place + num_written)


def _as_json(spelled: Spelled | None) -> list[Any] | None:
    return None if spelled is None else [spelled.num_chars, spelled.digest.hex(), spelled.end]


def _from_json(said: list[Any]) -> Spelled:
    num_chars, digest, end = said
    return Spelled(int(num_chars), bytes.fromhex(digest), str(end))
