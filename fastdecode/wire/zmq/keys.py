"""Who may talk to whom over ZeroMQ: addresses that name their interface, and the cluster's key.

With the secret of a key file each member proves to the others that it is one, and everything
between them is encrypted (CURVE). Without it only the loopback interface may be used, unless
``none`` stands in place of the file.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from socket import create_connection, getaddrinfo
from types import SimpleNamespace
from typing import Final, TypeAlias

import zmq
from zmq.auth.thread import ThreadAuthenticator

from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.os_errors import explained
from fastdecode.core.secret_file import exposure, shown

logger = logging.getLogger(__name__)

Socket: TypeAlias = "zmq.Socket[bytes]"

_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.%\w]+\]|[^:\[\]/]+):(?P<port>\d{1,5}|\*)")
_SECRET = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_ZAP_DOMAIN: Final = "fastdecode"
_PROBE_S: Final = 0.25


@dataclass(frozen=True)
class ClusterKey:
    """A CURVE key pair that every member of the cluster holds."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> ClusterKey:
        """Raises ConfigError: If the file can't be read, holds no key, or others may read it."""
        try:
            found, (text, *more) = path.stat(), path.read_bytes().strip().splitlines() or [b""]
        except OSError as error:
            raise ConfigError(f"key file {shown(path)}: {explained(error)}") from None
        if why := exposure(found, path):
            raise ConfigError(f"key file {path}: {why}")
        if more or not _SECRET.fullmatch(text):
            why = "has other lines behind it" if more else "is not a key of 40 characters"
            raise ConfigError(
                f"key file {path}, line 1: it {why}: make a key with fastdecode r-worker "
                "--new-key FILE, and copy that file unchanged"
            )
        return cls(zmq.curve_public(text), text)

    @staticmethod
    def create(path: Path) -> None:
        """Write a new key to a new file, for its owner only. Raises ConfigError: If it exists, or
        can't be written."""
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(zmq.curve_keypair()[1] + b"\n")
        except FileExistsError:
            raise ConfigError(
                f"the key file {path} exists and was not changed: use it (--key {path}), or name "
                "another file for a new key. Every host needs the same key"
            ) from None
        except OSError as error:
            raise ConfigError(f"key file {path}: {explained(error)}") from None


NO_KEY: Final = ClusterKey(b"", b"")
"""Nothing is proved or encrypted, also beyond loopback, because ``--key`` is ``none``."""


def read_key(given: str | None) -> ClusterKey | None:
    """Return the key that ``--key`` names; None without one. Raises ConfigError: A bad file."""
    if given is None:
        return None
    if given != "none":
        return ClusterKey.read(Path(given))
    logger.warning(
        "--key none: nothing between hosts is encrypted, and any process that reaches a port may "
        "use it: only on a network that you trust"
    )
    return NO_KEY


def secure(
    socket: Socket, key: ClusterKey | None, *, is_server: bool
) -> ThreadAuthenticator | None:
    """Let a socket prove the key, and take messages only from peers that prove it: ZeroMQ would
    buffer what any other sends. Return what a server stops before its context ends."""
    if key is None or key == NO_KEY:
        return None
    socket.curve_secretkey, socket.curve_publickey = key.secret, key.public
    if not is_server:
        socket.curve_serverkey = key.public
        return None
    authenticator = ThreadAuthenticator(socket.context)
    authenticator.start()
    members = SimpleNamespace(callback=lambda domain, public: public == key.public)
    authenticator.configure_curve_callback(_ZAP_DOMAIN, members)
    socket.zap_domain, socket.curve_server = _ZAP_DOMAIN.encode(), True
    return authenticator


def check_address(address: str, key: ClusterKey | None, *, parameter: str) -> None:
    """Raise ConfigError if an address, which the option ``parameter`` gave, is not tcp://HOST:PORT,
    is a wildcard, or is not loopback without a key."""
    given, match = Given(parameter, address), _ADDRESS.fullmatch(address)
    if match is None or (match["port"] != "*" and not 0 <= int(match["port"]) <= 65535):
        raise ConfigError(given, " is not of the form tcp://HOST:PORT")
    found, why = [], ""
    try:
        infos = getaddrinfo(match["host"].strip("[]"), None)
        found = [ip_address(str(info[4][0]).split("%")[0]) for info in infos]
    except OSError as error:  # the name of an interface, perhaps
        why = explained(error)
    if match["host"] == "*" or any(ip.is_unspecified for ip in found):
        raise ConfigError(
            given,
            " would listen on every interface: name the address of the one that S-workers reach",
        )
    if key is None and why:
        raise ConfigError(given, f": {why}. Without a key only addresses of this host can be used")
    if key is None and not all(ip.is_loopback for ip in found):
        raise ConfigError(
            given,
            " can be reached from other hosts, which needs a key: make one with fastdecode "
            "r-worker --new-key FILE, copy it to every host, and give it with ",
            Given("key"),
            ", or none on a network that you trust",
        )


def connect_error(address: str) -> OSError | None:
    """Return why a TCP connection to an address fails. None if it is accepted or takes longer."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
    except OSError as error:
        return None if isinstance(error, TimeoutError) else error
    return None
