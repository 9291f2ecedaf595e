"""An instance as a process of its own: serves a controller, and then the next."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeAlias

from fastdecode.core.delta import Delta, DeltaQueue, parted
from fastdecode.core.errors import (
    FastDecodeError,
    ProtocolError,
    RequestError,
    WorkerError,
    without_frames,
)
from fastdecode.core.sequence import Request, validate_for_vocab
from fastdecode.engine.instances.connections import FromInstance
from fastdecode.engine.instances.remote_engine import packed, unpacked
from fastdecode.engine.instances.status_report import status_to_json
from fastdecode.engine.service import EngineService
from fastdecode.engine.stats import EngineStats
from fastdecode.wire.instances.messages import (
    MAX_NAMES,
    CancelRequests,
    EndConversation,
    InstanceHello,
    InstanceStatus,
    InstanceWelcome,
    RequestDeltas,
    RunRequests,
    SetInstanceRole,
    ToInstance,
)
from fastdecode.wire.instances.request_json import delta_to_json, request_from_json
from fastdecode.wire.messages import PROTOCOL_VERSION, Failed
from fastdecode.wire.transport import CLOSED, Connection, PeerLostError

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.2
_SEE_S: Final = 0.5
_Said: TypeAlias = "tuple[object, list[Delta] | InstanceWelcome, dict[str, Any] | None]"


class ControllerHub(Protocol):
    """Where controllers connect; see ``fastdecode.wire.transport.Hub``."""

    @property
    def connections(self) -> Sequence[Connection[FromInstance, ToInstance]]: ...

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ToInstance]: ...

    def wake(self) -> None:
        """Have whoever waits in ``receive_any`` look up, or who does so next; any
        thread."""


class _DeltaSender(DeltaQueue):
    """Passes on what requests of one controller say; by the engine's thread."""

    def __init__(self, say: Callable[[list[Delta]], None], *, every_step: bool) -> None:
        super().__init__(every_step=every_step)
        self._say = say

    def put(self, deltas: Iterable[Delta]) -> None:
        self._say(list(deltas))


