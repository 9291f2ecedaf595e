"""The controller's connections to instances.

A thread owns them: it sends what it is given, passes on what comes, and looks
for those that are gone, who may come back at their addresses.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from fastdecode.core.clock import Clock
from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.wire.instances import (
    InstanceHello,
    InstanceSays,
    InstanceWelcome,
    ToInstance,
)
from fastdecode.wire.messages import Failed
from fastdecode.wire.traits import compare_versions
from fastdecode.wire.transport import TIMEOUT, Connection, Hub, PeerLostError

logger = logging.getLogger(__name__)

FromInstance: TypeAlias = InstanceSays | Failed
InstanceLine: TypeAlias = Connection[ToInstance, FromInstance]
BUSY: Final = "busy"
_LOOK_S: Final = 1.0
_LOOK_FOR_LOST_S: Final = 0.1
_TRY_S: Final = 1.0  # between two attempts at an address


class InstanceConnectionHub(Hub[ToInstance, FromInstance], Protocol):
    """A controller's connections, one an instance."""

    def wake(self) -> None:
        """End the present or the next wait in ``receive_any``. From any thread."""

    @property
    def has_hung_r_workers(self) -> bool:
        """Whether any of this process is, and keeps it from ending."""

    def close(self) -> None: ...

    def give_up(self, number: int) -> None:
        """Hang up on one that hangs; where nobody else does, see that it ends with
        the job."""

    def greet_all(
        self, hello: InstanceHello, timeout_s: float
    ) -> tuple[dict[int, InstanceWelcome], dict[int, WorkerError]]:
        """What those say that are there, within ``timeout_s`` where nobody says
        whether they are; and why others aren't."""


class ReturningConnection(InstanceLine, Protocol):
    """To somebody who may not be there."""

    @property
    def is_reached(self) -> bool: ...


LineT = TypeVar("LineT")


class Reconnector(Protocol[LineT]):
    """Where those that were lost may come back."""

    def reconnect(self, index: int) -> LineT:
        """A new line to where one was. Raises FastDecodeError: there can be none."""

    def replace(self, index: int, connection: LineT) -> None:
        """One is back, over a line that came of ``reconnect``."""


def welcome_of(
    line: InstanceLine, hello: InstanceHello, answer: FromInstance
) -> InstanceWelcome | None:
    """None: it is busy. Raises WorkerError: it has refused, or is another's."""
    if isinstance(answer, Failed):
        if answer.code == BUSY:
            return None
        raise WorkerError(f"{line.peer} has refused: {answer.message}", code=answer.code)
    try:
        if not isinstance(answer, InstanceWelcome):
            raise ProtocolError(f"answered {type(answer).__name__} where its welcome was due")
        compare_versions(f"instance {answer.name}", answer.version)
    except ProtocolError as error:
        raise WorkerError(f"{line.peer} {error.message}", code=error.code) from None
    if answer.model_hash != hello.model_hash:
        raise WorkerError(
            f"{line.peer} runs another model: start it with the same model directory",
            code="other_model",
        )
    return answer


def greet_together(
    hub: InstanceConnectionHub,
    hello: InstanceHello,
    patience_s: float,
    clock: Clock = time.monotonic,
) -> tuple[dict[int, InstanceWelcome], dict[int, WorkerError]]:
    """What those say within ``patience_s`` who live, all at a time; why others aren't
    there."""
    welcomes: dict[int, InstanceWelcome] = {}
    failed: dict[int, WorkerError] = {}
    end_s = clock() + patience_s
    for number, line in enumerate(hub.connections):
        try:
            line.send(hello)
        except WorkerError as error:
            failed[number] = error
    while missing := [i for i in range(len(hub.connections)) if i not in {**welcomes, **failed}]:
        left_s = end_s - clock()
        if left_s <= 0:
            _give_up(hub, missing, patience_s, failed)
            break
        try:
            number, answer = hub.receive_any(left_s)
        except PeerLostError as lost:
            welcomes.pop(lost.index, None)
            failed[lost.index] = lost
            continue
        except WorkerError as error:
            if error.code != TIMEOUT:
                raise
            continue
        if number in welcomes and not isinstance(answer, Failed):
            continue  # how it is, while others load their models
        welcomes.pop(number, None)
        try:
            welcome = welcome_of(hub.connections[number], hello, answer)
            if welcome is None:
                raise ProtocolError("serves another controller, which can't be")
            welcomes[number] = welcome
        except (WorkerError, ProtocolError) as error:
            failed[number] = WorkerError(error.message, code=error.code)
    return welcomes, failed


