"""What the system refused is said with the mend, in the same words everywhere; and errors name
files of keys, and never a key that was given in place of a file."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from fastdecode.core.errors import ConfigError
from fastdecode.core.files import check_paths, check_writable
from fastdecode.core.os_errors import explained
from fastdecode.core.secret_file import shown


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "directory: check the path"),
        (OSError(errno.ENOSPC, "No space left on device"), "make room, or choose another disk"),
        (OSError(errno.EADDRINUSE, "in use"), "Address already in use: choose another address"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('x', 1)"),
         "Connection refused: check the address"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "check the host's name"),
        (OSError(errno.EXDEV, "Invalid cross-device link"), "Invalid cross-device link"),
        (OSError("library words"), "library words"),
    ],
)  # fmt: skip
def test_the_reason_comes_with_the_mend(error: OSError, words: str) -> None:
    assert words in explained(error) and "Errno" not in explained(error)


def test_paths_that_cannot_be_used_name_the_mend(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory: check the path"):
        check_paths(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"No such directory: make the directory"):
        check_writable(tmp_path / "none" / "out", "output")
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(ConfigError, match=r"Permission denied: choose another path"):
            check_writable(tmp_path / "out", "output")


@pytest.mark.parametrize(
    "key",
    ["aB3/dEf+Gh1JkLmN0pQrStUv==", "/aB3dEf+Gh1JkLmN0pQrStUv", "sk-proj.abcDEF123456", "a" * 40],
)
def test_shown_hides_what_may_be_a_key(key: str) -> None:
    assert key not in shown(Path(key))


def test_shown_names_files(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", Path("missing.key"), Path("keys")):
        assert shown(path) == str(path)