class InstanceServer:
    """Used by one thread.

    Args:
        listener: where controllers connect.
        service: runs the engine; it is open.
        running: what it runs.
        welcome: what is said to controllers.
        vocab_size: token ids are below it.
        only_once: the first controller is the only one, and when any of the
            listener's peers is gone it is over.
    """

    def __init__(
        self,
        listener: ControllerHub,
        service: EngineService[Any],
        running: Any,
        welcome: InstanceWelcome,
        vocab_size: int,
        *,
        only_once: bool = False,
    ) -> None:
        self._only_once = only_once
        self._listener = listener
        self._service = service
        self._running = running
        self._welcome = welcome
        self._vocab_size = vocab_size
        self._controller: int | None = None
        self._readers: dict[bool, _DeltaSender] = {}
        self._outbox: SimpleQueue[_Said] = SimpleQueue()
        self._turn: object = None
        """Of the present controller; what is said for another one counts no more."""
        self._see_s = 0.0
        self._is_asked = False
        """The engine is asked how it is, and hasn't answered."""
        self._is_ending = False
        self._reported_stranded = False
        """Whether it was without an R-worker when the engine was asked last."""

    @property
    def service(self) -> EngineService[Any]:
        """The engine's thread."""
        return self._service

    @property
    def stats(self) -> EngineStats:
        """The engine's totals."""
        stats: EngineStats = self._running.engine.stats
        return stats

    def run(self) -> FastDecodeError | None:
        """Until it is asked to end, or the engine breaks down: why."""
        while not self._is_ending:
            self._work()
            snapshot = self._service.snapshot()
            if snapshot.error is not None:
                self._say(Failed(self._welcome.name, snapshot.error.code, snapshot.error.message))
                return snapshot.error
        return None

    def end(self) -> None:
        """Have it end soon; any thread, or a signal's handler."""
        self._is_ending = True

    def _work(self) -> None:
        self._pass_out()
        self._look_at_engine()
        try:
            peer, message = self._listener.receive_any(_LOOK_S)
        except PeerLostError as lost:
            self._lose(lost.index, lost)
            return
        except WorkerError:
            return  # woken, or nothing came
        try:
            self._obey(peer, message)
        except (ProtocolError, RequestError) as error:
            self._refuse(peer, error)
        except FastDecodeError as error:
            logger.error("instance %s: %s", self._welcome.name, error)  # ``run`` says so
        except Exception as error:
            logger.error("what a controller said can't be dealt with", exc_info=error)
            self._refuse(peer, ProtocolError(f"{type(error).__name__}: {error}"))

    def _refuse(self, peer: int, error: FastDecodeError) -> None:
        """Hang up on a controller, and say why."""
        logger.error("instance %s gives up on its controller: %s", self._welcome.name, error)
        self._say_to(peer, Failed(self._welcome.name, error.code, error.message))
        self._lose(peer, error)

    def _obey(self, peer: int, message: ToInstance) -> None:
        if isinstance(message, InstanceHello):
            self._greet(peer, message)
        elif peer != self._controller:
            raise ProtocolError(f"{type(message).__name__} comes before InstanceHello")
        elif isinstance(message, RunRequests):
            said = unpacked(message.said)
            if not isinstance(said, list):
                raise ProtocolError("what should be requests are none")
            self._submit([request_from_json(each) for each in said], message.every_step)
        elif isinstance(message, CancelRequests):
            if len(message.names) > MAX_NAMES:
                raise ProtocolError(f"{len(message.names)} requests can't be cancelled at once")
            for name in message.names:
                self._service.cancel(name)
        elif isinstance(message, SetInstanceRole):
            role = message.role
            logger.info("instance %s is for %s from now on", self._welcome.name, role.value)
            self._service.look(lambda running: running.engine.give_role(role))
        else:
            self._end_conversation(message)

    def _greet(self, peer: int, hello: InstanceHello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the controller speaks protocol version {hello.protocol_version}, this instance "
                f"{PROTOCOL_VERSION}: install the same version of fastdecode on both",
                code="protocol_version",
            )
        if hello.model_hash != self._welcome.model_hash:
            raise ProtocolError("the controller means another model", code="other_model")
        if self._controller is not None:
            raise ProtocolError("a controller says hello once")
        self._controller, self._turn = peer, object()
        self._readers = {every: self._reader(every) for every in (True, False)}
        self._service.look(self._welcomed())
        logger.info("instance %s serves a controller", self._welcome.name)

    def _welcomed(self) -> Callable[[Any], None]:
        """What has the present controller welcomed: by the engine's thread, once
        that has forgotten what others wanted. One that hangs welcomes nobody."""
        turn, outbox, wake = self._turn, self._outbox, self._listener.wake

        def welcome(running: Any) -> None:
            running.engine.give_role(self._welcome.role)
            running.engine.stats.begin_anew()
            outbox.put((turn, self._welcome, None))
            wake()

        return welcome

    def _reader(self, every_step: bool) -> _DeltaSender:
        """Of the present controller. When something of a request is over, totals
        are told before that is."""
        turn, outbox, wake = self._turn, self._outbox, self._listener.wake

        def say(deltas: list[Delta]) -> None:
            ends = any(x.finish_reason or x.error or x.sources or x.has_fetched for x in deltas)
            outbox.put((turn, deltas, self._totals() if ends else None))
            wake()

        return _DeltaSender(say, every_step=every_step)

    def _totals(self, *, with_figures: bool = False) -> dict[str, Any]:
        """By the engine's thread."""
        engine = self._running.engine
        return status_to_json(engine.stats, engine.figures() if with_figures else None)

    def _submit(self, requests: Sequence[Request], every_step: bool) -> None:
        """Have requests run. One that can't be run comes to an error, and costs the
        others nothing: the controller may have been lied to by another instance."""
        able = []
        for request in requests:
            try:
                self._check(request)
            except RequestError as error:
                refused = Delta(request.request_id, 0, error=without_frames(error))
                self._outbox.put((self._turn, [refused], None))
            else:
                able.append(request)
        if able:
            self._service.submit(able, self._readers[every_step])

    def _check(self, request: Request) -> None:
        """Raises RequestError: it can't be run with this model."""
        n, limit = request.params.n, self._welcome.max_model_len
        prompt, drawn = request.prompt_token_ids, request.drawn
        tokens = [*prompt, *(token for each in drawn.values() for token in each)]
        if not prompt or len(prompt) + request.max_tokens > limit:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and max_tokens={request.max_tokens} don't fit "
                f"the model's limit of {limit} tokens"
            )
        if any(token >= self._vocab_size for token in tokens):
            raise RequestError(f"a token is beyond the vocabulary of {self._vocab_size}")
        if any(index >= n or len(x) >= request.max_tokens for index, x in drawn.items()):
            raise RequestError("more tokens have been drawn than were asked for")
        validate_for_vocab(request.params, self._vocab_size)

    def _end_conversation(self, message: EndConversation) -> None:
        token_ids, salt = tuple(message.token_ids.tolist()), message.salt
        self._service.look(lambda running: running.engine.end_conversation(token_ids, salt))

    def _pass_out(self) -> None:
        """Tell the controller what requests have said."""
        told: list[Delta] = []
        while True:
            try:
                turn, deltas, totals = self._outbox.get_nowait()
            except Empty:
                break
            if turn is not self._turn:
                continue
            if isinstance(deltas, InstanceWelcome):
                self._say(deltas)
                continue
            if totals is not None:
                self._see(totals)
            told += deltas
        for part in parted(told):
            self._say(RequestDeltas(packed([delta_to_json(delta) for delta in part])))

    def _look_at_engine(self) -> None:
        """Now and then, how the engine is; it answers between two steps. At once
        when its last R-worker is lost, or the first is back."""
        now = time.monotonic()
        is_stranded = self._service.snapshot().engine.num_live_r_workers == 0
        is_due = now >= self._see_s or is_stranded != self._reported_stranded
        if self._controller is None or self._is_asked or not is_due:
            return
        self._reported_stranded = is_stranded
        self._see_s, self._is_asked, turn = now + _SEE_S, True, self._turn

        def tell(running: Any) -> None:
            self._is_asked = False
            self._outbox.put((turn, [], self._totals(with_figures=True)))

        self._service.look(tell)

    def _see(self, totals: dict[str, Any]) -> None:
        numbers = self._service.snapshot().engine
        self._say(InstanceStatus(numbers.num_steps, numbers.num_live_r_workers, packed(totals)))

    def _lose(self, peer: int, error: FastDecodeError) -> None:
        """A peer is gone. If that is the controller, all that is run for it is
        let go of."""
        self._listener.connections[peer].close()
        self._is_ending = self._is_ending or self._only_once
        if peer != self._controller:
            return
        is_idle = not self._service.snapshot().engine.num_unfinished
        if error.code == CLOSED and (self._only_once or is_idle):
            logger.info("instance %s is let go: %s", self._welcome.name, error)
        else:
            logger.warning("instance %s has lost its controller: %s", self._welcome.name, error)
        self._controller, self._turn = None, None
        for reader in self._readers.values():
            self._service.forgetting(reader)()

    def _say(self, message: FromInstance) -> None:
        if self._controller is not None:
            self._say_to(self._controller, message)

    def _say_to(self, peer: int, message: FromInstance) -> None:
        try:
            self._listener.connections[peer].send(message)
        except WorkerError:
            logger.debug("the controller is gone; the listener says so next")
