"""Serves an engine to one client: requests in, deltas and status reports out.

It does no I/O. The thread that has the channel calls ``obey`` with each message that
came, and sends what ``messages`` gives. The engine's thread calls ``wake`` when there
is something to send. Deltas of a sequence become one while nothing is sent, so a client
that is slow costs no step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastdecode.core.delta import Delta, DeltaQueue, parted
from fastdecode.core.errors import FastDecodeError, RequestError, without_frames
from fastdecode.core.sequence import Request, validate_for_vocab
from fastdecode.engine.service import EngineService
from fastdecode.wire.instances import (
    Cancel,
    Deltas,
    EndConversation,
    FromEngine,
    SetRole,
    StatusReport,
    Submit,
    ToEngine,
)

logger = logging.getLogger(__name__)

STATUS_EVERY_S: Final = 0.5


@dataclass(frozen=True)
class RequestLimits:
    """What any request to an engine keeps."""

    vocab_size: int
    """Token ids are below it."""
    max_model_len: int
    """Most tokens of prompt and completion together."""

    def check(self, request: Request) -> None:
        """Raises RequestError: the model cannot run it."""
        prompt, drawn = request.prompt_token_ids, request.drawn
        if not prompt or len(prompt) + request.max_tokens > self.max_model_len:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and max_tokens={request.max_tokens} don't fit "
                f"the model's limit of {self.max_model_len} tokens"
            )
        tokens = [*prompt, *(token for each in drawn.values() for token in each)]
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            raise RequestError(
                f"a token is outside the vocabulary of {self.vocab_size}", code="invalid_token_id"
            )
        for index, each in drawn.items():
            if index >= request.params.n or len(each) >= request.max_tokens:
                raise RequestError("more tokens have been drawn than were asked for")
        validate_for_vocab(request.params, self.vocab_size)


class _Outlet(DeltaQueue):
    """Deltas of one client. ``noted`` is called before those of a step can be taken."""

    def __init__(
        self,
        noted: Callable[[Sequence[Delta]], None],
        wake: Callable[[], None],
        *,
        every_step: bool,
    ) -> None:
        super().__init__(every_step=every_step)
        self._noted = noted
        self._wake = wake

    def put(self, deltas: Iterable[Delta]) -> None:
        """By the engine's thread."""
        fresh = list(deltas)
        self._noted(fresh)
        super().put(fresh)
        self._wake()

    def refuse(self, requests: Sequence[Request], error: FastDecodeError) -> None:
        """End requests that the engine has not got, by the thread that takes deltas."""
        super().put(Delta(each.request_id, 0, error=without_frames(error)) for each in requests)


class EngineServer:
    """See the module. Used by one thread, but for what is said to be for any.

    Args:
        service: runs the engine; it is open.
        limits: a request that breaks them ends with an error, and no other does.
        figures: of the engine, for status reports; called by its thread between two steps.
        wake: called by any thread when there is something to send.
        totals: of the engine, for a status report that precedes the end of a request; called
            by its thread. Given: a report is what the engine has answered, so an engine that
            hangs reports nothing. None: reports come on time, whether or not it answers.
    """

    def __init__(
        self,
        service: EngineService[Any],
        limits: RequestLimits,
        figures: Callable[[Any], Mapping[str, Any]],
        wake: Callable[[], None],
        *,
        totals: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._service = service
        self._limits = limits
        self._figures_of = figures
        self._wake = wake
        self._totals = totals
        self._outlets = {
            every: _Outlet(self._note, wake, every_step=every) for every in (True, False)
        }
        self._figures: Mapping[str, Any] = {}
        self._is_asked = False
        """The engine is asked for figures, and has not answered."""
        self._is_answered = False
        """It has reported something that was not sent yet."""
        self._due_s = 0.0
        self._was_stranded = False
        """Whether it had no R-worker when it was asked last."""

    def obey(self, message: ToEngine) -> None:
        """Do what the client says. Raises FastDecodeError: the engine takes no requests."""
        match message:
            case Submit(requests, every_step):
                self._submit(requests, self._outlets[every_step])
            case Cancel(request_ids):
                for request_id in request_ids:
                    self._service.cancel(request_id)
            case SetRole(role):
                self._service.look(lambda served: served.engine.give_role(role))
            case EndConversation(token_ids, salt):
                self._service.look(lambda served: served.engine.end_conversation(token_ids, salt))

    def messages(self) -> Iterator[FromEngine]:
        """What is to be sent now, in this order."""
        deltas = [delta for outlet in self._outlets.values() for delta in outlet.take(0)]
        if self._is_due():
            yield self._report()
        for part in parted(deltas):
            yield Deltas(tuple(part))

    @property
    def wait_s(self) -> float:
        """Until a status report may be due though ``wake`` was not called."""
        return max(0.0, self._due_s - time.monotonic())

    def cancel_all(self, error: FastDecodeError) -> None:
        """End all requests of the client with an error; any thread."""
        for outlet in self._outlets.values():
            self._service.cancel_all(outlet, error)

    def forget(self) -> None:
        """The client is gone: end all its requests, without a word."""
        for outlet in self._outlets.values():
            self._service.forgetting(outlet)()

    def _submit(self, requests: Sequence[Request], outlet: _Outlet) -> None:
        fit = [request for request in requests if self._fits(request, outlet)]
        if not fit:
            return
        try:
            self._service.submit(fit, outlet)
        except FastDecodeError as error:
            outlet.refuse(fit, error)

    def _fits(self, request: Request, outlet: _Outlet) -> bool:
        """Whether the model can run it. The client has checked already, but others
        may have lied to it."""
        try:
            self._limits.check(request)
        except RequestError as error:
            outlet.refuse([request], error)
            return False
        except Exception as error:
            logger.exception("a request of a client can't be read")
            what = f"it can't be read: {type(error).__name__}: {error}"
            outlet.refuse([request], RequestError(what, code="invalid_token_id"))
            return False
        return True

    def _note(self, deltas: Sequence[Delta]) -> None:
        """By the engine's thread: when something of a request is over, totals are
        reported before that is."""
        if self._totals is not None and any(
            x.finish_reason or x.error or x.sources or x.has_fetched for x in deltas
        ):
            unsent = self._figures if self._is_answered else {}
            self._answer({**unsent, **self._totals()})

    def _answer(self, figures: Mapping[str, Any]) -> None:
        self._figures, self._is_answered = figures, True

    def _is_due(self) -> bool:
        """Whether a report is to be sent; asks the engine for the next one. At once when
        its last R-worker is lost, or the first is back."""
        now = time.monotonic()
        is_stranded = self._service.snapshot().engine.num_live_r_workers == 0
        is_due = now >= self._due_s or is_stranded != self._was_stranded
        if is_due:
            self._was_stranded, self._due_s = is_stranded, now + STATUS_EVERY_S
        if is_due and not self._is_asked:
            self._is_asked = True
            self._service.look(self._look)  # or an idle one would not notice a lost R-worker
        return self._is_answered if self._totals is not None else is_due

    def _look(self, served: Any) -> None:
        self._is_asked = False
        self._answer(self._figures_of(served))
        if self._totals is not None:
            self._wake()

    def _report(self) -> StatusReport:
        self._is_answered = False
        return self._service.snapshot().report(self._figures)
