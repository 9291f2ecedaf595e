"""Serving from the first request to the last: the part of the process that has
the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from fastdecode.core.delta import DeltaQueue
from fastdecode.core.errors import FastDecodeError, RequestError
from fastdecode.engine.service import EngineService
from fastdecode.server.activity import ActivityLines
from fastdecode.server.bridge import Bridge
from fastdecode.server.messages import CutOff, Drain

_LOOK_EVERY_S = 0.1
_CUT_WITHIN_S = 2.0
"""How long those whose requests are ended may take to hear of it."""
_STOPPED = "the server's HTTP process read nothing for too long: try again"


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
