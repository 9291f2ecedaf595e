"""Kept blocks in a file of slots: found again, never wrong, never more than the quota."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fastdecode.core.errors import ConfigError
from rworker.tiers.disk import disk_of, open_slots, read_slots, slot_files
from rworker.tiers.format import SlotShape
from rworker.tiers.slots import SlotFile
from rworker.tiers.tier import MOST_FAILURES, ArrayMemory, DiskTier, MoveJob

SHAPE = SlotShape("ab" * 32, num_layers=3, layer_bytes=3000)
NUM_BLOCKS = 12
QUOTA = SHAPE.file_bytes(8)


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def filled(seed: int = 1) -> np.ndarray:
    """A cache: uint8 [num_layers, num_blocks, layer_bytes]."""
    rng = np.random.default_rng(seed)
    shape = (SHAPE.num_layers, NUM_BLOCKS, SHAPE.layer_bytes)
    return rng.integers(0, 256, shape, np.uint8)


def move(tier: DiskTier, number: int, blocks: list[int], *, fetch: bool = False) -> set[int]:
    """Blocks go down, or up, under keys of their numbers; which have failed."""
    keys = tuple(map(key_of, blocks))
    num_tokens = () if fetch else tuple(64 * (block + 1) for block in blocks)
    tier.begin(job := MoveJob(number, fetch, keys, tuple(blocks), num_tokens))
    while tier.progress(job) < tier.num_layers:
        tier.wait(10.0)
    return job.failed


def stored(directory: Path, blocks: list[int], pool: np.ndarray | None = None) -> Path:
    """The file of a tier that has stored these, and ended."""
    memory = ArrayMemory(filled() if pool is None else pool)
    tier = DiskTier(open_slots(directory, SHAPE, QUOTA), memory)
    assert move(tier, 0, blocks) == set()
    tier.close()
    return tier.slots.path


def fetched(directory: Path, blocks: list[int]) -> tuple[np.ndarray, set[int], DiskTier]:
    """What an empty cache has of these afterwards, and which have failed."""
    pool = np.zeros_like(filled())
    tier = DiskTier(open_slots(directory, SHAPE, QUOTA), ArrayMemory(pool))
    failed = move(tier, 1, blocks, fetch=True)
    tier.close()
    return pool, failed, tier


def test_blocks_are_found_again_after_a_restart(tmp_path: Path) -> None:
    stored(tmp_path, [3, 1, 7])
    slots = open_slots(tmp_path, SHAPE, QUOTA)
    assert {(e.key, e.num_tokens) for e in slots.entries} == {
        (key_of(n), 64 * (n + 1)) for n in (3, 1, 7)
    }
    slots.close()
    pool, failed, _ = fetched(tmp_path, [1, 3, 7])
    assert failed == set() and (pool[:, [1, 3, 7]] == filled()[:, [1, 3, 7]]).all()
    assert not pool[:, [0, 2]].any(), "others were written"


def test_the_quota_holds_and_slots_are_used_again(tmp_path: Path) -> None:
    path = stored(tmp_path, list(range(8)))
    size = path.stat().st_size
    assert size == QUOTA and path.stat().st_blocks * 512 <= QUOTA + 4096
    tier = DiskTier(open_slots(tmp_path, SHAPE, QUOTA), ArrayMemory(filled()))
    assert move(tier, 0, [8]) == {0}, "there is no ninth slot"
    tier.slots.drop(key_of(2))
    assert move(tier, 1, [8]) == set()
    assert key_of(2) not in tier.slots and key_of(8) in tier.slots
    assert move(tier, 2, [2], fetch=True) == {0}
    tier.close()
    assert path.stat().st_size == size


def test_what_was_given_up_or_replaced_isnt_found_after_a_restart(tmp_path: Path) -> None:
    """Nor is what turned out to be damaged, and what can't be read."""
    path = stored(tmp_path, [1, 2])
    tier = DiskTier(open_slots(tmp_path, SHAPE, QUOTA), ArrayMemory(filled(seed=2)))
    assert move(tier, 0, [1]) == set(), "it is stored once more"
    tier.drop([key_of(2)])
    tier.close()
    header = read_slots(path)
    os.close(header[0])
    ((slot, entry),) = header[2].items()
    assert entry.key == key_of(1) and path.read_bytes().count(key_of(1)) == 1
    with path.open("r+b") as file:
        file.seek(SHAPE.data_start(8) + slot * SHAPE.slot_bytes)
        file.write(b"\xff" * 64)
    assert fetched(tmp_path, [1])[1] == {0}
    again = open_slots(tmp_path, SHAPE, QUOTA)
    assert len(again) == 0 and path.read_bytes().count(key_of(1)) == 0
    again.close()


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "kept"
    path = stored(directory, [1])
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (directory, path.parent, path)]
    assert modes == [0o700, 0o700, 0o600]
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        open_slots(directory, SHAPE, QUOTA)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="can't keep KV blocks"):
        open_slots(directory, SHAPE, QUOTA)
    directory.chmod(0o777)
    with pytest.raises(ConfigError, match="nobody else may write"):
        open_slots(directory, SHAPE, QUOTA)


def test_two_r_workers_have_a_file_each_and_find_both_again(tmp_path: Path) -> None:
    one, other = open_slots(tmp_path, SHAPE, QUOTA), open_slots(tmp_path, SHAPE, QUOTA)
    assert one.path != other.path
    one.close(), other.close()
    again = open_slots(tmp_path, SHAPE, QUOTA)
    assert again.path == one.path
    again.close()
    assert slot_files(tmp_path) == [one.path, other.path]


