"""Serves an engine to the HTTP process, over their channel, in a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from fastdecode.core.errors import FastDecodeError, ProtocolError
from fastdecode.engine.instances.engine_server import EngineServer, RequestLimits
from fastdecode.engine.service import EngineService
from fastdecode.server.channel import Channel
from fastdecode.server.messages import (
    Cancel,
    Drained,
    ServerMessage,
    StatusAck,
    StatusReport,
    Submit,
)
from fastdecode.server.silence import Silence

logger = logging.getLogger(__name__)


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
        self._outbox: SimpleQueue[ServerMessage] = SimpleQueue()
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

    def send(self, message: ServerMessage) -> None:
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

    def _obey(self, message: ServerMessage) -> None:
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
