"""A batch job's session: what another process tells R-workers to resume the job.

R-workers keep K and V, and know no tokens. So an SQLite file beside the output has the tokens of
every unfinished sequence and its name at each holder: a record per start, and one per step.

The session's number is a secret: a process that has it can take the job's caches over. So only
the owner may read the file. Without the file, or with less of it, a job resumes and recomputes:
every token is drawn alike. What the file says of tokens is taken as drawn.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastdecode.conversations import database
from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import HolderId, Part, PartId, SequenceId
from fastdecode.core.os_errors import explained
from fastdecode.core.resuming import BegunRequest, HeldSequence, begun_requests, known_tokens
from fastdecode.core.sequence import Sequence as TokenSequence

logger = logging.getLogger(__name__)

_KIND: Final = int.from_bytes(b"FDS2", "big")
_SCHEMA: Final = "CREATE TABLE records (number INTEGER PRIMARY KEY, about TEXT, tokens BLOB);"
"""In order of time. The first record describes the session, without tokens. That of a start
describes a sequence and has its tokens so far (int32). That of a step describes nothing and has
sequences (int64), their lengths before the token (int32), and tokens (int32)."""
_UNREADABLE: Final = (
    LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError,
)  # fmt: skip
_TOKEN_BYTES: Final = 16
Addresses = tuple[str, ...]
"""R-workers that keep one holder."""


def session_path(output: Path) -> Path:
    return output.with_name(output.name + ".session")


@dataclass(frozen=True)
class _Recorded:
    """Content of a session's file."""

    number: int
    addresses: Sequence[Addresses] = ()
    num_replicas: int = 0
    held: Sequence[HeldSequence] = ()


