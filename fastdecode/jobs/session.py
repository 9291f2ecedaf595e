"""A batch job's session: what another process tells R-workers to resume the job.

R-workers keep K and V, and know no tokens. So an SQLite file beside the output has the tokens of
every unfinished sequence and its name at each holder: a row per start, and one per step.

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

_KIND: Final = int.from_bytes(b"FDSE", "big")
_SCHEMA: Final = """
CREATE TABLE session (about BLOB NOT NULL);
CREATE TABLE starts (number INTEGER PRIMARY KEY, about BLOB NOT NULL, tokens BLOB NOT NULL);
CREATE TABLE steps (number INTEGER PRIMARY KEY, tokens BLOB NOT NULL);
"""
"""``tokens`` of a start: all so far (int32). Of a step: sequences (int64), their lengths before
the token (int32), tokens (int32). Rows of both tables share one count, their order in time."""
_TOKEN_BYTES: Final = 16
_Held = dict[int, HeldSequence]
Addresses = tuple[str, ...]
"""R-workers that keep one holder."""


def session_path(output: Path) -> Path:
    """Where an output's session is."""
    return output.with_name(output.name + ".session")


@dataclass(frozen=True)
class _Recorded:
    """What the file of a session says; see ``JobSession``."""

    number: int
    addresses: Sequence[Addresses] = ()
    num_replicas: int = 0
    held: Sequence[HeldSequence] = ()


