"""Replicas in files: answered once they are on the disk, and read up to where they end."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from chunk_memory import hello_for
from values import replace

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import TakeOver
from fastdecode.wire.messages import Accepted, Close, FromRWorker, Open, ToRWorker, Welcome
from fastdecode.wire.waiting import look_until_found
from rworker.cache_state import CacheState
from rworker.instructions import LinkReplica, ReadReplica
from rworker.stream.files import RecordWriter
from rworker.transfers import replica_file
from rworker.transfers.replica_file import LEAST_BYTES, FileConnection, ReplicaFiles

KV = KVSpec(2, 2, 8, DType.INT8, 4)
HELLO = replace(hello_for(KV), session=5, max_blocks=14)
HOLDER, LINK = HolderId(3), 2
CHANGES = (Open(1, 8), Open(2, 8), Close(1), Open(4, 8))


def _order(number: int = LINK) -> LinkReplica:
    books = CacheState(HELLO, HELLO.max_blocks)
    return LinkReplica(0, HOLDER, books, "disk:", 1 << 20, number, 60.0)


def _read(files: ReplicaFiles, why: str = "") -> list[ToRWorker]:
    """What can be read, up to where that ends, and why it does."""
    read: list[ToRWorker] = []
    none = np.zeros(0, np.int64), np.zeros(0, np.int32)
    order = ReadReplica(0, TakeOver(HELLO.session, *none, HOLDER, is_in_file=True))
    with pytest.raises(ConfigError, match=why) if why else contextlib.nullcontext():
        read.extend(files.read(order))
    return read


def _answer(connection: Any) -> FromRWorker:
    found = look_until_found(connection.poll, 20.0)
    assert found is not None
    return found


def _written(files: ReplicaFiles, *messages: ToRWorker, number: int = LINK) -> Any:
    """A file with these; the last of them is answered."""
    connection = files.sink(_order(number)).connect()
    for message in (HELLO, *messages):
        connection.send(message)
    assert _answer(connection) == Welcome("a file", 14, 4, 1)
    asked = [message for message in messages if isinstance(message, Open)]
    assert [_answer(connection) for _ in asked] == [Accepted(x.sequence_id) for x in asked]
    return connection


def test_what_is_answered_for_can_be_read(tmp_path: Path) -> None:
    files = ReplicaFiles(tmp_path)
    connection = _written(files, *CHANGES)
    assert connection.poll() is None, "what closes a sequence has no answer"
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("lost_bytes", [0, 1, 9, 20])
def test_a_file_is_read_up_to_where_it_ends(lost_bytes: int, tmp_path: Path) -> None:
    files = ReplicaFiles(tmp_path)
    _written(files, *CHANGES)
    (path,) = tmp_path.iterdir()
    os.truncate(path, path.stat().st_size - lost_bytes)
    is_torn = lost_bytes > 0
    assert _read(files, "torn" * is_torn) == [HELLO, *CHANGES][: 5 - is_torn]


def test_nothing_is_read_behind_what_is_damaged(tmp_path: Path) -> None:
    files = ReplicaFiles(tmp_path)
    _written(files, *CHANGES)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert _read(files, "damaged") == [HELLO, *CHANGES[:-1]]


def test_a_new_link_ends_the_files_of_those_before(tmp_path: Path) -> None:
    files = ReplicaFiles(tmp_path)
    _written(files, number=1)
    other = tmp_path / "replica-0000000000000005-30-1.kv"
    other.touch()
    _written(files, number=2)
    assert len(list(tmp_path.iterdir())) == 2 and other.exists()
    files.remove(HELLO.session, HOLDER, 2)
    assert list(tmp_path.iterdir()) == [other]


def test_an_r_worker_that_was_given_up_removes_nothing_of_its_successor(tmp_path: Path) -> None:
    """On a disk that both reach: it learns late what was to be removed, or begins a link
    that is over."""
    files = ReplicaFiles(tmp_path)
    _written(files, *CHANGES, number=LINK)
    late = ReplicaFiles(tmp_path)
    late.remove(HELLO.session, HOLDER, LINK - 1)
    sink = late.sink(_order(LINK - 1))
    sink.connect().close()
    sink.discard()
    assert _read(files) == [HELLO, *CHANGES]
    late.remove(HELLO.session, HOLDER, LINK)
    assert not list(tmp_path.iterdir())


def test_what_jobs_that_were_killed_have_left_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing of it is removed: a file that is old may be one of a job that rests."""
    old, new = (tmp_path / f"replica-000000000000000{session}-0-1.kv" for session in (6, 7))
    for path in (old, new):
        path.write_bytes(bytes(2000))
    os.utime(old, (1.0, 1.0))
    files = ReplicaFiles(tmp_path)
    for number in (1, 2):
        _written(files, number=number)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "1 file(s) with replicas of other jobs (replica-*.kv, 2000 bytes)" in said
    assert old.name not in said, "its session is a secret of that job"
    assert old.exists() and new.exists()


def test_the_second_file_of_a_link_takes_the_place_of_the_first(tmp_path: Path) -> None:
    sink = ReplicaFiles(tmp_path).sink(_order())
    assert sink.most_bytes == LEAST_BYTES
    for number in (1, 2):
        connection = sink.connect()
        connection.send(Open(number, 8))
        assert _answer(connection) == Accepted(number)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"replica-0000000000000005-3-2.kv{end}" for end in ("", ".new")]
    sink.abandon()
    assert [path.name for path in tmp_path.iterdir()] == names[:1], "the first one stays"
    connection = sink.connect()
    connection.send(Open(2, 8))
    assert _answer(connection) == Accepted(2)
    sink.settle()
    (path,) = tmp_path.iterdir()
    assert path.name == names[0]
    assert _read(ReplicaFiles(tmp_path)) == [Open(2, 8)]
    other = tmp_path / "replica-0000000000000005-3-21.kv"
    other.touch()
    sink.discard()
    assert list(tmp_path.iterdir()) == [other], "of another link"


def test_a_disk_that_takes_no_more_ends_the_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RecordWriter) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "sync", full)
    connection = FileConnection(tmp_path / "one.kv")
    connection.send(HELLO)
    with pytest.raises(WorkerError, match=r"one\.kv: No space left on device"):
        look_until_found(connection.poll, 20.0)
    assert not connection.is_open
    with pytest.raises(WorkerError):
        connection.send(Close(1))


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    sink = ReplicaFiles(tmp_path / "nowhere").sink(_order())
    with pytest.raises(ConfigError, match=r"can't write .*nowhere.*No such file"):
        sink.connect()


def test_a_directory_that_cannot_be_synced_costs_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=OSError(22, "Invalid argument"))
    monkeypatch.setattr(replica_file, "sync_directory", refuse)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"can't write .*Invalid argument"):
        ReplicaFiles(tmp_path).sink(_order()).connect()
    assert len(os.listdir("/proc/self/fd")) <= num_open and not list(tmp_path.iterdir())
