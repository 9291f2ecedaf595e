"""Container files install what the project has: its files, its extras, pinned versions."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {path.name: path for path in (ROOT / "examples" / "containers").glob("*.Containerfile")}
EXTRAS = {
    "S-worker.Containerfile": {"sworker", "structured", "server", "mpi", "zmq"},
    "R-worker.Containerfile": {"mpi", "zmq"},
}


def _setup() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    return config


def test_one_for_each_role() -> None:
    assert set(FILES) == set(EXTRAS)


@pytest.mark.parametrize("name", EXTRAS)
def test_installs_extras_of_the_project(name: str) -> None:
    text = FILES[name].read_text("utf-8")
    extras = set(re.search(r"\.whl\)\[(.*?)\]", text)[1].split(","))  # type: ignore[index]
    assert extras == EXTRAS[name]
    assert extras <= set(_setup()["options.extras_require"])


@pytest.mark.parametrize("name", EXTRAS)
def test_copies_every_package_and_only_what_exists(name: str) -> None:
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", FILES[name].read_text("utf-8"), re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    packages = _setup()["options.packages.find"]["include"].split()
    assert {package.rstrip("*") for package in packages} <= sources
    assert not [source for source in sources if not (ROOT / source).exists()]


@pytest.mark.parametrize("name", EXTRAS)
def test_versions_are_pinned_and_root_does_not_run(name: str) -> None:
    text = FILES[name].read_text("utf-8")
    assert all(re.search(r":3\.\d+\.\d+-", line) for line in re.findall(r"^FROM (.*)$", text, re.M))
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    assert set(re.findall(r"torch==\S+", text)) <= set(constraints.split())
    assert re.findall(r"^USER (.*)$", text, re.M)[-1:] == ["1000"]
    assert 'ENTRYPOINT ["fastdecode"]' in text
