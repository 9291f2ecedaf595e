"""A batch job's session: what another process tells R-workers to resume the job.

R-workers keep K and V, and know no tokens. So an SQLite file beside the output has the tokens of
every unfinished sequence and its name at each holder: a record per start, and one per step.

The session's number is a secret: a process that has it can take the job's caches over. So only
the owner may read the file. Without the file, or with less of it, a job resumes and recomputes:
every token is drawn alike. What the file says of tokens is taken as drawn.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from msgspec import Meta, MsgspecError, Struct, field
from msgspec.json import Decoder, Encoder

from fastdecode.conversations import database
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.os_errors import explained
from fastdecode.core.resuming import BegunRequest, HeldSequence, begun_requests, known_tokens
from fastdecode.core.sequence import Sequence as TokenSequence

logger = logging.getLogger(__name__)

_KIND: Final = int.from_bytes(b"FDS3", "big")
_SCHEMA: Final = "CREATE TABLE records (number INTEGER PRIMARY KEY, content BLOB);"
"""In order of time. Each content is a ``_Record`` in JSON."""
_MAX_TOKEN: Final = (1 << 31) - 1
_DAMAGED: Final = "%s is damaged: R-workers' caches can't be resumed"
Addresses = tuple[str, ...]
"""R-workers that keep one holder."""


class _Opened(Struct, tag="session"):
    """The session. The first record."""

    number: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)] = field(
        default_factory=lambda: 1 + secrets.randbelow((1 << 63) - 1)
    )
    addresses: Sequence[Addresses] = ()
    num_replicas: int = 0


class _Started(Struct, tag="start"):
    """A sequence has a place. Later records call it by its number."""

    number: int
    held: HeldSequence


class _Drawn(Struct, tag="step"):
    """Tokens of a step: of each, the number of its sequence, and its place there."""

    numbers: list[int]
    places: list[int]
    tokens: list[Annotated[int, Meta(ge=0, le=_MAX_TOKEN)]]


_Record: TypeAlias = _Opened | _Started | _Drawn
_ENCODER: Final = Encoder(enc_hook=int)  # for NumPy's integers
_DECODER: Final[Decoder[_Record]] = Decoder(_Record)


def session_path(output: Path) -> Path:
    return output.with_name(output.name + ".session")


class JobSession:
    """A ``fastdecode.core.resuming.Session`` in a file.

    Args:
        addresses: R-workers of each holder, in the order of holders.
        num_replicas: Replicas of each cache, which decide how much memory it has. A session with
            another number is not resumed.
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
        self._num_bytes = self._num_condensed_bytes = 0
        self._num_known: dict[int, int] = {}
        """Recorded tokens of the sequences that have started."""
        self._database: database.Database | None = self._open()
        select = "SELECT content FROM records ORDER BY number"
        found: _Opened | None = None
        held: list[HeldSequence] = []
        try:
            found, held = _recorded(self._database.execute(select))
        except (MsgspecError, LookupError, ValueError, TypeError, sqlite3.Error):
            logger.warning(_DAMAGED, path)
        before = found or _Opened()
        self._session = _Opened(before.number, addresses, num_replicas)
        self.held: list[HeldSequence] = []
        fits = before.num_replicas == num_replicas
        self.is_resumed = found is not None and counts is not None and fits
        if counts is not None:
            # KV of holders whose R-workers have other addresses is not there.
            pairs = enumerate(zip(before.addresses, addresses, strict=False))
            same = {holder for holder, (was, now) in pairs if fits and was == now}
            for each in held:
                if counts(each.request_id):
                    parts = tuple(part for part in each.parts if part.holder in same)
                    self.held.append(replace(each, parts=parts))
        self.begun: dict[str, BegunRequest] = begun_requests(self.held)
        if found is None:
            with database.refusing(path, "a job's session", Given("output")):
                self._write(())

    @property
    def number(self) -> int:
        """The secret of an output, also once the output is begun again."""
        return self._session.number

    def begin(self) -> None:
        """Record that this process resumes what was held, under names that it gives. Raises
        ConfigError: If the file can neither be written nor removed. Its names are stale."""
        try:
            self._write(())
            assert self._database is not None
            self._database.checkpoint()
        except sqlite3.Error as error:
            self._give_up(error, "all")
            try:
                database.remove(self._path)
            except OSError as left:
                text = f"can't write {self._path}: {explained(left)}. Remove it, or make room"
                raise ConfigError(text) from None

    def place(self, sequence: TokenSequence) -> None:
        held = _held_of(sequence)
        self._num_known[sequence.sequence_id] = len(held.token_ids)
        self._try(lambda: self._insert(_Started(sequence.sequence_id, held)))

    def add(self, sequences: Iterable[TokenSequence]) -> None:
        step, known = _Drawn([], [], []), self._num_known
        for sequence in sequences:
            first = known.get(sequence.sequence_id)
            if first is None:
                continue
            for place in range(first, len(sequence.token_ids) - sequence.is_coming):
                step.numbers.append(sequence.sequence_id)
                step.places.append(place)
                step.tokens.append(sequence.token_ids[place])
                known[sequence.sequence_id] = place + 1
        if step.numbers:
            self._try(lambda: self._insert(step))

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
        with database.refusing(self._path, "a job's session", Given("output")):
            try:
                return database.Database(self._path, _KIND, _SCHEMA)
            except sqlite3.OperationalError:  # a full disk, for example: the file may be whole
                raise
            except (database.OtherFileError, sqlite3.DatabaseError):
                logger.warning(_DAMAGED, self._path)
                database.remove(self._path)
                return database.Database(self._path, _KIND, _SCHEMA)

    def _write(self, sequences: Iterable[TokenSequence]) -> None:
        """Replace the content: ``sequences``, and held ones that have not been submitted yet.
        Holders know the KV of those by other names now, so they have no parts. Raises
        sqlite3.Error: If it can't be written. The content is what it was."""
        assert self._database is not None
        every = list(sequences)
        submitted = {sequence.request.request_id for sequence in every}
        self._num_bytes = 0
        with self._database.transaction():
            self._database.execute("DELETE FROM records")
            self._insert(self._session)
            for number, held in enumerate(self.held, 1):
                if held.request_id not in submitted:
                    self._insert(_Started(-number, replace(held, parts=())))
            for sequence in every:
                self._insert(_Started(sequence.sequence_id, _held_of(sequence)))
        self._num_condensed_bytes = self._num_bytes

    def _insert(self, record: _Record) -> None:
        assert self._database is not None
        content = _ENCODER.encode(record)
        self._database.execute("INSERT INTO records VALUES (NULL, ?)", content)
        self._num_bytes += len(content)

    def _try(self, act: Callable[[], None]) -> None:
        """Write, or stop recording without room. What is recorded stays right."""
        try:
            if self._database is not None:
                act()
        except sqlite3.Error as error:
            self._give_up(error, "what follows")

    def _give_up(self, error: sqlite3.Error, lost: str) -> None:
        text = "%s can't be written (%s): a run that resumes this job will recompute %s"
        logger.warning(text, self._path, error, lost)
        self._drop()

    def _drop(self) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._database = None


