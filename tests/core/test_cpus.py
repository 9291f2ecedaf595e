"""CPUs that a process may use, the quota of their time, and a user without a home."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastdecode
from fastdecode.core.host import cpus
from fastdecode.core.host.cpus import available_cores, cpu_quota
from fastdecode.core.host.user_cache import user_cache
from fastdecode.core.model.local_models import hub_cache

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


def run(script: str, *, without: tuple[str, ...] = (), **variables: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in without}
    environ["PYTHONPATH"] = str(Path(fastdecode.__file__).parents[1])
    outcome = subprocess.run(
        [sys.executable, "-c", script], env=environ | variables, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


@needs_two
@pytest.mark.parametrize(
    ("name", "value"),
    [("OMP_PROC_BIND", "true"), ("OMP_PLACES", "cores"), ("GOMP_CPU_AFFINITY", "0-1"),
     ("OMP_PROC_BIND", "spread"), ("KMP_AFFINITY", "compact")],
)  # fmt: skip
def test_threads_are_not_bound_by_openmp(name: str, value: str) -> None:
    num = len(os.sched_getaffinity(0))
    assert run(SCRIPT, **{name: value}).split() == [str(num)] * 4


@needs_two
def test_callers_mask_counts_with_and_without_openmp() -> None:
    """Before the package is imported, and after it."""
    before = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\n"
    assert run(before + SCRIPT, OMP_PROC_BIND="true").split() == ["1"] * 4
    after = SCRIPT.replace("import sworker.device", f"{before}import sworker.device")
    assert run(after).split() == ["1"] * 4


def test_user_cache_without_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", no_home)
    directory = user_cache("weights", {})
    assert list(directory.glob("*.json")) == []
    for use in (lambda: directory.mkdir(parents=True), lambda: (directory / "x").read_bytes()):
        with pytest.raises(OSError):
            use()
    assert user_cache("weights", {"XDG_CACHE_HOME": "/c"}) == Path("/c/fastdecode/weights")


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


def test_no_file_asks_for_the_home_directory_itself() -> None:
    root = Path(fastdecode.__file__).parents[1]
    packages = ("fastdecode", "rworker", "sworker", "cost_model", "cpu_kernels")
    files = [file for package in packages for file in (root / package).rglob("*.py")]
    asking = {file.name for file in files if "Path.home()" in file.read_text()}
    assert asking == {"user_cache.py"}
    counting = {file.name for file in files if "sched_getaffinity(0)" in file.read_text()}
    assert counting <= {"cpus.py", "bench.py"}
