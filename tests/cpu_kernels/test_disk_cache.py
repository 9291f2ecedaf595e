"""What an older version of the kernels has left on disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cpu_kernels


def test_machine_code_of_other_sources_is_left_alone(tmp_path: Path) -> None:
    """Numba would read it, and fail on a class that is gone or run what other fields were compiled for."""
    tree = tmp_path / "tree"
    shutil.copytree(
        Path(cpu_kernels.__file__).parent, tree / "cpu_kernels", ignore=shutil.ignore_patterns("__pycache__")
    )
    first = _compiled(tree, tmp_path / "cache")
    assert first and _compiled(tree, tmp_path / "cache") == first
    for path in (tree / "cpu_kernels").glob("*.py"):
        path.write_text(path.read_text().replace("VariantType", "KindOfVariant"))
    second = _compiled(tree, tmp_path / "cache")
    assert first < second


def _compiled(tree: Path, cache: Path) -> set[tuple[str, int]]:
    """Compile, or load, in a process of its own. Returns the indices that there are then, and from when."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", "from cpu_kernels.dispatch import append_entry; append_entry()"]
    subprocess.run(command, env=environment, cwd=tree, check=True, timeout=120)
    return {(path.name, path.stat().st_mtime_ns) for path in cache.rglob("*.nbi")}
