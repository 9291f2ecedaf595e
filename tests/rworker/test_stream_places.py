"""The stream suite, on this machine: memory, a file, an R-worker's thread, one at an address."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from listening import listening
from stream_suite import (
    ALL_KV,
    NUM_BLOCKS,
    RESERVED,
    WAIT_S,
    MakePlace,
    Memory,
    StreamSuite,
    Worker,
)

from cpu_kernels import reference
from fastdecode.core.spec import KVSpec
from rworker.attention import AttentionExecutor
from rworker.stream.chunk_endpoints import ChunkSource
from rworker.stream.files import KVFileWriter, read_file, stream_in
from rworker.worker import start_worker_thread

KV_BYTES = 16 << 20


class File:
    """A file, read into memory."""

    def __init__(self, path: Path, kv: KVSpec) -> None:
        self._path = path
        self._kv = kv
        self._stack = contextlib.ExitStack()
        kind = Memory(kv, 1).kind
        self.sink = self._stack.enter_context(KVFileWriter(path, kind))
        self._opened: list[int] = []

    def open(self, sequence: int, num_reserved: int) -> None:
        self._opened.append(sequence)

    def source(self) -> ChunkSource:
        self._stack.close()
        memory = Memory(self._kv)
        for sequence in self._opened:
            memory.open(sequence, RESERVED)
        stream_in(self._path, memory)
        return memory

    def close(self) -> None:
        self._stack.close()


class TestFile(StreamSuite):
    @pytest.fixture
    def make_place(self, tmp_path: Path) -> MakePlace:
        return lambda kv: contextlib.closing(File(tmp_path / "a.fdkv", kv))


class TestThread(StreamSuite):
    @pytest.fixture
    def make_place(self) -> MakePlace:
        @contextlib.contextmanager
        def make(kv: KVSpec) -> Iterator[Worker]:
            executor = AttentionExecutor(kernels=reference)  # nothing to compile
            thread = start_worker_thread("r0", kv_bytes=KV_BYTES, executor=executor)
            try:
                yield Worker(thread.connection, kv)
            finally:
                thread.stop()
                thread.join(WAIT_S)

        return make


class TestZmq(StreamSuite):
    @pytest.fixture
    def make_place(self) -> MakePlace:
        @contextlib.contextmanager
        def make(kv: KVSpec) -> Iterator[Worker]:
            from fastdecode.wire.zmq.hub import ZmqHub

            with listening("r0") as one:
                hub = ZmqHub()
                try:
                    worker = Worker(hub.add(one.address), kv)
                    yield worker
                    worker.leave()
                finally:
                    hub.close()

        return make


def test_a_file_that_is_left_by_an_error_is_not_there(tmp_path: Path) -> None:
    kind = Memory(ALL_KV[0], NUM_BLOCKS).kind

    def fail() -> None:
        with KVFileWriter(tmp_path / "a", kind) as file:
            file.expect(1, 5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []
    with KVFileWriter(tmp_path / "a", kind) as file:
        file.expect(1, 5)
    (message,) = read_file(tmp_path / "a", kind)
    assert message.num_tokens.tolist() == [5]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
