"""Which addresses may be listened at, with which key."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

from fastdecode.core.errors import ConfigError
from fastdecode.wire.zmq.keys import NO_KEY, ClusterKey, check_address, read_key


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("127.0.0.1:5555", "not of the form"),
        ("tcp://127.0.0.1", "not of the form"),
        ("tcp://127.0.0.1:99999", "not of the form"),
        ("ipc:///tmp/x", "not of the form"),
        ("tcp://*:5555", "every interface"),
        ("tcp://0.0.0.0:5555", "every interface"),
        ("tcp://[::]:5555", "every interface"),
        ("tcp://[0:0::0]:5555", "every interface"),
        ("tcp://0:5555", "every interface"),
        ("tcp://10.1.2.3:5555", "needs a key"),
        ("tcp://no-such-host.invalid:5555", "Name or service not known|resolution"),
    ],
)
def test_addresses_that_are_refused(address: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check_address(address, None, parameter="bind")


def test_addresses_that_are_allowed(tmp_path: Path) -> None:
    for address in (
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.9:*",
        "tcp://[::1]:80",
        "tcp://localhost:5555",
    ):
        check_address(address, None, parameter="bind")
    ClusterKey.create(tmp_path / "key")
    check_address("tcp://10.1.2.3:5555", ClusterKey.read(tmp_path / "key"), parameter="bind")


def test_wildcards_are_refused_even_with_a_key(tmp_path: Path) -> None:
    ClusterKey.create(tmp_path / "key")
    with pytest.raises(ConfigError, match="every interface"):
        check_address("tcp://*:5555", ClusterKey.read(tmp_path / "key"), parameter="bind")


def test_none_in_place_of_a_key_is_plain_beyond_loopback_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_key(None) is None and not caplog.messages
    assert read_key("none") == NO_KEY
    assert "nothing between hosts is encrypted" in caplog.text
    check_address("tcp://10.1.2.3:5555", NO_KEY, parameter="bind")
    with pytest.raises(ConfigError, match="every interface"):
        check_address("tcp://*:5555", NO_KEY, parameter="bind")
    monkeypatch.chdir(tmp_path)
    ClusterKey.create(Path("none"))
    key = read_key("./none")
    assert key is not None and len(key.secret) == 40


def test_key_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="No such file"):
        ClusterKey.read(path)
    ClusterKey.create(path)
    with pytest.raises(
        ConfigError, match=f"exists and was not changed.*--key {path}.*another file"
    ):
        ClusterKey.create(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        ClusterKey.read(path)
    path.chmod(0o600)
    secret = path.read_text()
    path.write_text(secret + "authenticate")
    with pytest.raises(ConfigError, match=r"line 1: .* other lines behind it"):
        ClusterKey.read(path)
    path.write_text("short")
    with pytest.raises(ConfigError, match=f"{path}, line 1: it is no key.*--new-key"):
        ClusterKey.read(path)


def test_a_key_says_nothing_of_its_secret(tmp_path: Path) -> None:
    ClusterKey.create(tmp_path / "key")
    key = ClusterKey.read(tmp_path / "key")
    assert key.secret.decode() not in repr(key)
