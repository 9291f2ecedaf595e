"""The engine's side of a server: the HTTP process, the thread that talks to it, and serving from
the first request to the last."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from queue import Empty, SimpleQueue
from typing import Any, Final

from fastdecode.core.clock import Clock
from fastdecode.core.delta import DeltaQueue
from fastdecode.core.errors import ConfigError, FastDecodeError, ProtocolError, RequestError
from fastdecode.core.host.child_process import python_command
from fastdecode.engine.instances.engine_server import EngineServer, RequestLimits
from fastdecode.engine.service import EngineService
from fastdecode.server.keys import KEYS_VARIABLE
from fastdecode.server.link import (
    Cancel,
    Channel,
    CutOff,
    Drain,
    Drained,
    Listening,
    Message,
    Opening,
    StatusAck,
    StatusReport,
    Submit,
    Unfit,
)
from fastdecode.wire.mpi.launcher import without_launcher

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.1
_CUT_WITHIN_S = 2.0
"""How long those whose requests are ended may take to hear of it."""
_STOPPED = "the server's HTTP process read nothing for too long: try again"
_MOST_BETWEEN_LOOKS_S: Final = 1.0
_ACTIVITY_EVERY_S: Final = 10.0
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
            main = "from fastdecode.server.frontend import main; main(int(given))"
            command = python_command(main, theirs.fileno())
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


class Silence:
    """Notices that the HTTP process reads nothing: it was stopped, or hangs.

    It answers each status report, twice a second. ``asked`` and ``heard`` may be called by any
    thread, ``look`` by one.

    Args:
        limit_s: An answer that takes longer means that nothing is read.
    """

    def __init__(self, limit_s: float = math.inf) -> None:
        self.limit_s = limit_s
        self._is_owed = False
        self._was_heard = False
        """Since the last look."""
        self._waited_s = 0.0
        self._looked_s: float | None = None
        self._is_silent = False

    def asked(self) -> None:
        """Note that an answer is owed."""
        self._is_owed = True

    def heard(self) -> None:
        """Note a message of the HTTP process."""
        self._is_owed, self._was_heard = False, True

    def look(self, now_s: float) -> bool | None:
        """Return True if it has become silent since the last look, False if it reads again, and
        None if nothing has changed. Call it several times a second."""
        before_s, self._looked_s = self._looked_s, now_s
        was_heard, self._was_heard = self._was_heard, False
        if was_heard or not self._is_owed:
            self._waited_s = 0.0
        elif before_s is not None:
            # More isn't counted: the engine's process was stopped itself, or made a long step.
            self._waited_s += min(now_s - before_s, _MOST_BETWEEN_LOOKS_S)
        was_silent, self._is_silent = self._is_silent, self._waited_s > self.limit_s
        return None if self._is_silent == was_silent else self._is_silent


class Bridge(threading.Thread):
    """Takes requests from ``start`` on, until the channel is closed.

    Args:
        service: runs the requests.
        channel: to the HTTP process.
        limits: of any request.
        figures: of the engine, for status reports; called by its thread between two steps.
        silence: of the HTTP process; None: it may be silent for any time.
    """

    def __init__(
        self,
        service: EngineService[Any],
        channel: Channel,
        limits: RequestLimits,
        figures: Callable[[Any], dict[str, Any]] = lambda served: {},
        silence: Silence | None = None,
    ) -> None:
        super().__init__(name="http", daemon=True)
        self._channel = channel
        self._server = EngineServer(service, limits, figures, channel.wake)
        self.silence = Silence() if silence is None else silence
        self._outbox: SimpleQueue[Message] = SimpleQueue()
        self.is_gone = threading.Event()
        """The HTTP process is."""
        self.drained = threading.Event()
        """It has no open request any more, and takes none."""
        self.num_cut = 0
        """Requests that it had to end."""

    def run(self) -> None:
        """However it ends, the HTTP process counts as gone: requests would wait for ever."""
        try:
            while True:
                self._send_all()
                message = self._channel.receive(self._server.wait_s)
                if message is not None:
                    self._obey(message)
        except OSError:
            pass  # the other side is gone
        except ProtocolError as error:
            logger.error("%s", error)
        except Exception:
            logger.exception("the HTTP process can't be talked to any more")
        finally:
            self.is_gone.set()

    def send(self, message: Message) -> None:
        """Say something to the HTTP process; lost if it is gone. Any thread. Doesn't
        wait for it: it may have been stopped."""
        self._outbox.put(message)
        self._channel.wake()

    def cancel_all(self, error: FastDecodeError) -> None:
        """End every request that the HTTP process has submitted. It gets the error once
        it reads again."""
        self._server.cancel_all(error)

    def _send_all(self) -> None:
        try:
            while True:
                self._channel.send(self._outbox.get_nowait())
        except Empty:
            pass
        for message in self._server.messages():
            if isinstance(message, StatusReport):
                self.silence.asked()
            self._channel.send(message)

    def _obey(self, message: Message) -> None:
        self.silence.heard()
        match message:
            case StatusAck():
                pass
            case Submit() | Cancel():
                self._server.obey(message)
            case Drained(num_cut):
                self.num_cut = num_cut
                self.drained.set()
            case _:
                raise ProtocolError(f"the HTTP process said {type(message).__name__}")


@dataclass(frozen=True)
class Activity:
    """What an engine does."""

    num_running: int
    num_waiting: int
    output_tokens: int
    """Generated in all."""
    workers: tuple[int, int]
    """R-workers that aren't lost, and all."""