def _held_of(sequence: TokenSequence) -> HeldSequence:
    """Return where a sequence is. It is nowhere if its KV isn't shared, or has a gap."""
    request, residence = sequence.request, sequence.residence
    is_apart = request.cache.is_off or bool(sequence.behind_gap)
    return HeldSequence(
        request.request_id, sequence.index, request.params.n, request.cache.salt,
        sequence.num_prompt_tokens, tuple(known_tokens(sequence)),
        residence.parts if residence is not None and not is_apart else (),
    )  # fmt: skip


def _recorded(rows: Iterable[tuple[bytes]]) -> tuple[_Opened | None, list[HeldSequence]]:
    """Return what records say. Raises MsgspecError and others: If they form no session."""
    session: _Opened | None = None
    held: dict[int, HeldSequence] = {}
    tokens_of: dict[int, list[int]] = {}
    for (content,) in rows:
        match _DECODER.decode(content):
            case _Opened() as opened:
                session = opened
            case _Started(number, each):
                if not _is_right(each):
                    raise ValueError("a sequence's start is damaged")
                held.pop(number, None)  # the latest comes last
                held[number], tokens_of[number] = each, list(each.token_ids)
            case _Drawn(numbers, places, tokens):
                for number, place, token in zip(numbers, places, tokens, strict=True):
                    if held[number].num_prompt_tokens <= place <= len(tokens_of[number]):
                        tokens_of[number][place:] = [token]
    latest = {
        (each.request_id, each.index): replace(each, token_ids=tuple(tokens_of[number]))
        for number, each in held.items()
    }
    return session, list(latest.values())


def _is_right(held: HeldSequence) -> bool:
    """Return True if it can be a sequence of a job."""
    return (
        0 <= held.index < held.num_siblings
        and 0 < held.num_prompt_tokens <= len(held.token_ids)
        and all(0 <= token <= _MAX_TOKEN for token in held.token_ids)
        and all(min(part.part_id, part.holder, part.first_token) >= 0 for part in held.parts)
        and all(part.num_tokens > 0 for part in held.parts)
    )
