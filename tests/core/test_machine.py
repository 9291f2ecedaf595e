"""Free memory under control groups, as the files of version 1 and 2 tell of them."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

import fastdecode
from fastdecode.core.host.machine import default_kv_bytes, free_memory_bytes
from rworker.attention import AttentionExecutor

MB = 1 << 20


def write(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own"


def test_the_tightest_group_counts(tmp_path: Path, own: Path) -> None:
    own.write_text("0::/slice/job\n")
    write(tmp_path / "slice", memory__max=f"{100 * MB}\n", memory__current=f"{90 * MB}\n")
    stat = f"anon {30 * MB}\ninactive_file {5 * MB}\nactive_file 7\n"
    write(
        tmp_path / "slice/job",
        memory__max=f"{50 * MB}\n",
        memory__current=f"{44 * MB}\n",
        memory__stat=stat,
    )
    assert free_memory_bytes(tmp_path, own) == 10 * MB
    write(tmp_path / "slice/job", memory__current=f"{48 * MB}\n")
    assert free_memory_bytes(tmp_path, own) == 7 * MB
    write(tmp_path / "slice/job", memory__current=f"{60 * MB}\n")
    assert free_memory_bytes(tmp_path, own) == 0


def test_version_1(tmp_path: Path, own: Path) -> None:
    own.write_text("5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n")
    limits = {"memory__limit_in_bytes": f"{20 * MB}", "memory__usage_in_bytes": f"{12 * MB}"}
    write(
        tmp_path / "memory/a",
        **limits,
        memory__stat=f"inactive_file 1\ntotal_inactive_file {2 * MB}\n",
    )
    assert free_memory_bytes(tmp_path, own) == 10 * MB


@pytest.mark.parametrize("text", ["0::/\n", "0::/not/there\n", "", "nonsense\n"])
def test_no_limit(text: str, tmp_path: Path, own: Path) -> None:
    own.write_text(text)
    write(tmp_path, memory__max="max\n", memory__current="1\n")
    free = psutil.virtual_memory().total
    assert free // 64 < free_memory_bytes(tmp_path, own) <= free
    assert free_memory_bytes(tmp_path, tmp_path / "no such file") > free // 64


def test_half_of_it_is_for_caches() -> None:
    assert default_kv_bytes(3, 600) == 100
    assert 0 < default_kv_bytes(1) <= psutil.virtual_memory().total // 2


def test_nobody_asks_the_host_alone() -> None:
    """In a container it has more than this process may take."""
    root = Path(fastdecode.__file__).parents[1]
    files = [
        file
        for package in ("fastdecode", "rworker", "sworker", "cost_model")
        for file in (root / package).rglob("*.py")
    ]
    assert [file.name for file in files if "virtual_memory().available" in file.read_text()] == [
        "machine.py"
    ]
    assert AttentionExecutor()._free_bytes is free_memory_bytes
