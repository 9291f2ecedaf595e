"""Machine code that is kept on disk: of older versions, damaged, and where nothing can be kept."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numba
import pytest
from numba import int64

import cpu_kernels
from cpu_kernels.codegen import kept
from cpu_kernels.codegen.kept import keep

TREE = Path(cpu_kernels.__file__).parent.parent
SCRIPT = """
import logging, resource, sys
from numba import int64
logging.basicConfig(stream=sys.stdout, format="log: %(message)s")
from cpu_kernels.codegen.compiled import address_of, entry

@entry
def add(a, b):
    return a + b

@entry
def subtract(a, b):
    return a - b

if "full" in sys.argv:
    # No file may grow: writing fails as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
for function in (add, subtract):
    address_of(function, int64, int64)
    print("loaded" if function.stats.cache_hits else "compiled", function(5, 3))
"""
COMPILING = "log: compiling kernels for this CPU, kept for the next start"
COMPILED, LOADED = ["compiled 8", "compiled 2"], ["loaded 8", "loaded 2"]


def test_machine_code_of_other_sources_is_left_alone(tmp_path: Path) -> None:
    """Numba would read it, and fail on a class that is gone or run what other
    fields were compiled for."""
    tree = tmp_path / "tree"
    shutil.copytree(
        Path(cpu_kernels.__file__).parent,
        tree / "cpu_kernels",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    first = _compiled(tree, tmp_path / "cache")
    assert first and _compiled(tree, tmp_path / "cache") == first
    for path in (tree / "cpu_kernels").rglob("*.py"):
        path.write_text(path.read_text().replace("VariantType", "KindOfVariant"))
    second = _compiled(tree, tmp_path / "cache")
    assert first < second


def _compiled(tree: Path, cache: Path) -> set[tuple[str, int]]:
    """Compile, or load, in a process of its own. Returns the files that there
    are then, and from when."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(cache)}
    command = [
        sys.executable,
        "-c",
        "from cpu_kernels.kernels import append_unit, unit_entry; unit_entry(append_unit)",
    ]
    subprocess.run(command, env=environment, cwd=tree, check=True, timeout=120)
    return {(path.name, path.stat().st_mtime_ns) for path in cache.rglob("*.nbc")}


def _run(script: Path, *arguments: str, **environment: str) -> list[str]:
    """What the script prints: its log, whether it found machine code on disk, and its result."""
    kept = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
    child = subprocess.run(
        [sys.executable, "-B", str(script), *arguments],
        env={**kept, "PYTHONPATH": str(TREE), **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    return child.stdout.splitlines()


def _results(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("log: ")]


def _log(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("log: ")]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The script, and a cache that it has filled."""
    directory = tmp_path_factory.mktemp("filled")
    (script := directory / "add.py").write_text(SCRIPT)
    lines = _run(script, NUMBA_CACHE_DIR=str(directory / "cache"))
    assert lines == [COMPILING, *COMPILED], "it is said once, and before"
    return script, directory / "cache"


@pytest.fixture
def cache(filled: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of that cache."""
    return shutil.copytree(filled[1], tmp_path / "cache")


def test_machine_code_is_kept_and_loaded(filled: tuple[Path, Path], cache: Path) -> None:
    assert _run(filled[0], NUMBA_CACHE_DIR=str(cache)) == LOADED


def test_what_another_process_compiles_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And loaded, once it is there."""
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    first = _dispatcher()
    first.compile((int64,))
    assert not list(tmp_path.rglob("*.lock"))
    (file,) = tmp_path.rglob("*.nbc")
    content = file.read_bytes()
    file.unlink()
    lock = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    waited = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            file.write_bytes(content)
            os.close(lock)

    monkeypatch.setattr(kept, "sleep", wait)
    second = _dispatcher()
    second.compile((int64,))
    assert len(waited) == 3 and second.stats.cache_hits and second(5) == 10
    assert not list(tmp_path.rglob("*.lock"))


def test_a_process_that_never_ends_its_compiling_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been stopped. One that died holds nothing up."""
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kept, "_LONGEST_WAIT_S", 0.0)
    _dispatcher().compile((int64,))
    (file,) = tmp_path.rglob("*.nbc")
    file.unlink()
    lock = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    for is_held in (True, False):
        dispatcher = _dispatcher()
        dispatcher.compile((int64,))
        assert dispatcher.stats.cache_misses and dispatcher(5) == 10
        assert file.exists()
        file.unlink()
        if is_held:
            os.close(lock)


def _double(x):  # type: ignore[no-untyped-def]
    return x + x


def _dispatcher() -> Any:
    dispatcher = numba.njit(_double)
    keep(dispatcher, _double, Path(__file__))
    return dispatcher


def test_no_directory_can_be_written_to(tmp_path: Path) -> None:
    """An install by root, and a user without a home: one line in the log, and everything runs."""
    (script := tmp_path / "add.py").write_text(SCRIPT)
    (tmp_path / "__pycache__").write_text("a file, which hinders root as well")
    lines = _run(script, HOME=os.devnull)
    assert _results(lines) == COMPILED
    (log,) = _log(lines)
    assert "NUMBA_CACHE_DIR" in log


def test_a_full_disk(filled: tuple[Path, Path], tmp_path: Path) -> None:
    script, cache = filled[0], tmp_path / "cache"
    lines = _run(script, "full", NUMBA_CACHE_DIR=str(cache))
    assert _results(lines) == COMPILED
    assert len(_log(lines)) == 2 and "could not be" in _log(lines)[1]
    assert [path for path in cache.rglob("*") if path.is_file()] == []
    assert _run(script, NUMBA_CACHE_DIR=str(cache)) == [COMPILING, *COMPILED]


def _flip(at: float) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        index = int(at * (len(content) - 1))
        return content[:index] + bytes([content[index] ^ 16]) + content[index + 1 :]

    return damage


Damage: TypeAlias = Callable[[bytes], bytes]
DAMAGES: dict[str, tuple[Damage, Damage]] = {
    "empty, a bit in the middle": (lambda content: b"", _flip(0.3)),
    "half, a bit at the end": (lambda content: content[: len(content) // 2], _flip(1.0)),
}


@pytest.mark.parametrize("damages", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_compiled_anew_and_replaced(
    filled: tuple[Path, Path],
    cache: Path,
    damages: tuple[Damage, Damage],
) -> None:
    """Each of the two files in its own way."""
    script, _ = filled
    kept = sorted(path for path in cache.rglob("*") if path.is_file())
    for path, damage in zip(kept, damages, strict=True):
        path.write_bytes(damage(path.read_bytes()))
    lines = _run(script, NUMBA_CACHE_DIR=str(cache))
    assert _results(lines) == COMPILED
    assert len(_log(lines)) == 1
    assert _run(script, NUMBA_CACHE_DIR=str(cache)) == LOADED


def test_a_directory_where_a_file_should_be(filled: tuple[Path, Path], cache: Path) -> None:
    """What can be neither read nor replaced is gone without, at each start."""
    for path in [path for path in cache.rglob("*") if path.is_file()]:
        path.unlink()
        path.mkdir()
    for _ in range(2):
        lines = _run(filled[0], NUMBA_CACHE_DIR=str(cache))
        assert _results(lines) == COMPILED
        assert len(_log(lines)) == 1
