"""The connections of a router to its instances, which may be lost and return.

All belong to the router's thread. It waits for instances here, and any thread wakes it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeAlias

from fastdecode.core.clock import Clock
from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.model.identity import Identity
from fastdecode.engine.instances.client import EngineClient
from fastdecode.engine.instances.router import Router
from fastdecode.wire.instances import (
    Deltas,
    InstanceHello,
    InstanceSays,
    InstanceWelcome,
    StatusReport,
    ToInstance,
)
from fastdecode.wire.messages import Failed
from fastdecode.wire.traits import compare_versions
from fastdecode.wire.transport import TIMEOUT, Connection, Hub, PeerLostError

logger = logging.getLogger(__name__)

FromInstance: TypeAlias = InstanceSays | Failed
InstanceLine: TypeAlias = Connection[ToInstance, FromInstance]
BUSY: Final = "busy"
NO_R_WORKER: Final = "no_r_worker"  # code of why an instance that lives runs nothing
_BUSY_S: Final = 0.1
"""Between two attempts at an instance that serves another controller, which may be gone."""
_LOOK_S: Final = 1.0
_LOOK_FOR_LOST_S: Final = 0.1
_TRY_S: Final = 1.0  # between two attempts at an address


class InstanceHub(Hub[ToInstance, FromInstance], Protocol):
    """Connections, one for each instance."""

    def wake(self) -> None:
        """End the present or the next wait in ``receive_any``. Thread-safe."""

    def close(self) -> None: ...


class Inbox(SimpleQueue[Callable[[], None]]):
    """Calls for the router's thread, which receives from instances while it waits for one."""

    registry: Registry | None = None

    def put(
        self, item: Callable[[], None], block: bool = True, timeout: float | None = None
    ) -> None:
        super().put(item)
        if self.registry is not None:
            self.registry.hub.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Callable[[], None]:
        if block and self.registry is not None:
            self.registry.hear(timeout)
        return super().get_nowait()


def identity_of(welcome: InstanceWelcome) -> tuple[Identity, int]:
    """Return what all instances have to share: their identity, and the tokens of a KV block."""
    identity = Identity(welcome.dtype, welcome.kv_dtype, welcome.max_model_len)
    return identity, welcome.block_size


def welcome_of(line: InstanceLine, hello: InstanceHello, answer: FromInstance) -> InstanceWelcome:
    """Return an instance's welcome. Raises WorkerError: If it refused, or has another model."""
    if isinstance(answer, Failed):
        raise WorkerError(f"{line.peer} has refused: {answer.message}", code=answer.code)
    if not isinstance(answer, InstanceWelcome):
        what = f"{line.peer} answered {type(answer).__name__} where its welcome was due"
        raise WorkerError(what, code=ProtocolError.default_code)
    compare_versions(f"instance {answer.name}", answer.version)
    if answer.model_hash != hello.model_hash:
        raise WorkerError(
            f"{line.peer} runs another model: start it with the same model directory",
            code="other_model",
        )
    return answer


class Greeting:
    """Says hello to an instance, again and again while it serves another controller, which may be
    gone."""

    def __init__(self, line: Any, hello: InstanceHello) -> None:
        self.line = line
        self._hello = hello
        self._due_s = 0.0
        self._is_busy = False
        self.welcome: InstanceWelcome | None = None
        self.failure: WorkerError | None = None

    def say(self, now_s: float) -> None:
        """Say hello if that is due, and the instance is reached."""
        if self.line.is_reached and now_s >= self._due_s:
            self._due_s = math.inf
            try:
                self.line.send(self._hello)
            except WorkerError as error:
                self.failure = error

    def take(self, answer: FromInstance, now_s: float) -> None:
        """Take in what the instance answers, or reports while others load their models."""
        if isinstance(answer, Failed) and answer.code == BUSY:
            self._is_busy, self._due_s = True, now_s + _BUSY_S
        elif self.welcome is None or isinstance(answer, Failed):
            try:
                self.welcome = welcome_of(self.line, self._hello, answer)
            except WorkerError as error:
                self.failure = error

    def give_up(self, patience_s: float) -> None:
        """Hang up on an instance that is reached, and has not welcomed this controller in time."""
        hang_up(self.line)
        why, code = "lives, but hasn't loaded its model in %g s: see its own output", TIMEOUT
        why = why % patience_s + " for what it waits for"
        if self._is_busy:
            why, code = "serves another controller: end that first", BUSY
        self.failure = WorkerError(f"{self.line.peer} {why}", code=code)


