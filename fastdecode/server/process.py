"""The HTTP process, as the process of the engine sees it: it is executed, not
forked, and before MPI is joined."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.server.channel import Channel
from fastdecode.server.keys import KEYS_VARIABLE
from fastdecode.server.messages import Listening, Opening, Unfit
from fastdecode.wire.mpi.launcher import without_launcher

# The child looks for modules where we do, and nowhere else: -I leaves out the working directory.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; from fastdecode.server.frontend import main; "
    "main(int(sys.argv[1]))"
)
_ENDS_WITHIN_S = 5.0


class HttpProcess:
    """Starts, and listens; nothing is answered but by refusals until it is told
    that the engine is ready. Close it.

    Args:
        opening: what to serve.
        environ: in which it runs, but for what launchers and keys put there.

    Raises:
        ConfigError: it can't listen there, or the model's tokenizer or template
            is of no use.
    """

    def __init__(self, opening: Opening, environ: Mapping[str, str] = os.environ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-I", "-c", _BOOT, str(theirs.fileno()), *sys.path]
            # A session of its own: an interrupt at the keyboard is for us, who tell it what to do.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                env=_environment(environ), start_new_session=True,
            )  # fmt: skip
        self.channel = Channel(ours)
        try:
            self.address = self._open(opening)
        except BaseException:
            self.close()
            raise

    def _open(self, opening: Opening) -> str:
        try:
            self.channel.send(opening)
            said = self.channel.receive()
        except OSError:
            said = None
        if isinstance(said, Unfit):
            raise ConfigError(said.message, code="unfit_to_serve")
        if not isinstance(said, Listening):
            raise FastDecodeError("the HTTP process ended at once: see what it says above")
        return said.address

    def close(self) -> None:
        """End it. Safe to call twice."""
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_WITHIN_S)
        self._process.kill()
        self._process.wait()


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in without_launcher(environ).items() if name != KEYS_VARIABLE
    }
