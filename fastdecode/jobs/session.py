"""A batch job's session: what its R-workers need to be told when another process
goes on with it, kept beside its output.

R-workers keep K and V, and know no tokens. So this file has, of every
unfinished sequence, its tokens and by which names holders know it, as a record
for each start and one for each step::

    0    magic, zeros to 64 bytes
    64   records (``fastdecode.conversations.records``):
           the session: JSON, its number and each holder's addresses
           a place: length of JSON (4 bytes), JSON, all tokens so far (int32)
           tokens: sequences (int64), places in them (int32), tokens (int32)

The number is a secret: whoever has it can take the job's caches over. So the
file is its owner's alone. It is there as long as there may be something to go on
with. Without it, or with less of it than there was, a job goes on and recomputes;
every token is drawn alike. What it says of tokens is taken as drawn.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastdecode.conversations.records import HEADER_BYTES, make_record, read_records, write_at
from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import HolderId, Part, PartId, SequenceId
from fastdecode.core.json_file import sync_directory
from fastdecode.core.os_errors import explained
from fastdecode.core.resuming import BegunRequest, HeldSequence, begun_requests, known_tokens
from fastdecode.core.sequence import Sequence as TokenSequence

logger = logging.getLogger(__name__)

MAGIC: Final = b"FDSESSN\x01"
_HEADER: Final = MAGIC.ljust(HEADER_BYTES, b"\0")
_SESSION: Final = 1
_PLACE: Final = 2
_TOKENS: Final = 3
_TOKEN_BYTES: Final = 16
_Held = dict[int, HeldSequence]
Addresses = tuple[str, ...]
"""Of the R-workers that keep one holder."""


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
    """See the module, and ``fastdecode.core.resuming.Session``.

    Args:
        path: of the file.
        addresses: of each holder's R-workers, in the order of holders.
        num_replicas: that R-workers keep of each cache; it says how much of their memory
            a cache has, so nothing is resumed that was kept with another number.
        counts: whether a request of this id is unfinished; None: no request
            that is on record is gone on with.
        most_more_bytes: that may be written before what is over is thrown away;
            or as much as was left of it then.

    Raises:
        ConfigError: the file can't be written.
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
        self._fd: int | None = None
        self._end = self._condensed_at = 0
        self._num_known: dict[SequenceId, int] = {}
        """Tokens on record, of the sequences that have a place."""
        found = _read(path)
        before = found or _Recorded(1 + secrets.randbelow((1 << 63) - 1))
        self.number: int = before.number
        """Also an output that is begun anew has the caches that are kept for it."""
        self.held: list[HeldSequence] = []
        fits = before.num_replicas == num_replicas
        self.is_resumed = found is not None and counts is not None and fits
        if counts is not None:
            there = addresses if fits else ()
            held = [x for x in before.held if counts(x.request_id)]
            self.held = [_still_at(x, before.addresses, there) for x in held]
        self.begun: dict[str, BegunRequest] = begun_requests(self.held)
        if found is None:
            try:
                self._write_anew(())
            except OSError as error:
                raise ConfigError(f"can't write {path}: {explained(error)}") from None

    def begin(self) -> None:
        """See ``Session``.

        Raises:
            ConfigError: the file can be neither written anew nor removed, and
                what it says isn't so any more.
        """
        try:
            self._write_anew(())
            assert self._fd is not None
            os.fsync(self._fd)
            sync_directory(self._path.parent)
        except OSError as error:
            self._drop()
            self._remove(error)

    def _remove(self, error: OSError) -> None:
        logger.warning(
            "%s can't be written (%s): who goes on with this job will recompute all",
            self._path, error.strerror,
        )  # fmt: skip
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            raise ConfigError(
                f"can't write {self._path}: {error.strerror}. Remove it, or make room"
            ) from None

    def place(self, sequence: TokenSequence) -> None:
        """See ``Session``."""
        tokens = known_tokens(sequence)
        self._num_known[sequence.sequence_id] = len(tokens)
        about = _about(sequence.sequence_id, _held_of(sequence))
        self._try(lambda: self._append(_PLACE, _place_payload(about, tokens)))

    def add(self, sequences: Iterable[TokenSequence]) -> None:
        """See ``Session``."""
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
            columns = (np.array(ids, "<i8"), np.array(places, "<i4"), np.array(tokens, "<i4"))
            payload = b"".join(column.tobytes() for column in columns)
            self._try(lambda: self._append(_TOKENS, payload))

    @property
    def is_long(self) -> bool:
        """See ``Session``."""
        more = self._end - self._condensed_at
        return self._fd is not None and more > max(self._most_more_bytes, self._condensed_at)

    def condense(self, sequences: Iterable[TokenSequence]) -> None:
        """See ``Session``."""
        every = list(sequences)
        self._num_known = {x.sequence_id: len(known_tokens(x)) for x in every}
        self._try(lambda: self._write_anew(every))

    def close(self, *, is_over: bool) -> None:
        """Let go of the file. ``is_over``: nothing is kept for it any more."""
        self._drop()
        if is_over:
            self._path.unlink(missing_ok=True)

    def _write_anew(self, sequences: Iterable[TokenSequence]) -> None:
        """With what these have; and what is known of those that haven't come
        yet, whose caches are known by other names now. Raises OSError."""
        beside = self._path.with_name(self._path.name + ".tmp")
        beside.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(beside, flags, 0o600)
        try:
            end = _write_records(fd, self._records(list(sequences)))
            os.rename(beside, self._path)
        except BaseException:
            os.close(fd)
            beside.unlink(missing_ok=True)
            raise
        self._drop()
        self._fd, self._end, self._condensed_at = fd, end, end

    def _records(self, sequences: list[TokenSequence]) -> Iterator[bytes]:
        said = {
            "session": self.number,
            "addresses": self._addresses,
            "replicas": self._num_replicas,
        }
        yield make_record(_SESSION, json.dumps(said).encode())
        come = {sequence.request.request_id for sequence in sequences}
        for number, held in enumerate(self.held, 1):
            if held.request_id not in come:
                about = _about(-number, replace(held, parts=()))
                yield make_record(_PLACE, _place_payload(about, held.token_ids))
        for sequence in sequences:
            about = _about(sequence.sequence_id, _held_of(sequence))
            yield make_record(_PLACE, _place_payload(about, known_tokens(sequence)))

    def _append(self, kind: int, payload: bytes) -> None:
        if self._fd is not None:
            record = make_record(kind, payload)
            write_at(self._fd, record, self._end)
            self._end += len(record)

    def _try(self, act: Callable[[], None]) -> None:
        """Without room nothing more is recorded; what is on record holds."""
        try:
            act()
        except OSError as error:
            logger.warning(
                "%s can't be written (%s): a run that goes on with this job will recompute what "
                "comes from now on",
                self._path,
                error.strerror,
            )
            self._drop()

    def _drop(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


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


def _place_payload(about: bytes, tokens: Sequence[int]) -> bytes:
    data: bytes = np.array(tokens, "<i4").tobytes()
    return len(about).to_bytes(4, "little") + about + data


def _write_records(fd: int, records: Iterable[bytes]) -> int:
    """Returns where they end."""
    write_at(fd, _HEADER, 0)
    end = HEADER_BYTES
    for record in records:
        write_at(fd, record, end)
        end += len(record)
    return end


def _read(path: Path) -> _Recorded | None:
    """What is on record of a session; None: there is none, or none that can be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"can't read {path}: {explained(error)}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ConfigError(f"{path} is not a file of this user's: remove it")
        with contextlib.suppress(LookupError, TypeError, ValueError):
            if os.pread(fd, HEADER_BYTES, 0) == _HEADER:
                return _taken_in(fd)
    finally:
        os.close(fd)
    logger.warning("%s is damaged: R-workers' caches can't be gone on with", path)
    return None


def _taken_in(fd: int) -> _Recorded:
    """Raises LookupError, TypeError, ValueError: that isn't a session."""
    known: _Held = {}
    tokens_of: dict[int, list[int]] = {}
    session: dict[str, Any] = {}
    for kind, _, payload in read_records(fd):
        if kind == _SESSION:
            session = json.loads(payload)
        elif kind == _PLACE:
            _take_place(payload, known, tokens_of)
        elif kind == _TOKENS:
            _take_tokens(payload, known, tokens_of)
    number = session["session"]
    if not isinstance(number, int) or not 0 < number < 1 << 63:
        raise ValueError("it has no number")
    latest = {
        (held.request_id, held.index): replace(held, token_ids=tuple(tokens_of[key]))
        for key, held in known.items()
    }
    addresses = tuple(tuple(map(str, each)) for each in session["addresses"])
    return _Recorded(number, addresses, int(session["replicas"]), list(latest.values()))


def _take_place(payload: bytes, known: _Held, tokens_of: dict[int, list[int]]) -> None:
    end = 4 + int.from_bytes(payload[:4], "little")
    about = json.loads(payload[4:end])
    parts = tuple(_part(*map(int, each)) for each in about["parts"])
    tokens = tuple(np.frombuffer(payload[end:], "<i4").tolist())
    salt, num_prompt = str(about["salt"]), int(about["prompt"])
    index, num_siblings = int(about["index"]), int(about["n"])
    name = str(about["request"])
    if not (0 <= index < num_siblings and 0 < num_prompt <= len(tokens)):
        raise ValueError("that is no place")
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