def _give_up(
    hub: InstanceConnectionHub,
    missing: list[int],
    patience_s: float,
    failed: dict[int, WorkerError],
) -> None:
    """These live, and haven't said in time what they are."""
    for number in missing:
        why = (
            f"{hub.connections[number].peer} lives, but hasn't loaded its model in "
            f"{patience_s:g} s: see its own output for what it waits for"
        )
        failed[number] = WorkerError(why, code=TIMEOUT)
        hub.give_up(number)


class ConnectionListener(Protocol):
    """Is told what comes; by the lines' thread, and never waits."""

    def heard(self, number: int, message: FromInstance) -> None:
        """An instance says something. Raises FastDecodeError: it can't be."""

    def lost(self, number: int, error: FastDecodeError) -> None:
        """One is gone: nothing that was sent to it and isn't answered will be."""

    def failed(self, error: FastDecodeError) -> None:
        """The thread has broken down: no instance is heard any more."""

    def came_back(self, number: int, welcome: InstanceWelcome) -> bool:
        """One that was lost is there again, and has nothing. False: it is of no
        use as it is now."""


@dataclass
class _LostInstance:
    """An instance that is gone."""

    try_s: float
    """When its address is tried next."""
    line: ReturningConnection | None = None
    is_greeted: bool = False


