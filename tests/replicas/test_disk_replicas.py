"""Sequences of a lost R-worker go on with what its file has, at any R-worker that reaches
the directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replica_jobs import Tokens, run
from trouble import crash_after

from fastdecode import LLM
from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.wire.messages import ToRWorker
from rworker.attention import AttentionExecutor
from rworker.instructions import PlaceChunk, Prepare
from rworker.stream.files import RecordWriter
from rworker.transfers import replica_file
from rworker.transfers.replica_file import FileConnection


class AtOnce(FileConnection):
    """Writes in the sender's thread: what is sent is on the disk, however busy the machine."""

    def send(self, message: ToRWorker) -> None:
        super().send(message)
        self._write_all()

    def close(self) -> None:
        self._writer.close()

    def _write(self) -> None:
        """There is nothing left for a thread."""


@pytest.fixture(scope="module")
def six_heads(tiny_checkpoint: Callable[..., Path]) -> str:
    """Enough KV heads for three R-workers."""
    return str(tiny_checkpoint("llama", num_key_value_heads=6))


@pytest.fixture(scope="module")
def undisturbed(six_heads: str) -> Tokens:
    return run(six_heads, replicas=0)[0]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_file, "FileConnection", AtOnce)


def _on_disk(directory: Path, **options: Any) -> dict[str, Any]:
    disk = {"replicas": "disk", "cache_disk": str(directory), "cache_disk_gb": 0.01}
    return {**disk, **options}