def greet(
    hub: InstanceHub,
    hello: InstanceHello,
    patience_s: float,
    unreached: Mapping[int, WorkerError],
    clock: Clock = time.monotonic,
) -> tuple[dict[int, InstanceWelcome], dict[int, WorkerError]]:
    """Say hello to all instances but the ``unreached``. Return the welcomes of those that answer
    within ``patience_s``, and the failures of others."""
    every = [Greeting(line, hello) for line in hub.connections]
    for number, why in unreached.items():
        every[number].failure = why
    end_s = clock() + patience_s
    while missing := [each for each in every if each.welcome is None and each.failure is None]:
        if clock() >= end_s:
            for each in missing:
                each.give_up(patience_s)
            break
        for each in missing:
            each.say(clock())
        try:
            number, answer = hub.receive_any(max(0.0, min(_BUSY_S, end_s - clock())))
        except PeerLostError as lost:
            each = every[lost.index]
            each.failure = each.failure or lost
        except WorkerError as error:
            if error.code != TIMEOUT:
                raise
        else:
            every[number].take(answer, clock())
    failed = {i: x.failure for i, x in enumerate(every) if x.failure is not None}
    answered = ((i, x.welcome) for i, x in enumerate(every) if x.failure is None)
    return {i: welcome for i, welcome in answered if welcome is not None}, failed


def hang_up(line: Any) -> None:
    """Close the connection to an instance that hangs. A rank is ended with its job."""
    getattr(line, "give_up", line.close)()


