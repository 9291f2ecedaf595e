"""Conversations in an SQLite file, which outlives the process.

A turn is written before its answer is given. Of a conversation that is over only a digest of
its id stays. SQLite detects pages that contradict each other, and a checksum damage within a turn.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from fastdecode.conversations import database
from fastdecode.conversations.turns import History, HistoryStep, Spelled, digest_of
from fastdecode.core.errors import ConfigError, FastDecodeError, Given
from fastdecode.core.model.files import MAX_TOKENIZER_BYTES, read_model_file

FILE: Final = "conversations.sqlite"
_KIND: Final = int.from_bytes(b"FDCV", "big")
_SCHEMA: Final = """
CREATE TABLE model (identity BLOB NOT NULL);
CREATE TABLE over (digest BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE turns (
    number INTEGER PRIMARY KEY, conversation BLOB NOT NULL, name BLOB NOT NULL,
    about BLOB NOT NULL, tokens BLOB NOT NULL, crc INTEGER NOT NULL
);
CREATE INDEX turns_of ON turns (conversation);
"""
_TURNS: Final = "SELECT * FROM turns ORDER BY number"
_UNREADABLE: Final = (LookupError, TypeError, ValueError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Kept:
    """A conversation between two turns."""

    history: History
    active_s: float
    """End of its last turn, in seconds since 1970."""
    salt: str = ""
    """Salt of its last turn's KV blocks, if that ran in this process."""


def identity_of(model: Path) -> bytes:
    """Return 32 bytes that change with the meaning of tokens."""
    digest = blake2b(digest_size=32)
    for name in ("config.json", "tokenizer.json"):
        path = model / name
        content = read_model_file(path, MAX_TOKENIZER_BYTES) if path.exists() else b""
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


class ConversationStore:
    """Conversations in a file, which is created if it is missing. Close it.

    Args:
        identity: ``identity_of`` the model. A file of another one is refused.
        counts: True for the name of a turn that counts. Other turns are deleted.
        option: Option that decides where the file is.
        sync_turns, sync_s: Turns, and seconds, after which all survive a power cut.

    Raises:
        ConfigError: If the file holds something else, belongs to another model or process, is
            damaged, or can't be used.
    """

    def __init__(
        self,
        path: Path,
        identity: bytes,
        *,
        counts: Callable[[str], bool] = lambda name: True,
        option: str = "conversations",
        sync_turns: int = 100,
        sync_s: float = 5.0,
    ) -> None:
        self._path, self._sync_turns, self._sync_s = path, sync_turns, sync_s
        self._num_unsynced, self._synced_s = 0, time.monotonic()
        self._is_closed = False
        with database.refusing(path, "conversations", Given(option)):
            self._database = database.Database(path, _KIND, _SCHEMA)
            try:
                execute = self._database.execute
                found = execute("SELECT identity FROM model").fetchone()
                if found is None:
                    execute("INSERT INTO model VALUES (?)", identity)
                elif found != (identity,):
                    text = f"{path} holds conversations with another model or tokenizer: use that "
                    raise ConfigError(text + "one, or give another ", Given(option))
                self.over = {digest for (digest,) in execute("SELECT digest FROM over")}
                """Digests of the ids that are over, as the file had them."""
                self.kept, names, dropped = _replay(execute(_TURNS), counts)
                """Conversations that the file had."""
                self.names = set(names)
                """Names of their turns."""
                with self._database.transaction():
                    for number in dropped:
                        execute("DELETE FROM turns WHERE number = ?", number)
                if dropped:
                    self._database.checkpoint()
            except BaseException:
                self._database.close()
                raise

    def append(
        self, conversation_id: str, name: str, history: History, step: HistoryStep, now_s: float
    ) -> None:
        """Write a turn. Raises FastDecodeError: (``output_failed``) If it can't be kept."""
        is_late = time.monotonic() - self._synced_s >= self._sync_s
        if is_late or self._num_unsynced >= self._sync_turns:
            self.sync()
        said = step.spelled
        about = {
            "kept": step.num_kept,
            "begun": history.begun.isoformat(),
            "at": now_s,
            "messages": step.messages,
            "spelled": None if said is None else [said.num_chars, said.digest.hex(), said.end],
        }
        tokens = array("i", step.token_ids).tobytes()
        row = _as_blob(conversation_id), _as_blob(name), json.dumps(about).encode(), tokens
        with self._writing():
            insert = "INSERT INTO turns VALUES (NULL, ?, ?, ?, ?, ?)"
            self._database.execute(insert, *row, _crc_of(*row))
        self._num_unsynced += 1

    def forget(self, conversation_ids: Sequence[str]) -> None:
        """End conversations. Nothing of them is left in the file when this returns."""
        with self._writing():
            for each in conversation_ids:
                self._database.execute("INSERT OR IGNORE INTO over VALUES (?)", digest_of(each))
                self._database.execute("DELETE FROM turns WHERE conversation = ?", _as_blob(each))
        self.sync()

    def sync(self) -> None:
        with _explaining(self._path):
            self._database.checkpoint()
        self._num_unsynced, self._synced_s = 0, time.monotonic()

    def close(self) -> None:
        """Let other processes use the file. Safe to call twice."""
        self._is_closed = True
        with _explaining(self._path):
            self._database.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        if self._is_closed:
            raise FastDecodeError("the conversations were closed", code="closed")
        with _explaining(self._path), self._database.transaction():
            yield


def _replay(
    rows: Iterable[tuple[Any, ...]], counts: Callable[[str], bool]
) -> tuple[dict[str, Kept], list[str], list[int]]:
    """Return conversations after the turns of these rows, names of the turns, and the numbers of
    rows that don't count. Raises sqlite3.DatabaseError: If a row is damaged, or continues from
    missing tokens."""
    kept: dict[str, Kept] = {}
    names: list[str] = []
    dropped: list[int] = []
    for number, *payload, crc in rows:
        try:
            if _crc_of(*payload) != crc:
                raise ValueError("checksum")
            conversation, name, about, tokens = payload
            conversation_id, name = _as_text(conversation), _as_text(name)
            fields = json.loads(about)
            spelled = None
            if fields["spelled"] is not None:
                num_chars, digest, end = fields["spelled"]
                spelled = Spelled(int(num_chars), bytes.fromhex(digest), str(end))
            messages, num_kept = tuple(fields["messages"]), int(fields["kept"])
            step = HistoryStep(num_kept, tuple(array("i", tokens)), messages, spelled)
            begun, active_s = datetime.fromisoformat(fields["begun"]), float(fields["at"])
        except _UNREADABLE:
            raise sqlite3.DatabaseError(f"turn {number} is damaged") from None
        if not counts(name):
            dropped.append(number)
            continue
        before = kept.get(conversation_id)
        history = History(begun) if before is None else before.history
        if not 0 <= num_kept <= len(history.token_ids):
            raise sqlite3.DatabaseError(f"turn {number} continues from missing tokens")
        kept[conversation_id] = Kept(history.then(step), active_s)
        names.append(name)
    return kept, names, dropped


@dataclass
class Contents:
    path: str
    num_bytes: int
    identity: str  # ``identity_of`` the model, as hexadecimal digits
    is_held: bool = False  # a process has the file open, so nothing below is known
    conversations: int = 0
    turns: int = 0
    tokens: int = 0  # sum of the conversations' current lengths
    over: int = 0  # conversations that have ended, of whose ids digests stay
    last_active_s: float | None = None  # end of the latest turn, in seconds since 1970
    damage: str | None = None


def file_of(place: Path) -> Path:
    """Return a directory's file, or ``place`` itself. Raises ConfigError: If none exists."""
    path = place / FILE if place.is_dir() else place
    if not path.is_file():
        raise ConfigError(f"there are neither conversations nor KV blocks in {place}")
    return path


def inspect(path: Path) -> Contents:
    """Read every turn of a file, without a model and without changing it. Raises ConfigError: If
    it holds no conversations, or can't be read."""
    with database.refusing(path, "conversations"):
        found = Contents(str(path), path.stat().st_size, "")
        kept: dict[str, Kept] = {}
        try:
            with database.reading(path, _KIND) as connection:
                database.check_whole(connection)
                rows = connection.execute("SELECT identity FROM model")
                found.identity = "".join(each.hex() for (each,) in rows)
                ((found.over,),) = connection.execute("SELECT count(*) FROM over")
                kept, names, _ = _replay(connection.execute(_TURNS), lambda name: True)
                found.turns = len(names)
        except BlockingIOError:
            found.is_held = True
        except sqlite3.OperationalError:
            raise
        except sqlite3.Error as error:
            found.damage = str(error)
    found.conversations = len(kept)
    found.tokens = sum(len(each.history.token_ids) for each in kept.values())
    found.last_active_s = max((each.active_s for each in kept.values()), default=None)
    return found


def clear(path: Path) -> None:
    """Overwrite and remove a file, damaged or whole. Raises ConfigError: If that fails."""
    with database.refusing(path, "conversations"):
        database.erase(path)


@contextlib.contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        text = f"can't write the conversations in {path}: {database.reason_of(error)}"
        raise FastDecodeError(text, code="output_failed") from None


def _crc_of(*columns: bytes) -> int:
    crc = 0
    for column in columns:
        crc = zlib.crc32(column, zlib.crc32(len(column).to_bytes(8, "little"), crc))
    return crc


def _as_blob(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _as_text(blob: bytes) -> str:
    return blob.decode(errors="surrogatepass")
