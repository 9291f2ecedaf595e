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
from collections import deque
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final, Protocol

from fastdecode.core.clock import Clock
from fastdecode.core.delta import DeltaQueue
from fastdecode.core.errors import ConfigError, FastDecodeError, ProtocolError, RequestError
from fastdecode.core.host.processes import python_command
from fastdecode.engine.instances.server import EngineServer, RequestLimits
from fastdecode.engine.service import EngineService
from fastdecode.server import link
from fastdecode.server.options import KEYS_VARIABLE
from fastdecode.wire.ranks import without_launcher

logger = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 0.1
_CUT_WITHIN_S: Final = 2.0
"""How long the HTTP process may take to end all requests with an error."""
_ENDS_WITHIN_S: Final = 5.0
_ACTIVITY_EVERY_S: Final = 10.0
_MOST_BETWEEN_LOOKS_S: Final = 1.0
"""More isn't counted as silence: the engine's process was stopped itself, or made a long step."""


class HttpProcess:
    """Starts the HTTP process, which refuses requests until the engine is ready. Close it. Raises
    ConfigError: If it can't listen there, or the tokenizer or the template is of no use."""

    def __init__(self, opening: link.Opening, environ: Mapping[str, str] = os.environ) -> None:
        inherited = without_launcher(environ)
        ours, theirs = socket.socketpair()
        main = "from fastdecode.server.frontend import main; main(int(given))"
        with theirs:
            # A session of its own: an interrupt at the keyboard is for this process alone.
            self._process = subprocess.Popen(
                python_command(main, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={name: inherited[name] for name in inherited if name != KEYS_VARIABLE},
                start_new_session=True,
            )
        self.channel = link.Channel(ours)
        try:
            self.channel.send(opening)
            match self.channel.receive():
                case link.Listening(address):
                    self.address = address
                case link.Unfit(message):
                    raise ConfigError(message, code="unfit_to_serve")
                case _:
                    raise OSError
        except OSError:
            self.close()
            raise FastDecodeError("the HTTP process ended at once: see its messages") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.channel.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_WITHIN_S)
        self._process.kill()
        self._process.wait()
        self.channel.close()


class Bridge(threading.Thread):
    """Serves an engine to the HTTP process from ``start`` on, until the channel is closed.

    Args:
        figures: Returns the engine's figures. The engine's thread calls it between two steps.
        silence_s: Longest wait for the answer to a status report, which is sent twice a second.
            After that the HTTP process counts as silent: it was stopped, or hangs.
    """

    def __init__(
        self,
        service: EngineService,
        channel: link.Channel,
        limits: RequestLimits,
        figures: Callable[[Any], dict[str, Any]] = lambda served: {},
        silence_s: float = math.inf,
    ) -> None:
        super().__init__(name="http", daemon=True)
        self._channel = channel
        self.server = EngineServer(service, limits, figures, channel.wake)
        self.silence_s = silence_s
        self.is_silent = False
        self.report = link.StatusReport()  # the engine's latest
        self._owes_answer = self._was_heard = False  # since the last look
        self._waited_s = 0.0
        self._looked_s: float | None = None
        self._outbox: deque[link.ServerMessage] = deque()
        self.is_gone = threading.Event()  # set when the HTTP process has ended
        self.is_open = threading.Event()  # set when it lets requests in, or is gone
        self.drained = threading.Event()
        """Set when it has no open request any more, and takes none."""
        self.num_cut = 0  # requests that it had to end

    def run(self) -> None:
        """However this ends, the HTTP process counts as gone: requests would wait without end."""
        try:
            while True:
                self._send_all()
                message = self._channel.receive(self.server.wait_s)
                if message is not None:
                    self._handle(message)
        except OSError:
            pass  # the other end is gone
        except ProtocolError as error:
            logger.error("%s", error)
        except Exception:
            logger.exception("the connection to the HTTP process failed")
        finally:
            self.is_gone.set()
            self.is_open.set()

    def send(self, message: link.ServerMessage) -> None:
        """Send to the HTTP process without waiting: it may have been stopped. Thread-safe."""
        self._outbox.append(message)
        self._channel.wake()

    def look(self, now_s: float) -> bool:
        """Update ``is_silent``, several times a second. Return True if it has changed."""
        before_s, self._looked_s = self._looked_s, now_s
        was_heard, self._was_heard = self._was_heard, False
        if was_heard or not self._owes_answer:
            self._waited_s = 0.0
        elif before_s is not None:
            self._waited_s += min(now_s - before_s, _MOST_BETWEEN_LOOKS_S)
        was_silent, self.is_silent = self.is_silent, self._waited_s > self.silence_s
        return self.is_silent != was_silent

    def _send_all(self) -> None:
        while self._outbox:
            self._channel.send(self._outbox.popleft())
        for message in self.server.messages():
            if isinstance(message, link.StatusReport):
                self._owes_answer, self.report = True, message
            self._channel.send(message)

    def _handle(self, message: link.ServerMessage) -> None:
        self._owes_answer, self._was_heard = False, True
        match message:
            case link.StatusAck():
                self.is_open.set()
            case link.Submit() | link.Cancel():
                self.server.obey(message)
            case link.Drained(num_cut):
                self.num_cut = num_cut
                self.drained.set()
            case _:
                raise ProtocolError(f"the HTTP process sent {type(message).__name__}")


