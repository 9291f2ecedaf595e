"""CPUs and memory that a process may use, under control groups of version 1 and 2; NUMA nodes;
and a user without a home."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import fastdecode
from fastdecode.core.host import cpus
from fastdecode.core.host import facts as host
from fastdecode.core.host.cpus import available_cores, cpu_quota
from fastdecode.core.host.machine import default_kv_bytes, free_memory_bytes
from fastdecode.core.model.local_models import hub_cache
from fastdecode.core.model.weights_hash import user_cache
from rworker.attention import AttentionExecutor

ROOT = Path(fastdecode.__file__).parents[1]

needs_two = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="this process may use one CPU",
)


def write(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize(
    ("own", "groups", "quota"),
    [
        ("0::/\n", {"": {"cpu__max": "50000 100000\n"}}, 0.5),
        ("0::/a/b\n", {"a": {"cpu__max": "150000 100000"}, "a/b": {"cpu__max": "max 100000"}}, 1.5),
        ("0::/a/b\n", {"a": {"cpu__max": "400000 100000"}, "a/b": {"cpu__max": "100000 50000"}}, 2),
        ("0::/../x\n", {"": {"cpu__max": "100000 100000"}}, 1),
        ("1:cpu,cpuacct:/job\n0::/\n", {"cpu/job": {"cpu__cfs_quota_us": "250000\n",
                                                   "cpu__cfs_period_us": "100000\n"}}, 2.5),
        ("1:cpu:/docker/f00\n", {"cpu": {"cpu__cfs_quota_us": "100000",
                                         "cpu__cfs_period_us": "100000"}}, 1),
        ("1:cpu:/\n", {"cpu": {"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"}}, None),
        *[("0::/\n", {"": {"cpu__max": text}}, None)
          for text in ("max 100000\n", "", "100000 0", "100000")],
        ("4:cpuset:/a\n", {"cpuset/a": {"cpu__cfs_quota_us": "1", "cpu__cfs_period_us": "2"}},
         None),
        ("", {}, None),
    ],
)  # fmt: skip
def test_cpu_quota_is_the_tightest_groups(
    own: str, groups: dict[str, dict[str, str]], quota: float | None, tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(own)
    for directory, files in groups.items():
        write(tmp_path / "groups" / directory, **files)
    assert cpu_quota(tmp_path / "groups", tmp_path / "own") == quota
    assert cpu_quota(tmp_path / "groups", tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("quota", "sharing", "cores"),
    [
        (None, (1,), 8), (None, (3,), 2), (None, (16,), 1), (None, (4, 1), 8), (None, (4, 2), 4),
        (0.5, (1,), 1), (1.5, (1,), 2), (4.0, (2,), 2), (4.0, (2, 1), 2), (64.0, (2,), 4),
    ],
)  # fmt: skip
def test_available_cores(
    quota: float | None, sharing: tuple[int, ...], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpus, "cpu_quota", lambda: quota)
    monkeypatch.setattr(cpus, "usable_cpus", lambda: frozenset(range(8)))
    assert available_cores(*sharing) == cores


SCRIPT = """
import os, threading
import fastdecode
import sworker.device
from fastdecode.core.host.cpus import available_cores, usable_cpus
found = []
thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
thread.start(); thread.join()
print(available_cores(), len(usable_cpus()), len(os.sched_getaffinity(0)), len(found[0]))
"""


def run(script: str, **variables: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", script]
    outcome = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


@needs_two
@pytest.mark.parametrize("name", ["OMP_PROC_BIND", "GOMP_CPU_AFFINITY"])
def test_threads_are_not_bound_by_openmp(name: str) -> None:
    num = len(os.sched_getaffinity(0))
    value = "0-1" if name == "GOMP_CPU_AFFINITY" else "true"
    assert run(SCRIPT, **{name: value}).split() == [str(num)] * 4


@needs_two
def test_callers_mask_counts_with_and_without_openmp() -> None:
    """Before the package is imported, and after it."""
    mask = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\n"
    assert run(mask + SCRIPT, OMP_PROC_BIND="true").split() == ["1"] * 4
    after = SCRIPT.replace("import sworker.device", f"{mask}import sworker.device")
    assert run(after).split() == ["1"] * 4


def test_user_cache_without_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", no_home)
    directory = user_cache({})
    assert list(directory.glob("*.json")) == []
    for use in (lambda: directory.mkdir(parents=True), lambda: (directory / "x").read_bytes()):
        with pytest.raises(OSError):
            use()
    assert user_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/fastdecode/weights")


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize(
    "variables", [{}, {"HF_HOME": "~/hf"}, {"HF_HUB_CACHE": "~nobody-here/hub"},
                  {"XDG_CACHE_HOME": "~/c"}]
)  # fmt: skip
def test_hub_cache_without_home_is_where_nothing_is(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without a home
    assert not hub_cache().exists()


def test_only_one_file_asks_the_host_itself() -> None:
    """In a container the host has more than this process may take, and a home may be missing."""
    packages = ("fastdecode", "rworker", "sworker", "cost_model", "cpu_kernels")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    for text, allowed in (
        ("Path.home()", {"weights_hash.py"}),
        ("sched_getaffinity(0)", {"cpus.py", "bench.py"}),
        ("virtual_memory().available", {"machine.py"}),
    ):
        assert {file.name for file in files if text in file.read_text()} <= allowed
    assert AttentionExecutor()._free_bytes is free_memory_bytes


# --- memory
# ------------------------------------------------------------------------------

MB = 1 << 20


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own"


def test_the_tightest_groups_memory_counts(tmp_path: Path, own: Path) -> None:
    own.write_text("0::/slice/job\n")
    job, stat = tmp_path / "slice/job", f"anon {30 * MB}\ninactive_file {5 * MB}\nactive_file 7\n"
    write(tmp_path / "slice", memory__max=f"{100 * MB}\n", memory__current=f"{90 * MB}\n")
    write(job, memory__max=f"{50 * MB}\n", memory__stat=stat)
    for current, free in ((44, 10), (48, 7), (60, 0)):
        write(job, memory__current=f"{current * MB}\n")
        assert free_memory_bytes(tmp_path, own) == free * MB


def test_memory_of_version_1(tmp_path: Path, own: Path) -> None:
    own.write_text("5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n")
    limits = {"memory__limit_in_bytes": f"{20 * MB}", "memory__usage_in_bytes": f"{12 * MB}"}
    stat = f"inactive_file 1\ntotal_inactive_file {2 * MB}\n"
    write(tmp_path / "memory/a", **limits, memory__stat=stat)
    assert free_memory_bytes(tmp_path, own) == 10 * MB


@pytest.mark.parametrize("text", ["0::/\n", "0::/not/there\n", "", "nonsense\n"])
def test_no_limit_of_memory(text: str, tmp_path: Path, own: Path) -> None:
    own.write_text(text)
    write(tmp_path, memory__max="max\n", memory__current="1\n")
    free = psutil.virtual_memory().total
    assert free // 64 < free_memory_bytes(tmp_path, own) <= free
    assert free_memory_bytes(tmp_path, tmp_path / "no such file") > free // 64


def test_half_of_the_memory_is_for_caches() -> None:
    assert default_kv_bytes(3, 600) == 100
    assert 0 < default_kv_bytes(1) <= psutil.virtual_memory().total // 2


def test_numa_nodes_are_known_by_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_NODES", tmp_path)
    assert host.this_host().numa_cpus == (), "a host that does not say"
    for node, cpulist in {0: "0-3", 2: "4-7", 10: "8"}.items():
        write(tmp_path / f"node{node}", cpulist=f"{cpulist}\n")
    assert host.this_host().numa_cpus == ("0-3", "", "4-7", *[""] * 7, "8")