class JobSession:
    """A ``fastdecode.core.resuming.Session`` in a file.

    Args:
        addresses: R-workers of each holder, in the order of holders.
        num_replicas: Replicas of each cache. They decide how much memory a cache has, so a
            session with another number is not resumed.
        counts: True if a request of this id is unfinished. None to resume no request.
        max_more_bytes: Bytes that may be written before finished sequences are removed, or as
            many as were left after the last time.

    Raises:
        ConfigError: If the file can't be written, or belongs to another user.
    """

    def __init__(
        self,
        path: Path,
        addresses: Sequence[Addresses],
        counts: Callable[[str], bool] | None,
        *,
        num_replicas: int = 0,
        max_more_bytes: int = 16 << 20,
    ) -> None:
        self._max_more_bytes = max_more_bytes
        self._path = path
        self._addresses = list(addresses)
        self._num_replicas = num_replicas
        self._num_bytes = self._num_condensed_bytes = 0
        self._num_known: dict[SequenceId, int] = {}
        """Recorded tokens of the sequences that have started."""
        self._database: database.Database | None = self._open()
        found = self._read(self._database)
        before = found or _Recorded(1 + secrets.randbelow((1 << 63) - 1))
        self.number: int = before.number
        """The secret of an output, kept when the output is begun again."""
        self.held: list[HeldSequence] = []
        fits = before.num_replicas == num_replicas
        self.is_resumed = found is not None and counts is not None and fits
        if counts is not None:
            # KV of holders whose R-workers have other addresses is not there.
            pairs = enumerate(zip(before.addresses, addresses, strict=False))
            same = {holder for holder, (was, now) in pairs if fits and was == now}
            for each in before.held:
                if counts(each.request_id):
                    parts = tuple(part for part in each.parts if part.holder in same)
                    self.held.append(replace(each, parts=parts))
        self.begun: dict[str, BegunRequest] = begun_requests(self.held)
        if found is None:
            try:
                self._write(())
            except sqlite3.Error as error:
                raise ConfigError(f"can't write {path}: {error}") from None

    def begin(self) -> None:
        """Record that this process resumes what was held, under names that it gives.

        Raises:
            ConfigError: If the file can neither be written nor removed. Its names are stale.
        """
        try:
            self._write(())
            assert self._database is not None
            self._database.checkpoint()
        except sqlite3.Error as error:
            logger.warning(
                "%s can't be written (%s): a run that resumes this job will recompute all",
                self._path, error,
            )  # fmt: skip
            self._drop()
            try:
                database.remove(self._path)
            except OSError as left:
                raise ConfigError(
                    f"can't write {self._path}: {explained(left)}. Remove it, or make room"
                ) from None

    def place(self, sequence: TokenSequence) -> None:
        held = _held_of(sequence)
        self._num_known[sequence.sequence_id] = len(held.token_ids)
        self._try(lambda: self._insert_start(sequence.sequence_id, held))

    def add(self, sequences: Iterable[TokenSequence]) -> None:
        ids: list[int] = []
        places: list[int] = []
        tokens: list[int] = []
        known = self._num_known
        for sequence in sequences:
            first = known.get(sequence.sequence_id)
            if first is None:
                continue
            for place in range(first, len(sequence.token_ids) - sequence.is_coming):
                ids.append(sequence.sequence_id)
                places.append(place)
                tokens.append(sequence.token_ids[place])
                known[sequence.sequence_id] = place + 1
        if ids:
            columns = np.array(ids, "<i8").tobytes() + _int32(places) + _int32(tokens)
            self._try(lambda: self._insert(None, columns))

    @property
    def is_long(self) -> bool:
        more = self._num_bytes - self._num_condensed_bytes
        limit = max(self._max_more_bytes, self._num_condensed_bytes)
        return self._database is not None and more > limit

    def condense(self, sequences: Iterable[TokenSequence]) -> None:
        every = list(sequences)
        self._num_known = {x.sequence_id: len(known_tokens(x)) for x in every}
        self._try(lambda: self._write(every))

    def close(self, *, is_over: bool) -> None:
        """Let other processes use the file. If the job ``is_over``, remove it."""
        self._drop()
        if is_over:
            database.remove(self._path)

    def _open(self) -> database.Database:
        """Open the file, in place of one that is damaged or another program's."""
        try:
            try:
                return database.Database(self._path, _KIND, _SCHEMA)
            except sqlite3.OperationalError:  # a full disk, for example: the file may be whole
                raise
            except (database.OtherFileError, sqlite3.DatabaseError):
                logger.warning("%s is damaged: R-workers' caches can't be resumed", self._path)
                database.remove(self._path)
                return database.Database(self._path, _KIND, _SCHEMA)
        except BlockingIOError:
            raise ConfigError(f"another process uses {self._path}: wait for it to end") from None
        except OSError as error:
            raise ConfigError(
                f"{self._path} is not a file of this user's ({explained(error)}): remove it"
            ) from None
        except sqlite3.Error as error:
            raise ConfigError(f"can't write {self._path}: {error}") from None

    def _read(self, opened: database.Database) -> _Recorded | None:
        """Return what the file says. None if it is new or damaged."""
        try:
            return _recorded(opened.execute("SELECT about, tokens FROM records ORDER BY number"))
        except (*_UNREADABLE, sqlite3.Error):
            logger.warning("%s is damaged: R-workers' caches can't be resumed", self._path)
            return None

    def _write(self, sequences: Iterable[TokenSequence]) -> None:
        """Replace the content: ``sequences``, and held ones that have not been submitted yet.
        Holders know the KV of those by other names now, so they have no parts.

        Raises:
            sqlite3.Error: If it can't be written. The content is what it was.
        """
        assert self._database is not None
        every = list(sequences)
        submitted = {sequence.request.request_id for sequence in every}
        session = {
            "session": self.number,
            "addresses": self._addresses,
            "replicas": self._num_replicas,
        }
        self._num_bytes = 0
        with self._database.transaction():
            self._database.execute("DELETE FROM records")
            self._insert(json.dumps(session), b"")
            for number, held in enumerate(self.held, 1):
                if held.request_id not in submitted:
                    self._insert_start(-number, replace(held, parts=()))
            for sequence in every:
                self._insert_start(sequence.sequence_id, _held_of(sequence))
        self._num_condensed_bytes = self._num_bytes

    def _insert_start(self, number: int, held: HeldSequence) -> None:
        about = {
            "number": number,
            "request": held.request_id,
            "index": held.index,
            "n": held.num_siblings,
            "salt": held.salt,
            "prompt": held.num_prompt_tokens,
            "parts": [[x.part_id, x.holder, x.first_token, x.num_tokens] for x in held.parts],
        }
        self._insert(json.dumps(about), _int32(held.token_ids))

    def _insert(self, about: str | None, tokens: bytes) -> None:
        assert self._database is not None
        self._database.execute("INSERT INTO records VALUES (NULL, ?, ?)", about, tokens)
        self._num_bytes += len(about or "") + len(tokens)

    def _try(self, act: Callable[[], None]) -> None:
        """Write, or stop recording without room. What is recorded stays right."""
        try:
            if self._database is not None:
                act()
        except sqlite3.Error as error:
            logger.warning(
                "%s can't be written (%s): a run that resumes this job will recompute what follows",
                self._path,
                error,
            )
            self._drop()

    def _drop(self) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._database = None