class Heartbeat:
    """For how long an instance has said nothing. Its engine says something twice
    a second whenever it comes by, and so a process that lives says nothing once
    its engine hangs. Only time in which we listened counts: who has been
    stopped, and goes on, has heard nobody.

    Args:
        num: instances.
        clock: seconds.
    """

    def __init__(self, num: int, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = clock()
        self._quiet_s = [0.0] * num

    def hear(self, number: int) -> None:
        """It has said something, or begins to."""
        self._quiet_s[number] = 0.0

    def look(self) -> list[float]:
        """Of each, in seconds."""
        now = self._clock()
        passed_s, self._looked_s = min(now - self._looked_s, _LOOK_S), now
        self._quiet_s = [quiet_s + passed_s for quiet_s in self._quiet_s]
        return self._quiet_s


class InstanceConnections(threading.Thread):
    """See the module.

    Args:
        hub: whose instances have been greeted; the thread's from ``start`` on.
        hello: for those that come back.
        absent: those that aren't there.
        heard: is told what comes.
        timeout_s: an instance that lives, and says nothing for so long, hangs.
        finder: looks for those that are gone; None: they don't come back.
    """

    def __init__(
        self,
        hub: InstanceConnectionHub,
        hello: InstanceHello,
        absent: Sequence[int],
        heard: ConnectionListener,
        timeout_s: float,
        finder: Reconnector[Any] | None,
    ) -> None:
        super().__init__(name="instances", daemon=True)
        self._hub = hub
        self._finder = finder
        self._hello = hello
        self._heard = heard
        self._lost = {number: _LostInstance(time.monotonic() + _TRY_S) for number in absent}
        self._turns = [0 for _ in hub.connections]
        """How often each was there before."""
        self._heartbeat = Heartbeat(len(self._turns))
        self._timeout_s = timeout_s
        self._outbox: SimpleQueue[tuple[int, int, ToInstance | FastDecodeError]] = SimpleQueue()
        self._is_closing = False

    def post(self, number: int, turn: int, message: ToInstance) -> None:
        """Send something to an instance, if it is still the one that came back
        ``turn`` times; any thread."""
        self._outbox.put((number, turn, message))
        self._hub.wake()

    def give_up(self, number: int, turn: int, error: FastDecodeError) -> None:
        """Hang up on that one likewise, which may come back; any thread."""
        self._outbox.put((number, turn, error))
        self._hub.wake()

    def run(self) -> None:
        """Until it is closed. Where something raises that no instance accounts for,
        ``ConnectionListener`` is notified: a request would wait for ever."""
        try:
            while not self._is_closing:
                self._send_all()
                self._receive()
                self._look_for_hung()
                self._look_for_lost()
        except Exception as error:
            logger.exception("the thread that hears the instances broke down")
            why = f"instances can't be heard any more: {type(error).__name__}: {error}"
            self._heard.failed(FastDecodeError(why))

    def close(self) -> None:
        """Say goodbye to all of them. Safe to call twice."""
        self._is_closing = True
        self._hub.wake()
        if self.is_alive():
            self.join()
        self._hub.close()

    def _send_all(self) -> None:
        while True:
            try:
                number, turn, message = self._outbox.get_nowait()
            except Empty:
                return
            if number in self._lost or turn != self._turns[number]:
                continue
            if isinstance(message, FastDecodeError):
                self._lose(number, message)
                continue
            try:
                self._hub.connections[number].send(message)
            except Exception as error:
                self._lose(number, self._typed(number, error))

    def _receive(self) -> None:
        if len(self._lost) == len(self._turns):
            time.sleep(_LOOK_FOR_LOST_S)
            return
        try:
            number, message = self._hub.receive_any(_LOOK_FOR_LOST_S if self._lost else _LOOK_S)
        except PeerLostError as error:
            self._lose(error.index, error)
            return
        except WorkerError as error:
            if error.code != TIMEOUT:
                logger.debug("nobody is left to hear: %s", error)
            return
        if number in self._lost:
            return
        self._heartbeat.hear(number)
        try:
            if isinstance(message, Failed):
                raise WorkerError(
                    f"{self._hub.connections[number].peer} gives up: {message.message}",
                    code=message.code,
                )
            self._heard.heard(number, message)
        except Exception as error:
            self._lose(number, self._typed(number, error))

    def _typed(self, number: int, error: Exception) -> FastDecodeError:
        """Why an instance is lost, whatever was raised about it."""
        if isinstance(error, FastDecodeError):
            return error
        peer = self._hub.connections[number].peer
        logger.error("what is said to or by %s can't be dealt with", peer, exc_info=error)
        return ProtocolError(f"{peer} is given up: {type(error).__name__}: {error}")

    def _lose(self, number: int, error: FastDecodeError) -> None:
        if number not in self._lost:
            self._lost[number] = _LostInstance(time.monotonic() + _TRY_S)
            if error.code == TIMEOUT:
                self._hub.give_up(number)
            self._hub.connections[number].close()
            self._heard.lost(number, error)

    def _look_for_hung(self) -> None:
        for number, quiet_s in enumerate(self._heartbeat.look()):
            if quiet_s > self._timeout_s and number not in self._lost:
                peer = self._hub.connections[number].peer
                why = f"{peer} lives, but its engine has said nothing for {quiet_s:.3g} s: it hangs"
                self._lose(number, WorkerError(why, code=TIMEOUT))

    def _look_for_lost(self) -> None:
        if self._finder is None:
            return
        for number, lost in list(self._lost.items()):
            try:
                self._look_for(self._finder, number, lost)
            except Exception as error:
                is_usual = isinstance(error, FastDecodeError)
                level = logging.DEBUG if is_usual else logging.ERROR
                logger.log(level, "instance %d isn't back yet: %s", number, error)
                if lost.line is not None:
                    lost.line.close()
                self._lost[number] = _LostInstance(time.monotonic() + _TRY_S)

    def _look_for(self, finder: Reconnector[Any], number: int, lost: _LostInstance) -> None:
        """Raises FastDecodeError: whoever is there now is of no use."""
        if lost.line is None:
            if time.monotonic() >= lost.try_s:
                lost.line = finder.reconnect(number)
            return
        if lost.line.is_reached and not lost.is_greeted:
            lost.line.send(self._hello)
            lost.is_greeted = True
        answer = lost.line.poll()
        if answer is None:
            return
        welcome = welcome_of(lost.line, self._hello, answer)
        if welcome is None or not self._heard.came_back(number, welcome):
            raise WorkerError(
                f"{lost.line.peer} came back with another model or other options: restart it with "
                "the old ones"
            )
        finder.replace(number, lost.line)
        self._turns[number] += 1
        self._heartbeat.hear(number)
        del self._lost[number]
