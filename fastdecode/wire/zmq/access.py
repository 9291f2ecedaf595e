"""Who may talk to whom over ZeroMQ: addresses that name their interface, and
the key that a cluster's members share.

A key file holds one secret, which S-workers and R-workers all have; with it
each proves to the other that it belongs to the cluster. Everything between them
is encrypted (CURVE), unless the file's second line says ``authenticate`` (``LinkSecurity``).
Without a key only the loopback interface may be used.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

import zmq

from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.os_errors import explained
from fastdecode.core.secret_file import exposure, shown
from fastdecode.wire.zmq.proof import LinkSecurity, door_password, link_key

_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.%\w]+\]|[^:\[\]/]+):(?P<port>\d{1,5}|\*)")
MEMBER: Final = "member"
_AUTHENTICATE: Final = LinkSecurity.AUTHENTICATE.value.encode()
_SECRET = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True)
class ClusterKey:
    """A CURVE key pair that every member of the cluster holds, and how it
    protects connections."""

    public: bytes
    secret: bytes = field(repr=False)
    security: LinkSecurity = LinkSecurity.ENCRYPT

    @property
    def encrypts(self) -> bool:
        """Whether what travels is encrypted; else both ends only prove the key."""
        return self.security is LinkSecurity.ENCRYPT

    @cached_property
    def for_proofs(self) -> bytes:
        """The key by which ends prove that they have this one."""
        return link_key(self.secret)

    @classmethod
    def read(cls, path: Path) -> ClusterKey:
        """
        Raises:
            ConfigError: the file can't be read, isn't a key, or others may read
                it.
        """
        try:
            found, (text, *more) = path.stat(), path.read_bytes().strip().splitlines() or [b""]
        except OSError as error:
            raise ConfigError(f"key file {shown(path)}: {explained(error)}") from None
        if why := exposure(found, path):
            raise ConfigError(f"key file {path}: {why}")
        if not _SECRET.fullmatch(text) or more not in ([], [_AUTHENTICATE]):
            why = "is no key of 40 characters"
            if more:
                why = f"has other lines behind it than {_AUTHENTICATE.decode()}"
            raise ConfigError(
                f"key file {path}, line 1: it {why}: make a key with fastdecode r-worker "
                "--new-key FILE, and copy that file unchanged"
            )
        security = LinkSecurity.AUTHENTICATE if more else LinkSecurity.ENCRYPT
        return cls(zmq.curve_public(text), text, security)

    @staticmethod
    def create(path: Path, security: str = LinkSecurity.ENCRYPT.value) -> None:
        """Write a new key to a file that doesn't exist yet, for its owner only.

        Args:
            security: what the key does, for all who have it; see ``LinkSecurity``.

        Raises:
            ConfigError: the file exists, or can't be written.
        """
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                is_encrypting = LinkSecurity(security) is LinkSecurity.ENCRYPT
                lines = [zmq.curve_keypair()[1], *([] if is_encrypting else [_AUTHENTICATE])]
                file.write(b"\n".join(lines) + b"\n")
        except FileExistsError:
            raise ConfigError(
                f"the key file {path} exists and was not changed: use it (--key {path}), or name "
                "another file for a new key. Every host needs the same key"
            ) from None
        except OSError as error:
            raise ConfigError(f"key file {path}: {explained(error)}") from None


def name_key(socket: zmq.Socket[bytes], key: ClusterKey | None) -> None:
    """Have a socket that connects say, before anything else, that it has the key."""
    if key is None:
        return
    if key.encrypts:
        socket.curve_secretkey, socket.curve_publickey = key.secret, key.public
        socket.curve_serverkey = key.public
    else:
        socket.plain_username = MEMBER.encode()
        socket.plain_password = door_password(key.for_proofs).encode()


def check_address(address: str, key: ClusterKey | None, *, parameter: str) -> None:
    """Refuse addresses that reach further than was said, or further than is
    safe without a key.

    Args:
        parameter: what gave the address, in the words of an error.

    Raises:
        ConfigError: not tcp://HOST:PORT, a wildcard, or not loopback though
            there is no key.
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
