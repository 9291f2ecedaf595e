"""Requests from an iterable into an engine's service, as there is room for
them, and deltas back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from fastdecode.conversations.conversations import Conversations
from fastdecode.conversations.order import ReaderTurns
from fastdecode.conversations.turns import Turn, as_turn_error
from fastdecode.core.delta import CANCELLED, Delta, DeltaQueue, OutputFold
from fastdecode.core.errors import ConfigError, FastDecodeError, duplicate_id, without_frames
from fastdecode.core.sequence import PromptRequest, Request, RequestOutput
from fastdecode.engine.checker import RequestChecker
from fastdecode.engine.service import EngineService

Arriving: TypeAlias = PromptRequest | Turn
MOST_WAITING = 1 << 14
"""Turns that wait for another one of their conversation; then no request is asked for."""
TICK_S = 0.2  # between two calls of ``on_tick`` while no token comes


class RequestStream:
    """One reading of deltas, from its first request to its last.

    Args:
        most_sequences: Most sequences in the engine, waiting ones included, before another request
            is asked for.
        conversations: The conversations that requests are turns of.
        every_step: Read of every step, or of each sequence only once it is over.
    """

    def __init__(
        self,
        service: EngineService,
        checker: RequestChecker,
        most_sequences: int,
        conversations: Conversations,
        *,
        every_step: bool,
    ) -> None:
        self._talk = ReaderTurns(conversations)
        self._turns: dict[OutputFold, Turn] = {}  # that aren't over
        self._is_drained = False  # no more requests arrive
        self._service = service
        self._checker = checker
        self._most = most_sequences
        self._queue = DeltaQueue(every_step=every_step)
        self._refused: deque[tuple[Delta, RequestOutput | None]] = deque()
        self._num_open = 0  # sequences in the engine
        self._folds: dict[str, OutputFold] = {}
        """What is known of requests that aren't over."""
        self._is_over = False
        self._forget = service.forgetting(self._queue)
        """Takes what is still in the engine out of it."""

    def end(self) -> None:
        """End what is left. A reader that is interrupted here is ended by the next one's start."""
        self._is_over = True
        self._forget()
        self._talk.leave()

    def make_way(self) -> None:
        """Let another reading begin.

        Raises:
            ConfigError: (code ``busy``) If this one is not over.
        """
        if not self._is_over:
            raise ConfigError(
                "a stream of this LLM is still being read: read it to its end, or close() it, "
                "before the next one",
                code="busy",
            )
        self._forget()

    def cancel_waiting(self) -> None:
        """End those of its requests of which nothing has run."""
        self._talk.cancel_waiting()
        self._service.cancel_waiting(self._queue)

    def read(
        self, requests: Iterable[Arriving], on_tick: Callable[[], None] | None
    ) -> Iterator[tuple[Delta, RequestOutput | None]]:
        """Yield deltas until all requests are over or the engine breaks down, and the output with
        a request's last one. Cancelled requests have no output.

        Raises:
            FastDecodeError: the service takes no requests.
            Exception: a mistake of ours that broke the engine down, as it is.
        """
        arriving = iter(requests)
        while not self._is_drained or self._num_open or self._talk.due:
            self._fill(arriving)
            while self._refused:
                yield self._refused.popleft()
            if self._num_open:
                for delta in self._service.take(self._queue, None if on_tick is None else TICK_S):
                    # Typed errors may have causes, too; only a mistake of ours
                    # is known by nothing but its cause.
                    if type(delta.error) is FastDecodeError and delta.error.__cause__ is not None:
                        raise delta.error.__cause__
                    fold = self._folds[delta.request_id]
                    before = fold.num_unfinished
                    told, output = self._add(fold, delta)
                    self._num_open -= before - (fold.num_unfinished if output is None else 0)
                    if output is not None:
                        del self._folds[delta.request_id]
                    if told.error is None or told.error.code != CANCELLED:
                        yield told, output
            if on_tick is not None:
                on_tick()
            self._is_drained |= self._service.snapshot().error is not None

    def _fill(self, arriving: Iterator[Arriving]) -> None:
        """Take requests while there is room; they start together."""
        batch: list[Request] = []
        while self._num_open < self._most:
            arrived = self._next(arriving)
            if arrived is None:
                break
            if (request := self._checked(arrived)) is not None:
                batch.append(request)
                self._num_open += request.params.n
            elif not self._num_open:
                break  # its reader needn't wait for the next one
        try:
            if batch:
                self._service.submit(batch, self._queue)
        except FastDecodeError as error:
            if self._service.snapshot().error is None:
                raise
            for request in batch:
                self._num_open -= request.params.n
                self._refuse(self._folds.pop(request.request_id), error)

    def _next(self, arriving: Iterator[Arriving]) -> Arriving | None:
        """Return a request that can be run now, or None."""
        due = self._talk.due
        arrived: Arriving | None = due.popleft() if due else None
        while arrived is None and not self._is_drained and self._talk.num_waiting < MOST_WAITING:
            arrived = next(arriving, None)
            self._is_drained = arrived is None
            if isinstance(arrived, Turn) and self._talk.waits(arrived):
                arrived = None
        return arrived

    def _checked(self, arrived: Arriving) -> Request | None:
        """Return a valid request, or None if it is refused."""
        asked: object = arrived
        if not isinstance(asked, (PromptRequest, Turn)):
            kind = type(asked).__name__
            raise ConfigError(f"requests must be PromptRequest objects, not {kind}: make them so")
        request_id = arrived.request_id
        prompt: str | None = None
        token_ids: tuple[int, ...] = ()
        try:
            if isinstance(arrived, Turn):
                begun = self._talk.begin(arrived)
                asked, prompt = begun.request, begun.asked.text
            else:
                asked = arrived
                prompt = asked.prompt if isinstance(asked.prompt, str) else None
            token_ids = self._checker.tokenise(asked.prompt)
            request = self._checker.check(asked, token_ids)
            if request_id in self._folds:
                raise duplicate_id(request_id)
        except FastDecodeError as error:
            fold = self._fold_of(arrived, prompt, token_ids)
            self._refuse(fold, as_turn_error(error) if fold in self._turns else error)
            return None
        self._folds[request_id] = self._fold_of(arrived, prompt, request.prompt_token_ids)
        return request

    def _fold_of(
        self, arrived: Arriving, prompt: str | None, token_ids: tuple[int, ...]
    ) -> OutputFold:
        fold = OutputFold(arrived.request_id, prompt, token_ids, arrived.params.n)
        if isinstance(arrived, Turn):
            self._turns[fold] = arrived
        return fold

    def _refuse(self, fold: OutputFold, error: FastDecodeError) -> None:
        delta = Delta(fold.request_id, 0, error=without_frames(error))
        self._refused.append(self._add(fold, delta))

    def _add(self, fold: OutputFold, delta: Delta) -> tuple[Delta, RequestOutput | None]:
        """What a request comes to with this delta, if it is its last one. A
        turn that can't be kept ends with an error in its place."""
        output = fold.add(delta)
        turn = None if output is None else self._turns.pop(fold, None)
        if turn is not None and output is not None:
            error = self._talk.end(turn, output)
            if error is not None:
                return Delta(fold.request_id, 0, error=error), fold.failed(error)
        return delta, output
