"""Who may talk to whom over ZeroMQ: addresses that name their interface, and the key that a
cluster's members share.

A key file holds one secret, which S-workers and R-workers all have. With it each proves to the
other that it belongs to the cluster, and everything between them is encrypted (CURVE). Without a
key only the loopback interface may be used, unless ``none`` stands in place of the file.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
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


@dataclass(frozen=True)
class ClusterKey:
    """A CURVE key pair that every member of the cluster holds."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> ClusterKey:
        """
        Raises:
            ConfigError: If the file can't be read, holds no key, or others may read it.
        """
        try:
            found, (text, *more) = path.stat(), path.read_bytes().strip().splitlines() or [b""]
        except OSError as error:
            raise ConfigError(f"key file {shown(path)}: {explained(error)}") from None
        if why := exposure(found, path):
            raise ConfigError(f"key file {path}: {why}")
        if more or not _SECRET.fullmatch(text):
            why = "has other lines behind it" if more else "is no key of 40 characters"
            raise ConfigError(
                f"key file {path}, line 1: it {why}: make a key with fastdecode r-worker "
                "--new-key FILE, and copy that file unchanged"
            )
        return cls(zmq.curve_public(text), text)

    @staticmethod
    def create(path: Path) -> None:
        """Write a new key to a file that doesn't exist yet, for its owner only.

        Raises:
            ConfigError: If the file exists, or can't be written.
        """
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
"""Nothing is proved or encrypted, also beyond loopback, because the user said ``none``."""


def read_key(given: str | None) -> ClusterKey | None:
    """Return the key that ``--key`` names. None without one: this host only.

    Raises:
        ConfigError: See ``ClusterKey.read``.
    """
    if given is None:
        return None
    if given != "none":
        return ClusterKey.read(Path(given))
    logger.warning(
        "--key none: nothing between hosts is encrypted, and any process that reaches a port may "
        "use it: only on a network that you trust"
    )
    return NO_KEY


def name_key(socket: zmq.Socket[bytes], key: ClusterKey | None) -> None:
    """Let a socket that connects prove the key, and ask the other end for it."""
    if key is not None and key != NO_KEY:
        socket.curve_secretkey, socket.curve_publickey = key.secret, key.public
        socket.curve_serverkey = key.public


def admit_only(
    context: zmq.Context[Socket], socket: Socket, key: ClusterKey | None
) -> ThreadAuthenticator | None:
    """Let ZeroMQ take messages only from peers that prove the key. Without that it would buffer
    what any peer sends, and a message of endless parts, for which it has no limit.

    Returns:
        What answers ZeroMQ's questions: stop it before the context ends. None without a key.
    """
    if key is None or key == NO_KEY:
        return None
    of_members = key.public

    class Members:
        def callback(self, domain: str, public: bytes) -> bool:
            return public == of_members

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(_ZAP_DOMAIN, Members())
    socket.zap_domain = _ZAP_DOMAIN.encode()
    socket.curve_server = True
    socket.curve_secretkey, socket.curve_publickey = key.secret, key.public
    return authenticator


def check_address(address: str, key: ClusterKey | None, *, parameter: str) -> None:
    """Refuse addresses that reach further than the user said, or than is safe without a key.

    Args:
        parameter: Option that gave the address, for the error.

    Raises:
        ConfigError: If it is not tcp://HOST:PORT, is a wildcard, or is not loopback without a key.
    """
    given, match = Given(parameter, address), _ADDRESS.fullmatch(address)
    if match is None or (match["port"] != "*" and not 0 <= int(match["port"]) <= 65535):
        raise ConfigError(given, " is not of the form tcp://HOST:PORT")
    found = _resolved(match["host"].strip("[]"))
    if match["host"] == "*" or any(ip.is_unspecified for ip in found):
        raise ConfigError(
            given,
            " would listen on every interface: name the address of the one that S-workers reach",
        )
    if key is None and not found:
        raise ConfigError(
            given,
            f": {lookup_error(address)}. Without a key only addresses of this host can be used",
        )
    if key is None and not all(ip.is_loopback for ip in found):
        raise ConfigError(
            given,
            " can be reached from other hosts, which needs a key: make one with fastdecode "
            "r-worker --new-key FILE, copy it to every host, and give it with ",
            Given("key"),
            ", or none on a network that you trust",
        )


def lookup_error(address: str) -> str:
    """Return why the host in an address has no IP address. Empty if it has one."""
    try:
        socket.getaddrinfo(_host_port(address)[0], None)
    except OSError as error:
        return explained(error)
    return ""


def connect_error(address: str, timeout_s: float) -> str:
    """Return why a TCP connection to an address fails. Empty if it is accepted or takes longer."""
    try:
        socket.create_connection(_host_port(address), timeout_s).close()
    except TimeoutError:
        return ""
    except OSError as error:
        return explained(error)
    return ""


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def _resolved(host: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses of a host; none for names that don't resolve, as those of interfaces."""
    try:
        return {
            ipaddress.ip_address(str(info[4][0]).split("%")[0])
            for info in socket.getaddrinfo(host, None)
        }
    except OSError:
        return set()
