"""``fastdecode cache`` and ``doctor`` over what R-workers keep on disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdecode.cli.main import main
from rworker.tiers.disk import open_slots
from rworker.tiers.format import SlotShape
from rworker.tiers.tier import ArrayMemory, DiskTier, MoveJob

SHAPE = SlotShape("ab" * 32, num_layers=2, layer_bytes=3000)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A directory with a file of three blocks."""
    pool = np.random.default_rng(1).integers(0, 256, (2, 3, 3000), np.uint8)
    tier = DiskTier(open_slots(tmp_path / "kept", SHAPE, SHAPE.file_bytes(5)), ArrayMemory(pool))
    keys = tuple(number.to_bytes(16, "little") for number in range(3))
    tier.begin(job := MoveJob(0, False, keys, (0, 1, 2), (64, 128, 192)))
    tier.wait(30.0)
    assert tier.progress(job) == tier.num_layers and not job.failed
    tier.close()
    return tmp_path / "kept"


def test_looks_where_nothing_may_be_written(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_read_only(path: Path, flags: int, *more: Any, really: Any = os.open) -> int:
        if str(path).endswith(".kv") and flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return int(really(path, flags, *more))

    monkeypatch.setattr(os, "open", open_read_only)
    assert [main(["cache", str(kept), *more]) for more in ([], ["--verify"])] == [0, 0]


def test_shows_verifies_and_clears(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", str(kept)]) == 0
    shown = capsys.readouterr().out
    assert "3 KV blocks of 5" in shown and "whole" not in shown, "not all was read"
    assert main(["cache", str(kept), "--verify"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "whole"
    assert main(["cache", str(kept), "--verify", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["files"]
    assert found["num_blocks"] == 3 and found["damage"] == [] and not found["is_held"]
    path = Path(found["path"])
    data = bytearray(path.read_bytes())
    data[SHAPE.data_start(5) + 2 * SHAPE.slot_bytes + 100] ^= 4
    path.write_bytes(data)
    assert main(["cache", str(kept)]) == 0, "only the table was read"
    assert main(["cache", str(kept), "--verify"]) == 1
    shown = capsys.readouterr().out
    assert "damaged: the block in slot 2" in shown and "whole" not in shown
    assert main(["cache", str(kept), "--clear"]) == 0
    assert "1 files of KV blocks removed" in capsys.readouterr().out
    assert not list(kept.iterdir()), "neither the file is left, nor its model's directory"
    open_slots(kept, SHAPE, SHAPE.file_bytes(5)).close()
    beside = path.with_name("notes")
    beside.write_text("mine")
    assert main(["cache", str(kept), "--clear"]) == 0
    assert list(path.parent.iterdir()) == [beside], "what is another's stays"


def test_only_its_own_files_are_cleared(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own,) = kept.glob("*/slots-0.kv")
    mine = own.with_name("slots-7.kv")
    mine.write_text("I am no KV cache")
    project = kept / "project"
    project.mkdir()
    (project / "slots-1.kv").write_text("nor am I")
    elsewhere = kept.with_name("elsewhere")
    linked = open_slots(elsewhere, SHAPE, SHAPE.file_bytes(5))
    linked.close()
    (kept / ("c" * 16)).symlink_to(linked.path.parent)
    assert main(["cache", str(kept), "--clear"]) == 0
    shown = capsys.readouterr().out
    assert "1 files of KV blocks removed" in shown and f"{mine} holds no KV blocks" in shown
    assert not own.exists() and mine.read_text() == "I am no KV cache"
    assert (project / "slots-1.kv").read_text() == "nor am I" and linked.path.stat().st_size


@pytest.mark.parametrize("content", [b"", bytes(5000), b"FDKVSLOT and then damage"])
def test_what_an_r_worker_that_was_killed_left_is_cleared(content: bytes, tmp_path: Path) -> None:
    place = tmp_path / ("a" * 16)
    place.mkdir()
    (place / "slots-0.kv").write_bytes(content)
    assert main(["cache", str(tmp_path), "--clear"]) == 0
    assert not place.exists()


def test_what_an_r_worker_uses_isnt_cleared(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, slots = [open_slots(kept, SHAPE, SHAPE.file_bytes(5)) for _ in range(2)]
    first.close()
    assert main(["cache", str(kept), "--clear"]) == 2
    assert "end the R-worker" in capsys.readouterr().err and slots.path.exists()
    assert first.path.stat().st_size, "all are removed, or none"
    assert main(["cache", str(kept)]) == 0
    assert "an R-worker uses it" in capsys.readouterr().out
    slots.close()


def test_doctor_measures_the_disk(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--cache-disk", str(kept), "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    (found,) = [each for each in findings if each["check"] == "cache disk"]
    assert found["level"] in ("PASS", "WARN") and "1 files of KV blocks" in found["text"]
    for path, level in ((kept / "no" / "such", "FAIL"), (kept / "none", "WARN")):
        main(["doctor", "--cache-disk", str(path), "--json"])
        findings = json.loads(capsys.readouterr().out)["findings"]
        assert [x["level"] for x in findings if x["check"] == "cache disk"] == [level]
        assert not path.exists(), "doctor makes nothing"
