"""A file that conversations outlive a process in: a record a turn, appended
(``records``).

A record that was not written to its end ends the file: it is cut off there. If
whole ones come behind it, no crash has left it so, and the file is refused: to
cut it there would make conversations begin anew. What is forgotten gets its new
head first, so that a crash leaves a record whatever the zeros have reached. One
process at a time holds the file, by ``flock``; only its owner may read it.

Where more has been forgotten than is left, the file is written anew without it
(``compaction``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fastdecode.conversations.compaction import leave_nothing_beside, written_anew
from fastdecode.conversations.conversations import Kept, digest_of
from fastdecode.conversations.history import History, HistoryStep, Spelled
from fastdecode.conversations.records import (
    ERASED,
    HEAD,
    HEADER_BYTES,
    MAGIC,
    MAX_RECORD_BYTES,
    OVER,
    TURN,
    is_followed,
    make_head,
    make_record,
    open_alone,
    read_records,
    write_at,
)
from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.core.model.files import MAX_TOKENIZER_BYTES, read_model_file
from fastdecode.core.os_errors import explained

logger = logging.getLogger(__name__)


def identity_of(model: Path) -> bytes:
    """What the meaning of tokens depends on. Raises CheckpointError."""
    digest = blake2b(digest_size=32)
    for name in ("config.json", "tokenizer.json"):
        path = model / name
        content = read_model_file(path, MAX_TOKENIZER_BYTES) if path.exists() else b""
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


@dataclass(frozen=True)
class LoggedTurn:
    """A turn as a record has it."""

    conversation_id: str
    name: str
    begun: datetime
    at_s: float
    """When it was over, in seconds since 1970."""
    step: HistoryStep


def read_turn(payload: bytes) -> LoggedTurn:
    """Of a record. Raises LookupError, TypeError, ValueError, ArithmeticError or
    RecursionError: it is none."""
    num_said = int.from_bytes(payload[:4], "little")
    about = json.loads(payload[4 : 4 + num_said])
    tokens = array("i", payload[4 + num_said :])
    spelled = None if about["spelled"] is None else _from_json(about["spelled"])
    step = HistoryStep(about["kept"], tuple(tokens), tuple(about["messages"]), spelled)
    begun = datetime.fromisoformat(about["begun"])
    return LoggedTurn(about["id"], about["turn"], begun, about["at"], step)


class TurnLog:
    """See the module. Close it.

    Args:
        path: of the file, which is made if there is none.
        identity: 32 bytes; a file of another one is refused.
        counts: whether a turn of this name counts; those that don't are
            forgotten.
        sync_turns: fsync after so many turns,
        sync_s: or so many seconds after the last time.
        worth_bytes: as many forgotten bytes are worth writing the file anew,
            if they are more than half of it.

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
        worth_bytes: int = 1 << 20,
    ) -> None:
        self._path = path
        self._sync_turns, self._sync_s = sync_turns, sync_s
        self._worth_bytes = worth_bytes
        self._num_erased = 0
        """Bytes in which there is nothing any more."""
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
        self._fd: int | None = open_alone(path)
        leave_nothing_beside(path)
        # Whoever can't be reached any more holds nothing either.
        self._let_go = weakref.finalize(self, os.close, self._fd)
        try:
            self._end = self._begin(self._fd, identity)
            self._recover(self._fd, counts)
            self._compact()
        except OSError as error:
            self._drop()
            raise ConfigError(f"can't keep conversations in {path}: {explained(error)}") from None
        except BaseException:
            self._drop()
            raise

    def recovered(self) -> tuple[dict[str, Kept], set[bytes]]:
        """See ``TurnStore``. To be asked once."""
        found, self._kept = self._kept, {}
        return found, self._over

    def append(
        self, conversation_id: str, name: str, history: History, step: HistoryStep, now_s: float
    ) -> None:
        """A conversation has had a turn.

        Raises:
            FastDecodeError: (code ``output_failed``) the disk is full, or gone;
                nothing of the turn is kept.
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
        place = self._write(TURN, payload)
        self._num_unsynced += 1
        is_late = time.monotonic() - self._synced_s >= self._sync_s
        if self._num_unsynced >= self._sync_turns or is_late:
            try:
                self.sync()
            except FastDecodeError:
                self._take_back(place)
                raise
        self._places.setdefault(conversation_id, []).append((place, len(payload)))

    def forget(self, conversation_ids: Sequence[str]) -> None:
        """These conversations are over, and nothing of them is left in the file
        when this returns."""
        for conversation_id in conversation_ids:
            self._write(OVER, digest_of(conversation_id))
        self.sync()
        self._erase([place for each in conversation_ids for place in self._places.get(each, [])])
        for conversation_id in conversation_ids:
            self._places.pop(conversation_id, None)
        self._compact()

    def sync(self) -> None:
        """Have what was written survive a power cut."""
        if self._fd is not None:
            with _told_of(self._path):
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
        for kind, place, payload in read_records(fd):
            self._end = place + HEAD.size + len(payload)
            if kind == OVER:
                self._over.add(payload)
                whose = self._whose.pop(payload, "")
                self._kept.pop(whose, None)
                gone += self._places.pop(whose, [])
            elif (kind == TURN and not self._taken(place, payload, counts)) or (
                kind == ERASED and any(payload)
            ):
                gone.append((place, len(payload)))
            elif kind == ERASED:
                self._num_erased += HEAD.size + len(payload)
        num_torn = os.fstat(fd).st_size - self._end
        if num_torn:
            if is_followed(fd, self._end):
                raise _damaged(self._path, self._end)
            logger.warning("%s ends in %d bytes of no turn: cut off", self._path, num_torn)
            os.ftruncate(fd, self._end)
        self._erase(gone)

    def _taken(self, place: int, payload: bytes, counts: Callable[[str], bool]) -> bool:
        try:
            return self._take(place, payload, counts)
        except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
            raise _damaged(self._path, place) from None

    def _take(self, place: int, payload: bytes, counts: Callable[[str], bool]) -> bool:
        """A turn that was found. Returns whether it counts."""
        turn = read_turn(payload)
        conversation_id, step = turn.conversation_id, turn.step
        if digest_of(conversation_id) in self._over or not counts(turn.name):
            return False
        kept = self._kept.get(conversation_id)
        history = History(turn.begun) if kept is None else kept.history
        if not 0 <= step.num_kept <= len(history.token_ids):
            raise ValueError("it continues from tokens that are missing")
        self._kept[conversation_id] = Kept(history.then(step), turn.at_s)
        self._places.setdefault(conversation_id, []).append((place, len(payload)))
        self._whose[digest_of(conversation_id)] = conversation_id
        self.names.add(turn.name)
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
        place, record = self._end, make_record(kind, payload)
        with _told_of(self._path):
            try:
                write_at(self._fd, record, place)
            except OSError:
                self._take_back(place)
                raise
        self._end += len(record)
        return place

    def _take_back(self, place: int) -> None:
        """Nothing was written from this place on."""
        assert self._fd is not None, "closed"
        self._end = place
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, place)

    def _compact(self) -> None:
        """Write the file anew, if that is worth it. Where there is no room for
        another one it stays as it is."""
        assert self._fd is not None, "closed"
        if self._num_erased < max(self._worth_bytes, self._end // 2):
            return
        try:
            fd, end, moved = written_anew(self._path, self._fd)
        except OSError as error:
            logger.warning("%s could not be compacted: %s", self._path, error.strerror)
            return
        self._let_go()
        self._fd, self._end, self._num_erased = fd, end, 0
        self._let_go = weakref.finalize(self, os.close, fd)
        for places in self._places.values():
            places[:] = [(moved[place], num_bytes) for place, num_bytes in places]

    def _erase(self, places: list[tuple[int, int]]) -> None:
        """Nothing of these records is left when this returns."""
        if not places:
            return
        assert self._fd is not None, "closed"
        with _told_of(self._path):
            for place, num_bytes in places:
                write_at(self._fd, make_head(ERASED, num_bytes), place)
                self._num_erased += HEAD.size + num_bytes
        self.sync()
        with _told_of(self._path):
            for place, num_bytes in places:
                write_at(self._fd, bytes(num_bytes), place + HEAD.size)
        self.sync()


@contextlib.contextmanager
def _told_of(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FastDecodeError(
            f"can't write the conversations in {path}: {explained(error)}", code="output_failed"
        ) from None


def _damaged(path: Path, place: int) -> ConfigError:
    return ConfigError(
        f"{path} is damaged at byte {place}, and not as a crash leaves it: restore the file, or "
        "name another place for conversations"
    )


def _as_json(spelled: Spelled | None) -> list[Any] | None:
    return None if spelled is None else [spelled.num_chars, spelled.digest.hex(), spelled.end]


def _from_json(said: list[Any]) -> Spelled:
    num_chars, digest, end = said
    return Spelled(int(num_chars), bytes.fromhex(digest), str(end))
