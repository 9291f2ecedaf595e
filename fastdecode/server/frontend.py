"""The HTTP process: no torch, no MPI; it ends when the engine's process does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import socket
import ssl
import stat
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn

from fastdecode.conversations.conversations import Keeping
from fastdecode.core.errors import (
    ConfigError,
    FastDecodeError,
    ProtocolError,
    RequestError,
    WorkerError,
)
from fastdecode.core.host.logs import keep_traces_out
from fastdecode.core.model.local_models import find_model
from fastdecode.core.os_errors import explained
from fastdecode.core.secret_file import exposure
from fastdecode.server import link
from fastdecode.server.client import RequestTable
from fastdecode.server.front import Front
from fastdecode.server.http.app import Routes
from fastdecode.server.http.connection import bounded
from fastdecode.server.http.guard import Guard
from fastdecode.server.options import ServeOptions
from fastdecode.server.request_log import RequestLog
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.codec import TextCodec

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_LAST_ANSWERS_S = 1.0  # time for the last errors to reach clients, which may not read
_QUEUED_CAPACITIES = 4
_MOST_TIMEOUT_MS = (1 << 31) - 1
SPARE_FILES = 128
"""Files that aren't connections: the listener, logs, pipes to children, modules."""


def main(fd: int) -> None:
    # The engine's process says what to do; uvicorn would end upon these.
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    os.umask(0o077)  # of the request log, also when it is reopened
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    keep_traces_out()
    asyncio.run(_serve(socket.socket(fileno=fd)))
    # Without waiting for threads that still encode for clients that are gone.
    os._exit(0)


async def _serve(connected: socket.socket) -> None:
    channel = await link.AsyncChannel.over(connected)
    opening = await channel.receive()
    if not isinstance(opening, link.Opening):
        return
    options = ServeOptions(**opening.options)
    try:
        listener, address = _listen(options)
        model, file = find_model(opening.model), options.chat_template
        front = Front(
            opening,
            options,
            TextCodec.load(model, opening.max_model_len),
            ChatTemplate.load(model, None if file is None else Path(file)),
            RequestTable(channel.send),
            RequestLog(options.request_log),
            Keeping(**opening.keeping).open(model),
        )
        guard = Guard(Routes(front), front, opening.keys)
        server = uvicorn.Server(_configured(options, guard))
    except (FastDecodeError, OSError) as error:
        why = str(error)
        if isinstance(error, FastDecodeError):
            why = error.told(lambda given: "--" + given.name.replace("_", "-"))
        channel.send(link.Unfit(why))
        await channel.close()
        return
    channel.send(link.Listening(address))
    serving = asyncio.create_task(server.serve([listener]))
    await _Frontend(front, guard, channel).run()
    server.should_exit = True
    await serving
    if options.unix_socket is not None:
        Path(options.unix_socket).unlink(missing_ok=True)
    front.close()


def _configured(options: ServeOptions, app: Any) -> uvicorn.Config:
    """Return uvicorn's configuration. Raises ConfigError: If TLS's files are unusable."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # or it would write of every request that is malformed
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
        backlog=_BACKLOG,
    )
    try:
        if options.tls_key is not None:
            why = exposure(Path(options.tls_key).stat(), options.tls_key)
            if why:
                raise ConfigError(f"--tls-key {options.tls_key}: {why}")
        config.load()
    except OSError as error:
        files = f"--tls-cert {options.tls_cert}, --tls-key {options.tls_key}"
        why = "are no certificate and its key, both in PEM"
        if not isinstance(error, ssl.SSLError):
            why = f"can't be read: {explained(error)}"
        raise ConfigError(f"{files} {why}") from None
    kind: Any = config.http_protocol_class
    most = _room_for_connections(options.max_connections)
    config.http_protocol_class = bounded(kind, most, options.header_timeout_s)  # type: ignore[assignment]  # makes one
    return config


def _room_for_connections(wanted: int) -> int:
    """Return how many of ``wanted`` connections fit. Raise the soft limit of files for them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):  # the system has bounds of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    most = max(1, soft - SPARE_FILES)
    text = "at most %d connections are accepted, not --max-connections %d: too few files may be "
    text += "open, so raise ulimit -n"
    logger.warning(text, most, wanted)
    return most


