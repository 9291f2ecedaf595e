"""Errors name files of keys, and never a key that was given in place of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdecode.core.secret_file import shown


@pytest.mark.parametrize(
    "key",
    ["aB3/dEf+Gh1JkLmN0pQrStUv==", "/aB3dEf+Gh1JkLmN0pQrStUv", "sk-proj.abcDEF123456", "a" * 40],
)
def test_shown_hides_what_may_be_a_key(key: str) -> None:
    assert key not in shown(Path(key))


def test_shown_names_files(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", Path("missing.key"), Path("keys")):
        assert shown(path) == str(path)
