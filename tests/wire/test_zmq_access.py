"""Which addresses may be listened at, with which key; ZeroMQ's own threads."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

from fastdecode.core.errors import ConfigError
from fastdecode.wire.zmq.hub import io_threads_for
from fastdecode.wire.zmq.keys import NO_KEY, ClusterKey, check_address, read_key

A_KEY = ClusterKey(b"public", b"secret")
EVERY = "every interface"


@pytest.mark.parametrize(
    ("address", "key", "match"),
    [
        ("127.0.0.1:5555", None, "not of the form"),
        ("tcp://127.0.0.1", None, "not of the form"),
        ("tcp://127.0.0.1:99999", None, "not of the form"),
        ("ipc:///tmp/x", None, "not of the form"),
        ("tcp://*:5555", None, EVERY),
        ("tcp://*:5555", A_KEY, EVERY),
        ("tcp://*:5555", NO_KEY, EVERY),
        ("tcp://0.0.0.0:5555", None, EVERY),
        ("tcp://[::]:5555", None, EVERY),
        ("tcp://[0:0::0]:5555", None, EVERY),
        ("tcp://0:5555", None, EVERY),
        ("tcp://10.1.2.3:5555", None, "needs a key"),
        ("tcp://no-such-host.invalid:5555", None, "Name or service not known|resolution"),
    ],
)
def test_addresses_that_are_refused(address: str, key: ClusterKey | None, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check_address(address, key, parameter="bind")


def test_addresses_that_are_allowed() -> None:
    for host in ("127.0.0.1:0", "127.0.0.9:*", "[::1]:80", "localhost:5555"):
        check_address(f"tcp://{host}", None, parameter="bind")
    for key in (A_KEY, NO_KEY):
        check_address("tcp://10.1.2.3:5555", key, parameter="bind")


def test_none_in_place_of_a_key_warns_and_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_key(None) is None and not caplog.messages
    assert read_key("none") == NO_KEY
    assert "nothing between hosts is encrypted" in caplog.text
    monkeypatch.chdir(tmp_path)
    ClusterKey.create(Path("none"))
    key = read_key("./none")
    assert key is not None and len(key.secret) == 40
    assert key.secret.decode() not in repr(key)


def test_key_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match="No such file"):
        ClusterKey.read(path)
    ClusterKey.create(path)
    exists = f"exists and was not changed.*--key {path}.*another file"
    with pytest.raises(ConfigError, match=exists):
        ClusterKey.create(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        ClusterKey.read(path)
    path.chmod(0o600)
    path.write_text(path.read_text() + "authenticate")
    with pytest.raises(ConfigError, match=r"line 1: .* other lines behind it"):
        ClusterKey.read(path)
    path.write_text("short")
    with pytest.raises(ConfigError, match=f"{path}, line 1: it is not a key.*--new-key"):
        ClusterKey.read(path)


@pytest.mark.parametrize(
    ("num_peers", "num_cores", "expected"), [(0, 64, 1), (16, 64, 16), (16, 16, 4), (4, 2, 1)]
)
def test_an_io_thread_an_r_worker_and_a_quarter_of_the_cores(
    num_peers: int, num_cores: int, expected: int
) -> None:
    assert io_threads_for(num_peers, num_cores) == expected