@pytest.mark.parametrize(
    "other",
    [
        SlotShape("cd" * 32, 3, 3000),  # another model, or other heads
        SlotShape("ab" * 32, 4, 3000),
        SlotShape("ab" * 32, 3, 2999),
    ],
)
def test_what_another_shape_or_model_stored_isnt_used(tmp_path: Path, other: SlotShape) -> None:
    path = stored(tmp_path, [1, 2])
    target = tmp_path / other.identity[:16] / path.name
    target.parent.mkdir(mode=0o700, exist_ok=True)
    path.rename(target)  # as if somebody had swapped the files
    slots = open_slots(tmp_path, other, QUOTA)
    assert len(slots) == 0 and slots.path == target
    slots.close()


def test_a_torn_file_begins_anew(tmp_path: Path) -> None:
    path = stored(tmp_path, [1, 2])
    os.truncate(path, path.stat().st_size // 2)
    slots = open_slots(tmp_path, SHAPE, QUOTA)
    assert len(slots) == 0 and path.stat().st_size == QUOTA
    slots.close()


def test_a_file_of_another_size_begins_anew_and_says_what_would_keep_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(tmp_path, [1, 2])
    slots = open_slots(tmp_path, SHAPE, 2 * QUOTA)
    assert len(slots) == 0 and path.stat().st_size > QUOTA
    assert "without the 2 that it held (--cache-disk-gb as before keeps them)" in caplog.text
    assert "damaged" not in caplog.text
    slots.close()


def test_a_file_that_shrinks_under_way_is_a_miss(tmp_path: Path) -> None:
    stored(tmp_path, [1, 2])
    tier = DiskTier(open_slots(tmp_path, SHAPE, QUOTA), ArrayMemory(filled()))
    os.truncate(tier.slots.path, SHAPE.data_start(8))
    assert move(tier, 1, [1, 2], fetch=True) == {0, 1}
    assert tier.counts["unread"] >= 2 and len(tier.slots) == 0
    tier.close()


class FullDisk(SlotFile):
    """Nothing can be written any more."""

    def take_slot(self) -> int | None:
        raise OSError(28, "No space left on device")


def test_a_disk_that_takes_nothing_is_asked_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path, [0])
    slots = open_slots(tmp_path, SHAPE, QUOTA)
    slots.__class__ = FullDisk
    tier = DiskTier(slots, ArrayMemory(filled()))
    blocks = list(range(1, 12))
    assert move(tier, 0, blocks) == set(range(11))
    assert tier.counts["unwritten"] <= MOST_FAILURES + 2
    assert move(tier, 1, [0], fetch=True) == set(), "what it has is read"
    tier.close()
    assert sum("can't be written" in record.message for record in caplog.records) == 1


def test_a_disk_without_the_room_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"is 1000000000000000 bytes, but \d+ are free"):
        disk_of(str(tmp_path), 1e6)
    with pytest.raises(ConfigError, match="belong together"):
        disk_of(str(tmp_path), None)
    with pytest.raises(ConfigError, match="cache_disk"):
        disk_of(str(tmp_path / "no" / "such"), 1.0)
    assert disk_of(None, None) is None
    stored(tmp_path, [1])
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=4096))
    assert disk_of(str(tmp_path), (QUOTA + 9) / 1e9) is not None, "its file is rounded down"
    for num_bytes, num_workers in ((QUOTA + 9, 2), (QUOTA + 2 * SHAPE.slot_bytes, 1)):
        with pytest.raises(ConfigError, match="are free"):
            disk_of(str(tmp_path), num_bytes / 1e9, num_workers)


_NO_ROOM = """
import resource, sys
from pathlib import Path
from fastdecode.core.errors import ConfigError
from rworker.tiers.format import SlotShape
from rworker.tiers.disk import open_slots
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
shape = SlotShape("ab" * 32, num_layers=3, layer_bytes=3000)
try:
    open_slots(Path(sys.argv[1]), shape, 1 << 20)
except ConfigError as error:
    print(error.message)
"""


def test_a_file_that_cant_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    line = [sys.executable, "-c", _NO_ROOM, str(tmp_path / "kept")]
    told = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "can't keep KV blocks in" in told and "bytes are asked for" in told
    assert [file.stat().st_size for file in slot_files(tmp_path / "kept")] == [0]


def test_reads_precede_writes(tmp_path: Path) -> None:
    """What is to be fetched doesn't wait for what is to be stored."""
    pool = filled()
    stored(tmp_path, [0, 1])
    tier = DiskTier(open_slots(tmp_path, SHAPE, QUOTA), ArrayMemory(pool), num_threads=1)
    jobs = (
        MoveJob(0, False, tuple(map(key_of, range(2, 8))), tuple(range(2, 8)), (64,) * 6),
        MoveJob(1, True, (key_of(0), key_of(1)), (8, 9)),
    )
    for job in jobs:
        tier.begin(job)
    for job in jobs:
        while tier.progress(job) < tier.num_layers:
            tier.wait(10.0)
    writes, reads = (job.asked_s + job.seconds for job in jobs)
    assert reads < writes
    assert (pool[:, [8, 9]] == pool[:, [0, 1]]).all()
    tier.close()


def test_a_header_that_lies_is_refused(tmp_path: Path) -> None:
    path = stored(tmp_path, [1])
    with path.open("r+b") as file:
        file.write(SlotShape(SHAPE.identity, 3, 3000).header(1 << 20))
    with pytest.raises(ConfigError, match="length"):
        read_slots(path)