class ActivityLines:
    """Shows a line every ten seconds while the engine works, and once more when it has stopped."""

    def __init__(self, tell: Callable[[str], None], clock: Clock = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._told_s, self._tokens = clock(), 0

    def turn(self, now: link.StatusReport) -> None:
        now_s = self._clock()
        elapsed_s = now_s - self._told_s
        if elapsed_s < _ACTIVITY_EVERY_S:
            return
        tokens = now.figures.get("num_output_tokens", 0)
        num_new, self._tokens, self._told_s = tokens - self._tokens, tokens, now_s
        if not (now.num_running or now.num_waiting or num_new):
            return
        live, num = now.workers
        rate = f"{num_new / elapsed_s:.0f} tok/s" + (f", R-workers {live}/{num}" if num else "")
        self._tell(f"{now.num_running} running, {now.num_waiting} waiting, {rate}")


class Ending(IntEnum):
    """How a server ended, and its exit code."""

    ALL_ANSWERED = 0
    SOME_CUT = 3
    ENGINE_LOST = 4
    HTTP_LOST = 5


class Signals(Protocol):
    """Counts of the signals that ask a server to stop, and to read its keys again."""

    num_stops: int
    num_reloads: int


class Serving:
    """Waits for what ends a server, in the thread that opened the service. ``reload`` reads the
    keys again, ``tell`` shows a line."""

    def __init__(
        self,
        service: EngineService,
        bridge: Bridge,
        signals: Signals,
        reload: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        self._service, self._bridge, self._signals = service, bridge, signals
        self._reload, self._tell = reload, tell
        self._lines = ActivityLines(tell)
        self._nothing = DeltaQueue()
        self._num_reloaded = 0

    def run(self, drain_timeout_s: float) -> Ending:
        """Serve until a signal asks to stop, or serving can't continue."""
        bridge, signals = self._bridge, self._signals
        self._turn_while(lambda: not signals.num_stops)
        if not self._is_broken:
            most = f"{drain_timeout_s:g} s at most"
            self._tell(f"finishing requests for {most}; a second signal stops at once")
            bridge.send(link.Drain())
            self._turn_while(lambda: signals.num_stops < 2, drain_timeout_s)
        elif not bridge.is_gone.is_set():
            self._tell(f"the engine broke down: {_shown(self._service.snapshot().error)}")
        if not bridge.drained.is_set():
            bridge.send(link.Drain(cuts=True))
            end_s = time.monotonic() + _CUT_WITHIN_S
            is_answered = bridge.drained.is_set
            while not (is_answered() or bridge.is_gone.is_set() or time.monotonic() >= end_s):
                self._service.take(self._nothing, _LOOK_EVERY_S)
        if self._service.snapshot().error is not None:
            return Ending.ENGINE_LOST
        if bridge.is_gone.is_set():
            self._tell("the HTTP process has ended; so does the server")
            return Ending.HTTP_LOST
        ending, said = Ending.SOME_CUT, "the HTTP process didn't say in time how many requests were"
        if not bridge.drained.is_set():
            said += " cut off"
        elif num := bridge.num_cut:
            said = f"{num} {'request was' if num == 1 else 'requests were'} cut off"
        else:
            ending, said = Ending.ALL_ANSWERED, "all running requests were answered"
        self._tell(f"ended; {said}")
        return ending

    @property
    def _is_broken(self) -> bool:
        return self._bridge.is_gone.is_set() or self._service.snapshot().error is not None

    def _turn_while(self, condition: Callable[[], bool], most_s: float = math.inf) -> None:
        """Serve while a condition holds and requests may still be answered."""
        end_s = time.monotonic() + most_s
        while condition() and not (self._is_broken or self._bridge.drained.is_set()):
            if time.monotonic() >= end_s:
                return
            self._service.take(self._nothing, _LOOK_EVERY_S)
            if self._bridge.look(time.monotonic()):
                self._on_silence()
            self._lines.turn(self._bridge.report)
            if self._signals.num_reloads > self._num_reloaded:
                self._num_reloaded = self._signals.num_reloads
                self._reload()

    def _on_silence(self) -> None:
        """Cancel the requests of an HTTP process that reads nothing: it answers no client."""
        if not self._bridge.is_silent:
            self._tell("the HTTP process reads again")
            return
        self._tell(
            f"the HTTP process has read nothing for {self._bridge.silence_s:g} s: its requests are "
            "cancelled. If it was stopped, continue it (kill -CONT), or restart the server"
        )
        text = "the server's HTTP process read nothing for too long: try again"
        self._bridge.server.cancel_all(RequestError(text, code="http_stopped"))


def _shown(error: FastDecodeError | None) -> str:
    """Return a fault of the engine by its kind alone: its words may hold what a client sent."""
    cause = None if error is None else error.__cause__
    if type(error) is FastDecodeError and cause is not None:
        return f"a step raised {type(cause).__name__}"
    return str(error)