class Registry:
    """Receives from instances, and reports output, losses and returns to the router.

    Args:
        hub: Its instances have been greeted.
        router: Its clients are in the order of the hub's connections.
        identity: ``identity_of`` instances that may come back.
        timeout_s: An instance that lives and says nothing for this long hangs.
        may_return: Lost instances are looked for at their addresses.
    """

    def __init__(
        self,
        hub: InstanceHub,
        router: Router,
        hello: InstanceHello,
        identity: tuple[Identity, int],
        timeout_s: float,
        *,
        may_return: bool,
        clock: Clock = time.monotonic,
    ) -> None:
        self.hub = hub
        self._router = router
        self._hello = hello
        self._identity = identity
        self._timeout_s = timeout_s
        self._finder: Any = hub if may_return else None
        self._clock, self._looked_s = clock, clock()
        self._lost: dict[int, float | Greeting] = {
            number: clock() + _TRY_S
            for number, client in enumerate(router.clients)
            if client.broken is not None
        }
        """When the address of each lost instance is tried next; or the greeting of what answers."""
        self.on_turn: Callable[[], None] = lambda: None
        """Called in each turn, at least once a second."""

    def hear(self, most_s: float | None) -> None:
        """Take in one message or loss of an instance. Waits at most ``most_s``."""
        self.on_turn()
        for number, client in enumerate(self._router.clients):
            if client.unsent is not None and number not in self._lost:
                self.lose(number, client.unsent)
                return
        self._look_for_hung()
        self._look_for_lost()
        look_s = _LOOK_FOR_LOST_S if self._lost else _LOOK_S
        wait_s = look_s if most_s is None else min(most_s, look_s)
        if len(self._lost) == len(self._router.clients):
            time.sleep(wait_s)
            return
        try:
            number, message = self.hub.receive_any(wait_s)
        except PeerLostError as error:
            self.lose(error.index, error)
            return
        except WorkerError as error:
            if error.code != TIMEOUT:
                logger.debug("no instance is left to hear: %s", error)
            return
        if number in self._lost:
            return
        self._router.clients[number].quiet_s = 0.0
        try:
            self._take(self._router.clients[number], message)
        except Exception as error:
            self.lose(number, error)

    def lose(self, number: int, error: Exception) -> None:
        """Give up an instance of which anything was raised. It may come back."""
        if number in self._lost:
            return
        line, client = self.hub.connections[number], self._router.clients[number]
        if not isinstance(error, FastDecodeError):
            logger.error("what %s says, or is sent, is unusable", line.peer, exc_info=error)
            error = ProtocolError(f"{line.peer} is given up: {type(error).__name__}: {error}")
        self._lost[number] = self._clock() + _TRY_S
        if error.code == TIMEOUT:
            hang_up(line)
        line.close()
        client.broken = error
        self._router.lost(client)

    def _take(self, client: EngineClient, message: FromInstance) -> None:
        """Raises FastDecodeError: If it ends, or if that can't be true."""
        if isinstance(message, Deltas):
            self._router.arrived(client, message.deltas)
        elif isinstance(message, StatusReport):
            num_steps = client.num_steps
            client.update(message)
            # A step of an instance is one of the router, for those who ask if it hangs.
            self._router.has_work |= client.num_steps != num_steps
            if client.has_no_r_worker and client.stranded is None:
                client.stranded = WorkerError("no R-worker of it is left", code=NO_R_WORKER)
                self._router.lost(client)
            elif not client.has_no_r_worker and client.stranded is not None:
                logger.warning("instance %s has an R-worker again", client.name)
                client.stranded = None
                self._router.came_back()
        elif isinstance(message, Failed):
            raise WorkerError(
                f"instance {client.name} gives up: {message.message}", code=message.code
            )
        else:
            raise ProtocolError(f"an instance sent {type(message).__name__}, unasked")

    def _look_for_hung(self) -> None:
        """Lose instances that live and send nothing: their engines report twice a second between
        steps. Only time in which this process listened counts."""
        now_s = self._clock()
        passed_s, self._looked_s = min(now_s - self._looked_s, _LOOK_S), now_s
        for number, client in enumerate(self._router.clients):
            client.quiet_s += passed_s
            if client.quiet_s > self._timeout_s and number not in self._lost:
                peer, quiet_s = self.hub.connections[number].peer, client.quiet_s
                why = f"{peer} lives, but its engine has said nothing for {quiet_s:.3g} s: it hangs"
                self.lose(number, WorkerError(why, code=TIMEOUT))

    def _look_for_lost(self) -> None:
        if self._finder is None:
            return
        for number, lost in list(self._lost.items()):
            try:
                self._look_for(number, lost)
            except Exception as error:
                is_usual = isinstance(error, FastDecodeError)
                level = logging.DEBUG if is_usual else logging.ERROR
                logger.log(level, "instance %d isn't back yet: %s", number, error)
                if isinstance(lost, Greeting):
                    lost.line.close()
                self._lost[number] = self._clock() + _TRY_S

    def _look_for(self, number: int, lost: float | Greeting) -> None:
        """Raises FastDecodeError: If what answers is of no use."""
        now_s = self._clock()
        if not isinstance(lost, Greeting):
            if now_s >= lost:
                self._lost[number] = Greeting(self._finder.reconnect(number), self._hello)
            return
        lost.say(now_s)
        if (answer := lost.line.poll()) is not None:
            lost.take(answer, now_s)
        if lost.failure is not None:
            raise lost.failure
        welcome = lost.welcome
        if welcome is None:
            return
        if identity_of(welcome) != self._identity:
            raise WorkerError(
                f"{lost.line.peer} came back with other options: restart it with the old ones"
            )
        self._finder.replace(number, lost.line)
        del self._lost[number]
        client = self._router.clients[number]
        client.came_back(welcome)
        logger.warning("instance %s is there again", client.name)
        self._router.came_back()
