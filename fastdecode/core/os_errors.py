"""What the operating system refused, with the mend: for messages to users."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from typing import Final

_MENDS: Final[Mapping[int, str]] = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "name a file in it",
    errno.EACCES: "choose a path that you may use, or change its permissions",
    errno.EPERM: "choose a path that you may use, or change its permissions",
    errno.EROFS: "choose a path on another file system",
    errno.ENOSPC: "make room, or choose another disk",
    errno.EDQUOT: "make room, or choose another disk",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "raise the limit (ulimit -n)",
    errno.EIO: "choose another disk",
    errno.EADDRINUSE: "choose another address, or end the program that uses it",
    errno.EADDRNOTAVAIL: "name an address of this host",
    errno.ECONNREFUSED: "check the address, and that something listens there",
    errno.EHOSTUNREACH: "check the address and the network",
    errno.ENETUNREACH: "check the address and the network",
}
_UNKNOWN_HOST: Final = "check the host's name, or give its IP address"


def explained(error: OSError) -> str:
    """Return the system's reason and what to do about it, to follow ``can't …: ``.

    For an error without a number (a library's own words) only the reason is known."""
    if isinstance(error, socket.gaierror):
        return f"{error.strerror}: {_UNKNOWN_HOST}"
    if error.errno is None:
        return str(error)
    # asyncio puts words of its own in the place of strerror.
    reason = os.strerror(error.errno) if error.errno in _MENDS else error.strerror or str(error)
    mend = _MENDS.get(error.errno)
    return reason if mend is None else f"{reason}: {mend}"
