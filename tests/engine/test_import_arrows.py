"""Imports inside ``fastdecode.engine`` that still point up. import-linter refuses every
other one (``setup.cfg``, contract ``engine-rooms``); their number may only fall."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_IMPORTS = 22
MOST_ARROWS = 6
"""Lower them with every import that is removed; the goal is 0."""


def _upward() -> list[tuple[str, str]]:
    """Importing and imported module."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    lines = config["importlinter:contract:engine-rooms"].get("ignore_imports", "").split("\n")
    pairs = [line.split(" -> ") for line in lines if "->" in line]
    return [(importing.strip(), imported.strip()) for importing, imported in pairs]


def _room(module: str) -> str:
    """The package of ``fastdecode.engine`` that a module is in, or the module itself."""
    fastdecode, engine, room, *_ = module.split(".")
    assert (fastdecode, engine) == ("fastdecode", "engine")
    return room


def test_upward_imports_do_not_grow_in_number() -> None:
    upward = _upward()
    assert len(upward) <= MOST_IMPORTS
    assert len({(_room(one), _room(other)) for one, other in upward}) <= MOST_ARROWS


def test_one_import_is_one_line() -> None:
    upward = _upward()
    assert len(set(upward)) == len(upward)
    assert not [module for pair in upward for module in pair if "*" in module]
