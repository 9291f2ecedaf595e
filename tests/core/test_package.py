"""What is installed has all files that the checkout has."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("fastdecode", "rworker", "sworker", "cpu_kernels", "cost_model")
pytest.importorskip("setuptools")


def test_every_file_of_the_packages_is_built(tmp_path: Path) -> None:
    build = "import setuptools; setuptools.setup()"
    where = ["--build-lib", str(tmp_path / "built"), "egg_info", "--egg-base", str(tmp_path)]
    command = [sys.executable, "-c", build, "build_py", *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = subprocess.run(
        ["git", "ls-files", "-z", *PACKAGES], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    if listed.returncode != 0:
        pytest.skip("this isn't a git checkout")
    missing = [
        name
        for name in listed.stdout.split("\0")
        if name and (ROOT / name).exists() and not (tmp_path / "built" / name).exists()
    ]
    assert not missing


def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path: Path) -> None:
    build = "import setuptools; setuptools.setup()"
    where = ["egg_info", "--egg-base", str(tmp_path), "editable_wheel", "--dist-dir", str(tmp_path)]
    command = [sys.executable, "-c", build, *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".pth")]
        assert Path(files.read(name).decode().strip()) == ROOT