def _held_of(sequence: TokenSequence) -> HeldSequence:
    """Return where a sequence is. It is nowhere if its KV isn't shared, or has a gap."""
    request, residence = sequence.request, sequence.residence
    is_apart = request.cache.is_off or sequence.is_checked or bool(sequence.behind_gap)
    return HeldSequence(
        request.request_id, sequence.index, request.params.n, request.cache.salt,
        sequence.num_prompt_tokens, tuple(known_tokens(sequence)),
        residence.parts if residence is not None and not is_apart else (),
    )  # fmt: skip


def _int32(numbers: Sequence[int]) -> bytes:
    data: bytes = np.array(numbers, "<i4").tobytes()
    return data


def _recorded(rows: sqlite3.Cursor) -> _Recorded | None:
    """Return what records say. None if there are none.

    Raises:
        LookupError, TypeError, ValueError, ArithmeticError: If they form no session.
    """
    first = rows.fetchone()
    if first is None:
        return None
    session = json.loads(first[0])
    number, num_replicas = session["session"], int(session["replicas"])
    if not isinstance(number, int) or not 0 < number < 1 << 63:
        raise ValueError("it has no number")
    held: dict[int, HeldSequence] = {}
    tokens_of: dict[int, list[int]] = {}
    for about, data in rows:
        if about is None:
            _add_tokens(data, held, tokens_of)
            continue
        start = json.loads(about)
        name = int(start["number"])
        held.pop(name, None)  # the latest comes last
        tokens_of[name] = np.frombuffer(data, "<i4").tolist()
        held[name] = _start(start, len(tokens_of[name]))
    latest = {
        (each.request_id, each.index): replace(each, token_ids=tuple(tokens_of[name]))
        for name, each in held.items()
    }
    addresses = tuple(tuple(map(str, each)) for each in session["addresses"])
    return _Recorded(number, addresses, num_replicas, list(latest.values()))


def _start(about: dict[str, Any], num_tokens: int) -> HeldSequence:
    parts = []
    for part_id, holder, first_token, count in about["parts"]:
        part = Part(PartId(int(part_id)), HolderId(int(holder)), int(first_token), int(count))
        if min(part.part_id, part.holder, part.first_token) < 0 or part.num_tokens < 1:
            raise ValueError("that is no part")
        parts.append(part)
    index, num_siblings, num_prompt = int(about["index"]), int(about["n"]), int(about["prompt"])
    if not (0 <= index < num_siblings and 0 < num_prompt <= num_tokens):
        raise ValueError("that is no start")
    name, salt = str(about["request"]), str(about["salt"])
    return HeldSequence(name, index, num_siblings, salt, num_prompt, (), tuple(parts))


def _add_tokens(
    step: bytes, held: dict[int, HeldSequence], tokens_of: dict[int, list[int]]
) -> None:
    count = len(step) // _TOKEN_BYTES
    ids = np.frombuffer(step[: 8 * count], "<i8")
    places = np.frombuffer(step[8 * count : 12 * count], "<i4")
    tokens = np.frombuffer(step[12 * count :], "<i4")
    for number, place, token in zip(ids.tolist(), places.tolist(), tokens.tolist(), strict=True):
        if held[number].num_prompt_tokens <= place <= len(tokens_of[number]):
            del tokens_of[number][place:]
            tokens_of[number].append(token)