class JobSession:
    """A ``fastdecode.core.resuming.Session`` in a file.

    Args:
        path: The file.
        addresses: R-workers of each holder, in the order of holders.
        num_replicas: Replicas of each cache. They decide how much memory a cache has, so a
            session with another number is not resumed.
        counts: True if a request of this id is unfinished. None to resume no request.
        most_more_bytes: Bytes that may be written before finished sequences are removed, or as
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
        most_more_bytes: int = 16 << 20,
    ) -> None:
        self._most_more_bytes = most_more_bytes
        self._path = path
        self._addresses = list(addresses)
        self._num_replicas = num_replicas
        self._num_rows = 0
        self._num_bytes = self._num_condensed_bytes = 0
        self._num_known: dict[SequenceId, int] = {}
        """Recorded tokens of the sequences that have started."""
        self._database: database.Database | None = self._open()
        found = self._read()
        before = found or _Recorded(1 + secrets.randbelow((1 << 63) - 1))
        self.number: int = before.number
        """The secret of an output, kept when the output is begun again."""
        self.held: list[HeldSequence] = []
        fits = before.num_replicas == num_replicas
        self.is_resumed = found is not None and counts is not None and fits
        if counts is not None:
            same = addresses if fits else ()
            held = [x for x in before.held if counts(x.request_id)]
            self.held = [_still_at(x, before.addresses, same) for x in held]
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
        tokens = known_tokens(sequence)
        self._num_known[sequence.sequence_id] = len(tokens)
        about = _about(sequence.sequence_id, _held_of(sequence))
        self._try(lambda: self._insert("starts", about, _int32(tokens)))

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
            self._try(lambda: self._insert("steps", columns))

    @property
    def is_long(self) -> bool:
        more = self._num_bytes - self._num_condensed_bytes
        most = max(self._most_more_bytes, self._num_condensed_bytes)
        return self._database is not None and more > most

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

    def _read(self) -> _Recorded | None:
        """Return what the file says. None if it is new or damaged."""
        assert self._database is not None
        try:
            session = self._database.execute("SELECT about FROM session").fetchone()
            return None if session is None else _taken_in(session[0], self._database)
        except (LookupError, TypeError, ValueError, sqlite3.Error):
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
        said = {
            "session": self.number,
            "addresses": self._addresses,
            "replicas": self._num_replicas,
        }
        self._num_bytes = 0
        with self._database.transaction():
            for table in ("session", "starts", "steps"):
                self._database.execute(f"DELETE FROM {table}")
            self._database.execute("INSERT INTO session VALUES (?)", json.dumps(said).encode())
            for number, held in enumerate(self.held, 1):
                if held.request_id not in submitted:
                    about = _about(-number, replace(held, parts=()))
                    self._insert("starts", about, _int32(held.token_ids))
            for sequence in every:
                about = _about(sequence.sequence_id, _held_of(sequence))
                self._insert("starts", about, _int32(known_tokens(sequence)))
        self._num_condensed_bytes = self._num_bytes

    def _insert(self, table: str, *columns: bytes) -> None:
        if self._database is not None:
            self._num_rows += 1
            marks = ", ?" * len(columns)
            self._database.execute(
                f"INSERT INTO {table} VALUES (?{marks})", self._num_rows, *columns
            )
            self._num_bytes += sum(map(len, columns))

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
    """Where it is, without its tokens. What leaves nothing to others is nowhere,
    and nor is what has a gap."""
    request, residence = sequence.request, sequence.residence
    is_apart = request.cache.is_off or sequence.is_checked or bool(sequence.behind_gap)
    return HeldSequence(
        request.request_id, sequence.index, request.params.n, request.cache.salt,
        sequence.num_prompt_tokens, (),
        residence.parts if residence is not None and not is_apart else (),
    )  # fmt: skip


def _about(number: int, held: HeldSequence) -> bytes:
    parts = [[x.part_id, x.holder, x.first_token, x.num_tokens] for x in held.parts]
    said = {
        "number": number,
        "request": held.request_id,
        "index": held.index,
        "n": held.num_siblings,
        "salt": held.salt,
        "prompt": held.num_prompt_tokens,
        "parts": parts,
    }
    return json.dumps(said).encode()


def _int32(numbers: Sequence[int]) -> bytes:
    data: bytes = np.array(numbers, "<i4").tobytes()
    return data


def _taken_in(about: bytes, rows: database.Database) -> _Recorded:
    """Raises LookupError, TypeError, ValueError: If the rows form no session."""
    known: _Held = {}
    tokens_of: dict[int, list[int]] = {}
    session = json.loads(about)
    for _, start, tokens in rows.execute(
        "SELECT number, about, tokens FROM starts "
        "UNION ALL SELECT number, NULL, tokens FROM steps ORDER BY number"
    ):
        if start is None:
            _take_tokens(tokens, known, tokens_of)
        else:
            _take_start(json.loads(start), tokens, known, tokens_of)
    number = session["session"]
    if not isinstance(number, int) or not 0 < number < 1 << 63:
        raise ValueError("it has no number")
    latest = {
        (held.request_id, held.index): replace(held, token_ids=tuple(tokens_of[key]))
        for key, held in known.items()
    }
    addresses = tuple(tuple(map(str, each)) for each in session["addresses"])
    return _Recorded(number, addresses, int(session["replicas"]), list(latest.values()))


def _take_start(
    about: dict[str, Any], data: bytes, known: _Held, tokens_of: dict[int, list[int]]
) -> None:
    parts = tuple(_part(*map(int, each)) for each in about["parts"])
    tokens = tuple(np.frombuffer(data, "<i4").tolist())
    salt, num_prompt = str(about["salt"]), int(about["prompt"])
    index, num_siblings = int(about["index"]), int(about["n"])
    name = str(about["request"])
    if not (0 <= index < num_siblings and 0 < num_prompt <= len(tokens)):
        raise ValueError("that is no start")
    number = int(about["number"])
    known.pop(number, None)  # the latest comes last
    known[number] = HeldSequence(name, index, num_siblings, salt, num_prompt, tokens, parts)
    tokens_of[number] = list(tokens)


def _part(part_id: int, holder: int, first_token: int, num_tokens: int) -> Part:
    if min(part_id, holder, first_token) < 0 or num_tokens < 1:
        raise ValueError("that is no part")
    return Part(PartId(part_id), HolderId(holder), first_token, num_tokens)


def _take_tokens(payload: bytes, known: _Held, tokens_of: dict[int, list[int]]) -> None:
    count = len(payload) // _TOKEN_BYTES
    ids = np.frombuffer(payload[: 8 * count], "<i8")
    places = np.frombuffer(payload[8 * count : 12 * count], "<i4")
    tokens = np.frombuffer(payload[12 * count :], "<i4")
    for number, place, token in zip(ids.tolist(), places.tolist(), tokens.tolist(), strict=True):
        num_prompt_tokens, so_far = known[number].num_prompt_tokens, tokens_of[number]
        if num_prompt_tokens <= place <= len(so_far):
            del so_far[place:]
            so_far.append(token)


def _still_at(
    held: HeldSequence, before: Sequence[Addresses], now: Sequence[Addresses]
) -> HeldSequence:
    """Only with parts of holders whose R-workers have the same addresses."""
    there = [i for i in range(min(len(before), len(now))) if before[i] == now[i]]
    return replace(held, parts=tuple(part for part in held.parts if part.holder in there))