def _listen(options: ServeOptions) -> tuple[socket.socket, str]:
    """Return a bound socket and its address. Raises: ConfigError: If that isn't possible."""
    if options.unix_socket is not None:
        return _listen_at_file(Path(options.unix_socket)), f"unix:{options.unix_socket}"
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
        family, _, _, _, where = found[0]
        listener = socket.create_server(where[:2], family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"can't listen at --host {options.host} --port {options.port}: "
            f"{explained(error) if isinstance(error, OSError) else error}"
        ) from None
    # Accepted sockets inherit these. Without the first, an answer's second packet waits for the
    # client's delayed ACK (40 ms). The second ends connections whose client reads nothing.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    timeout_ms = min(int(options.write_timeout_s * 1e3), _MOST_TIMEOUT_MS)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return listener, f"{'http' if options.tls_cert is None else 'https'}://{shown}:{port}"


def _listen_at_file(path: Path) -> socket.socket:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
        if stat.S_ISSOCK(path.lstat().st_mode) and caller.connect_ex(str(path)):
            path.unlink()  # no process listens there any more
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)  # for its owner only
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"can't listen at --unix-socket {path}: {explained(error)}") from None
    finally:
        os.umask(before)
    return listener


class _Frontend:
    """Follows the messages of the engine's process until that ends."""

    def __init__(self, front: Front, guard: Guard, channel: link.AsyncChannel) -> None:
        self._front, self._guard, self._channel = front, guard, channel
        self._ending: asyncio.Task[None] | None = None
        self._gives_up_s = math.inf
        """By ``time.monotonic``; then clients without an answer get none."""

    async def run(self) -> None:
        front = self._front
        try:
            while (message := await self._channel.receive()) is not None:
                self._handle(message)
        except ProtocolError as error:
            logger.error("%s", error)
        except Exception:
            logger.exception("the connection to the engine's process failed")
        front.outlook.is_lost = True
        self._cut(WorkerError("the engine's process has ended", code="engine_lost"))
        await self._until_answered()

    def _handle(self, message: object) -> None:
        front = self._front
        match message:
            case link.Deltas(deltas):
                front.client.deliver(deltas)
            case link.StatusReport():
                self._channel.send(link.StatusAck())
                now_s = time.monotonic()
                front.outlook.seen, front.outlook.seen_s = message, now_s
                front.metrics.see(now_s, message)
                if message.state in ("broken", "closed") and front.client.num_open:
                    front.fail_all(WorkerError("the engine has failed", code="engine_failed"))
            case link.Ready(kv_tokens):
                if front.options.max_queued_tokens is None:
                    front.admission.max_tokens = _QUEUED_CAPACITIES * kv_tokens
                front.outlook.is_ready = True
            case link.Keys(keys):
                self._guard.keys = tuple(keys)
            case link.Drain(cuts):
                front.outlook.is_draining = True
                if cuts:
                    self._cut(RequestError("the server is shutting down", code="draining"))
                if self._ending is None:
                    self._ending = asyncio.create_task(self._end())
            case _:
                raise ProtocolError(f"the engine's process sent {type(message).__name__}")

    async def _end(self) -> None:
        await self._until_answered()
        self._channel.send(link.Drained(self._front.num_cut))

    def _cut(self, error: FastDecodeError) -> None:
        self._front.fail_all(error)
        self._gives_up_s = time.monotonic() + _LAST_ANSWERS_S

    async def _until_answered(self) -> None:
        while self._front.num_exchanges and time.monotonic() < self._gives_up_s:
            await asyncio.sleep(0.02)
