"""Imports inside ``fastdecode.engine`` point down, without an exception: import-linter
proves it by the contract ``engine-rooms`` of ``setup.cfg``, which must stay whole."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_contract_has_no_exceptions_and_knows_every_module() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    contract = config["importlinter:contract:engine-rooms"]
    assert "ignore_imports" not in contract
    assert contract.getboolean("exhaustive")
    assert contract["containers"].split() == ["fastdecode.engine"]
