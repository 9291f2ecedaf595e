"""What is told to install where something is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

from fastdecode.core.errors import MissingExtraError, imports_for, pip_command


@dataclass
class Installed:
    origin: str | None

    def read_text(self, filename: str) -> str | None:
        assert filename == "direct_url.json"
        return self.origin


EDITABLE = json.dumps({"url": "file:///src", "dir_info": {"editable": True}})
COPIED = json.dumps({"url": "file:///src", "dir_info": {}})


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (EDITABLE, "pip install -e '.[zmq]'"),
        (COPIED, "pip install 'fastdecode[zmq]'"),
        (None, "pip install 'fastdecode[zmq]'"),
        ("no json", "pip install 'fastdecode[zmq]'"),
        ("[]", "pip install 'fastdecode[zmq]'"),
    ],
)
def test_as_it_was_installed(origin: str | None, command: str) -> None:
    assert pip_command("zmq", Installed(origin)) == command


def test_a_missing_package_is_told_with_its_extra() -> None:
    with (
        pytest.raises(MissingExtraError, match=r"^sockets needs the package 'pyzmq', .*\[zmq\]'$"),
        imports_for("sockets"),
    ):
        raise ModuleNotFoundError("No module named 'zmq'", name="zmq")
    with pytest.raises(ModuleNotFoundError, match="no such mistake"), imports_for("sockets"):
        raise ModuleNotFoundError("no such mistake", name="fastdecod")


def test_the_command_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fastdecode", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("fastdecode ")