def _write_anew_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written anew once they have 4 KB."""
    monkeypatch.setattr(replica_file, "LEAST_BYTES", 1 << 12)
    monkeypatch.setattr(replica_file, "MOST_LENGTHS", 0.0)


def _files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("replica-*"))


@pytest.mark.parametrize(
    "options",
    [{}, {"r_workers": 2}, {"spare_r_workers": 1}, {"r_partition": "heads"}, {"pp": 2}],
    ids=["whole", "two", "replaced", "heads", "stages"],
)
@pytest.mark.usefixtures("at_once")
def test_a_lost_r_worker_costs_no_token_that_its_file_has(
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    six_heads: str,
    undisturbed: Tokens,
    tmp_path: Path,
) -> None:
    crash_after(monkeypatch, {"r1": 40})
    tokens, stats = run(six_heads, **_on_disk(tmp_path, **options))
    assert tokens == undisturbed
    assert stats.replicas is not None
    (failover,) = stats.replicas.failovers
    assert failover.worker.endswith("R-worker r1")
    assert stats.resumed.num_holders == 1 + ("spare_r_workers" in options)
    assert stats.resumed.num_tokens > 0
    assert stats.num_recomputed == 0
    assert _files(tmp_path) == [], "with the job, nobody needs them"


def test_all_memory_is_for_sequences(llama: str, tmp_path: Path) -> None:
    offered = {}
    for name, options in (
        ("none", {}),
        ("memory", {"replicas": 1}),
        ("disk", {"replicas": 1, **_on_disk(tmp_path)}),
    ):
        with LLM(llama, r_workers=2, r_threads=1, kv_memory_gb=0.01, **options) as llm:
            offered[name] = [welcome.num_blocks for welcome in llm._running.welcomes]
    assert offered["disk"] == offered["none"]
    assert offered["memory"] == [number // 2 for number in offered["none"]]


@pytest.mark.usefixtures("at_once")
def test_a_restored_cache_is_kept_in_a_file_again(
    monkeypatch: pytest.MonkeyPatch, llama: str, expected: Tokens, tmp_path: Path
) -> None:
    """So the R-worker that restored it may be lost, too; with another one's memory, both
    would be recomputed."""
    crash_after(monkeypatch, {"r1": 40, "r2": 90})
    tokens, stats = run(llama, **_on_disk(tmp_path))
    assert tokens == expected
    assert stats.replicas is not None and stats.replicas.num_recomputed_holders == 0
    names = [(each.worker[-2:], each.keeper[-2:]) for each in stats.replicas.failovers]
    assert names == [("r1", "r2"), ("r1", "r0"), ("r2", "r0")]
    assert stats.num_recomputed == 0 and _files(tmp_path) == []


@pytest.mark.usefixtures("at_once")
def test_a_file_that_grows_is_written_anew(
    monkeypatch: pytest.MonkeyPatch, llama: str, expected: Tokens, tmp_path: Path
) -> None:
    """From what the cache has by then, and the cache is restored from the new one."""
    settled: list[Path] = []
    settle = replica_file.settle

    def noting(llama: Path) -> None:
        settle(llama)
        settled.append(llama)

    monkeypatch.setattr(replica_file, "settle", noting)
    _write_anew_often(monkeypatch)
    crash_after(monkeypatch, {"r1": 60})
    tokens, stats = run(llama, **_on_disk(tmp_path))
    assert tokens == expected and settled
    assert stats.resumed.num_tokens > 0 and stats.num_recomputed == 0
    assert _files(tmp_path) == []


@pytest.mark.parametrize("step", ["begun", "written", "settled"])
def test_a_new_file_that_fails_leaves_the_old_one(
    step: str, monkeypatch: pytest.MonkeyPatch, llama: str, expected: Tokens, tmp_path: Path
) -> None:
    """As good as it was: the cache is restored from it."""
    failed: list[Path] = []

    class Fails(AtOnce):
        def __init__(self, llama: Path) -> None:
            super().__init__(llama)
            self._path = llama
            if step == "begun" and llama.suffix == ".new":
                raise self._full()

        def _write_all(self) -> bool:
            if step == "written" and self._path.suffix == ".new":
                raise WorkerError(str(self._full()))
            return super()._write_all()

        def _full(self) -> OSError:
            failed.append(self._path)
            return OSError(28, "No space left on device")

    def fail(llama: Path) -> None:
        failed.append(llama)
        raise ConfigError("no space is left")

    monkeypatch.setattr(replica_file, "FileConnection", Fails)
    if step == "settled":
        monkeypatch.setattr(replica_file, "settle", fail)
    _write_anew_often(monkeypatch)
    crash_after(monkeypatch, {"r1": 60})
    tokens, stats = run(llama, **_on_disk(tmp_path))
    assert tokens == expected and failed
    assert stats.resumed.num_tokens > 0 and stats.num_recomputed == 0
    assert _files(tmp_path) == []


def test_what_cannot_be_read_is_recomputed(
    monkeypatch: pytest.MonkeyPatch, llama: str, expected: Tokens, tmp_path: Path
) -> None:
    """Where R-workers have directories of the same name, and not the same one."""
    monkeypatch.setattr(replica_file.ReplicaFiles, "read", lambda self, order: iter(()))
    crash_after(monkeypatch, {"r1": 40})
    tokens, stats = run(llama, **_on_disk(tmp_path))
    assert tokens == expected
    assert stats.resumed.num_tokens == 0 and stats.num_recomputed > 0


@pytest.mark.parametrize("step", ["prepare", "place"])
def test_a_cache_that_is_restored_in_part_is_not_gone_on_with(
    step: str, monkeypatch: pytest.MonkeyPatch, llama: str, expected: Tokens, tmp_path: Path
) -> None:
    """Its books say more than its memory has."""
    carry_out = getattr(AttentionExecutor, step)

    def failing(self: AttentionExecutor, order: Prepare | PlaceChunk) -> None:
        prepared = order if isinstance(order, Prepare) else self._caches[order.holder].prepared
        if prepared.is_on_disk:
            raise MemoryError("there is no room")
        carry_out(self, order)

    monkeypatch.setattr(AttentionExecutor, step, failing)
    crash_after(monkeypatch, {"r1": 40})
    tokens, stats = run(llama, **_on_disk(tmp_path))
    assert tokens == expected
    assert stats.resumed.num_tokens == 0 and stats.num_recomputed > 0
    assert _files(tmp_path) == []


def test_a_full_disk_leaves_no_file_behind(
    monkeypatch: pytest.MonkeyPatch, llama: str, expected: Tokens, tmp_path: Path
) -> None:
    def full(self: RecordWriter) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "sync", full)
    tokens, stats = run(llama, **_on_disk(tmp_path))
    assert tokens == expected and _files(tmp_path) == []
    assert stats.replicas is not None and stats.replicas.lag(50) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"replicas": "disc"}, "replicas='disc' is not disk, or a whole number from 0 to 1"),
        ({"cache_disk": None, "cache_disk_gb": None}, "needs a disk, and R-worker r[0-2] has none"),
        ({"cache_disk": None, "cache_disk_gb": None, "pp": 2}, "needs a disk, and .* has none"),
        ({"r_workers": 1}, "second R-worker, which restores a lost one's KV.*r_workers=2"),
        (
            {"r_workers": 1, "spare_r_workers": 1},
            "from its file, and a standby R-worker does not: add r_workers=2",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: dict[str, Any], reason: str, llama: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(llama, **_on_disk(tmp_path, **options))