class ActivityLines:
    """Tells how the server is, while it works and once more when it has stopped.

    Args:
        look: what the engine does now.
        tell: told a line.
        clock: in seconds.
    """

    def __init__(
        self,
        look: Callable[[], Activity],
        tell: Callable[[str], None],
        clock: Clock = time.monotonic,
    ) -> None:
        self._look = look
        self._tell = tell
        self._clock = clock
        self._told_s = clock()
        self._tokens = look().output_tokens

    def turn(self) -> None:
        """Call it as often as you like."""
        now_s = self._clock()
        elapsed_s = now_s - self._told_s
        if elapsed_s < _ACTIVITY_EVERY_S:
            return
        now = self._look()
        tokens, self._tokens, self._told_s = self._tokens, now.output_tokens, now_s
        if not (now.num_running or now.num_waiting or now.output_tokens > tokens):
            return
        live, num = now.workers
        workers = f", R-workers {live}/{num}" if num else ""
        self._tell(
            f"{now.num_running} running, {now.num_waiting} waiting, "
            f"{(now.output_tokens - tokens) / elapsed_s:.0f} tok/s{workers}"
        )


class Ending(Enum):
    """How a server ended."""

    ALL_ANSWERED = auto()
    SOME_CUT = auto()
    ENGINE_LOST = auto()
    HTTP_LOST = auto()


@dataclass
class Wishes:
    """What signals have asked for."""

    num_stops: int = 0
    num_reloads: int = 0
    ending: Ending | None = None
    """How it ended; nothing is answered any more."""


class Serving:
    """Waits for what ends a server. Used by the thread that opened the service.

    Args:
        service: runs the requests; where it has no thread of its own, its steps
            are made here.
        wishes: looked at ten times a second.
        reload: called when that was asked for.
        tell: told what happens, a line at a time.
        lines: told again and again what is done; None: nobody wants them.
    """

    def __init__(
        self,
        service: EngineService[Any],
        bridge: Bridge,
        wishes: Wishes,
        reload: Callable[[], None],
        tell: Callable[[str], None],
        lines: ActivityLines | None = None,
    ) -> None:
        self._lines = lines
        self._service = service
        self._bridge = bridge
        self._wishes = wishes
        self._reload = reload
        self._tell = tell
        self._nothing = DeltaQueue()
        self._num_reloaded = 0

    def run(self, drain_timeout_s: float) -> Ending:
        """Until it is asked to stop, or can't go on."""
        while not self._wishes.num_stops and not self._is_broken:
            self._turn()
        if not self._is_broken:
            return self._drain(drain_timeout_s)
        if self._bridge.is_gone.is_set():
            self._tell("the HTTP process has ended; so does the server")
            return Ending.HTTP_LOST
        self._tell(f"the engine broke down: {_told(self._service.snapshot().error)}")
        self._cut()
        return Ending.ENGINE_LOST

    @property
    def _is_broken(self) -> bool:
        return self._bridge.is_gone.is_set() or self._service.snapshot().error is not None

    def _turn(self) -> None:
        self._service.take(self._nothing, _LOOK_EVERY_S)
        self._look_after_http()
        if self._lines is not None:
            self._lines.turn()
        if self._wishes.num_reloads > self._num_reloaded:
            self._num_reloaded = self._wishes.num_reloads
            self._reload()

    def _look_after_http(self) -> None:
        """An HTTP process that reads nothing answers no client: what it has asked
        for isn't computed any further."""
        silence = self._bridge.silence
        is_silent = silence.look(time.monotonic())
        if is_silent:
            self._tell(
                f"the HTTP process has read nothing for {silence.limit_s:g} s: its requests are "
                "cancelled. If it was stopped, continue it (kill -CONT), or restart the server"
            )
            self._bridge.cancel_all(RequestError(_STOPPED, code="http_stopped"))
        elif is_silent is not None:
            self._tell("the HTTP process reads again")

    def _drain(self, timeout_s: float) -> Ending:
        self._tell(f"finishing requests for {timeout_s:g} s at most; a second signal stops at once")
        self._bridge.send(Drain(timeout_s))
        end_s = time.monotonic() + timeout_s
        while (
            not self._bridge.drained.is_set()
            and not self._is_broken
            and self._wishes.num_stops < 2
            and time.monotonic() < end_s
        ):
            self._turn()
        if not self._bridge.drained.is_set():
            self._cut()
        is_heard = self._bridge.drained.is_set()
        if self._service.snapshot().error is not None:
            return Ending.ENGINE_LOST
        if self._bridge.is_gone.is_set():
            return Ending.HTTP_LOST
        self._tell(_ending(self._bridge.num_cut, is_heard=is_heard))
        is_whole = is_heard and not self._bridge.num_cut
        return Ending.ALL_ANSWERED if is_whole else Ending.SOME_CUT

    def _cut(self) -> None:
        """End what is open, with an error."""
        self._bridge.send(CutOff())
        end_s = time.monotonic() + _CUT_WITHIN_S
        while (
            not self._bridge.drained.is_set()
            and not self._bridge.is_gone.is_set()
            and time.monotonic() < end_s
        ):
            self._service.take(self._nothing, _LOOK_EVERY_S)


def _ending(num_cut: int, *, is_heard: bool) -> str:
    """How a server ended that was asked to."""
    if not is_heard:
        return "ended; the HTTP process didn't say in time how many requests were cut off"
    if num_cut:
        return f"ended; {num_cut} {'request was' if num_cut == 1 else 'requests were'} cut off"
    return "ended; all running requests were answered"


def _told(error: FastDecodeError | None) -> str:
    """A mistake of ours by its kind alone: its words may hold what somebody asked."""
    cause = None if error is None else error.__cause__
    if type(error) is FastDecodeError and cause is not None:
        return f"a step raised {type(cause).__name__}"
    return str(error)
