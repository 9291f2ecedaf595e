"""Requests over several instances: which runs a prompt, which goes on with it,
and what becomes of them when one is lost.

The controller is an engine to whoever owns it (``fastdecode.engine.engine_thread``): it
is submitted requests, and tells listeners what they say. What instances say
comes through its owner's inbox, so all happens in one thread, and nothing waits.

Whatever fails, a request goes on with the tokens that are known of it: at an
instance that fetches its prompt, or else runs prompt and tokens itself. Nothing
that was said is said again. An instance that reports an error of a request isn't
given that request again; the request fails once no other instance can run it.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from copy import copy

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.delta import Delta, Listener
from fastdecode.core.errors import (
    CapacityError,
    ConfigError,
    FastDecodeError,
    WorkerError,
    duplicate_id,
    without_frames,
)
from fastdecode.core.sequence import Request
from fastdecode.engine.instances.routed_request import RequestObserver, RequestStage, RoutedRequest
from fastdecode.engine.instances.router import Instance, RoutedRequests, Router
from fastdecode.schedule.life.handing import HANDED_OVER_LOST

logger = logging.getLogger(__name__)


class Controller:
    """Requests over instances.

    Args:
        prefill: run prompts.
        decode: go on with them; whoever is among both does both.
        batch_tokens: of prompts that a prefill instance runs at once.
        block_size: in which room is counted.
        local_below: prompts shorter than that are run by who goes on with them.
    """

    def __init__(
        self,
        prefill: Sequence[Instance],
        decode: Sequence[Instance],
        *,
        batch_tokens: int,
        block_size: int,
        local_below: int = 0,
    ) -> None:
        self._local_below = local_below
        self.flows = RoutedRequests(block_size)
        """All requests that aren't over."""
        every = [*decode, *(each for each in prefill if each not in decode)]
        roles = [_role(each in prefill, each in decode) for each in every]
        self.desk = Router(self.flows, every, roles, batch_tokens, self._failed)
        """Gives them to instances."""
        self.observer: RequestObserver | None = None
        """Is told of requests, from when it is put there."""
        self._broken: FastDecodeError | None = None
        self.has_work = False
        """Something has been said since the last step."""
        self.num_handed_over = 0
        """Requests whose prompts were fetched."""
        self.num_failed_fetches = 0
        """Those that couldn't be: whoever was to fetch them has run them again."""
        self.num_moved = 0
        """Requests that an instance went on with after a failure."""
        self.num_role_changes = 0
        """Instances that were given another role."""

    pause_s = 0.0

    @property
    def num_running(self) -> int:
        """Sequences that an instance goes on with."""
        every = self.flows.by_request.values()
        return sum(flow.num_left for flow in every if flow.decoding is not None)

    @property
    def num_unfinished_sequences(self) -> int:
        """Sequences that aren't over."""
        return sum(flow.num_left for flow in self.flows.by_request.values())

    def submit(self, request: Request, listener: Listener | None = None) -> None:
        """Queue a valid request.

        Raises:
            RequestError: an unfinished request has the same id.
            CapacityError: no instance could ever hold it.
        """
        if self._broken is not None:
            raise copy(self._broken)
        if request.request_id in self.flows.by_request:
            raise duplicate_id(request.request_id)
        flow = self.flows.make(request, listener)
        self.desk.dispatcher.check_possible(flow.job)
        self.flows.add(flow)
        if self.observer is not None:
            flow.is_observed = True
            self.observer.arrived(flow)
        if flow.job.prompt_tokens < self._local_below or request.drawn:
            self.desk.wait(flow, is_first=False)
        else:
            self.desk.arrive(flow)

    def step(self) -> None:
        """What was said has been told. Raises WorkerError: no instance is left."""
        self.has_work = False
        if self._broken is not None:
            raise self._broken

    def look(self) -> None:
        """Instances look after themselves."""

    def arrived(self, deltas: Iterable[Delta]) -> None:
        """What an instance says of its requests. All that is said of tokens
        comes before anything is made of it."""
        self.has_work = True
        told = list(deltas)
        for delta in told:
            flow = self.flows.by_run.get(delta.request_id)
            if flow is not None and delta.error is None:
                flow.tell(delta)
                if self.observer is not None:
                    self.observer.told(flow)
        for delta in told:
            flow = self.flows.by_run.get(delta.request_id)
            if flow is not None:
                self._advance(flow, delta)

    def cancel(self, request_id: str) -> bool:
        """Forget an unfinished request; False if there is none of this id."""
        flow = self.flows.by_request.get(request_id)
        if flow is not None:
            self.desk.end(flow)
        return flow is not None

    def cancel_waiting(self, among: Container[str] | None = None) -> list[str]:
        """Forget the requests, ``among`` these or all, that no instance has.
        Returns their ids."""
        waiting = self.flows.untouched(among)
        for request_id in waiting:
            self.cancel(request_id)
        return waiting

    def break_down(self, error: FastDecodeError) -> None:
        """No instance can be heard any more: the next step raises why."""
        self._broken = without_frames(error)
        self.has_work = True

    def abandon(self, error: FastDecodeError) -> None:
        """End every unfinished request with this error."""
        self._broken = without_frames(error)
        for flow in list(self.flows.by_request.values()):
            self._fail(flow, error)

    def _advance(self, flow: RoutedRequest, delta: Delta) -> None:
        """What a delta means for where a request is."""
        if delta.error is not None:
            self._failed(flow, delta)
        elif delta.has_fetched:
            self.num_handed_over += not delta.fetch_failed
            self.num_failed_fetches += delta.fetch_failed
            self.desk.release(flow)
        elif flow.is_over:
            if self.observer is not None:
                self.observer.over(flow)
            self.desk.end(flow)
        elif delta.sources and flow.stage is RequestStage.PREFILL:
            flow.sources = delta.sources
            self.desk.offer(flow)

    def _failed(self, flow: RoutedRequest, delta: Delta) -> None:
        """A run of a request has ended with an error. Others may be able to run
        it: its instance may be about to break down."""
        error, run = delta.error, flow.run_of(delta)
        assert error is not None
        if run is None:
            return
        where, is_prompt = self.desk.where(run), run is flow.offering
        is_too_long = isinstance(error, CapacityError)
        if where.broken is not None:
            self.lost(where, error)
        elif is_prompt and flow.decoding is not None:  # who fetches it looks after himself
            self.desk.release(flow)
        elif is_prompt and (is_too_long or error.code == HANDED_OVER_LOST):
            self._go_on(flow, fits_prefill=not is_too_long)
        else:
            logger.warning("instance %s has failed a request: %s", where.name, error)
            self._go_on(flow, failed=(run.instance, error))

    def lost(self, lost: Instance, error: FastDecodeError) -> None:
        """An instance is broken: all that it had goes on elsewhere."""
        logger.error("instance %s is lost: %s", lost.name, error)
        had = self.desk.lose(lost)
        if self.desk.members.are_all_lost:
            self._broken = WorkerError(f"no instance is left: {error.message}", code=error.code)
            self.has_work = True
            return
        self._go_on_elsewhere(had)

    def strand(self, instance: Instance, error: FastDecodeError) -> None:
        """An instance has no R-worker any more: all that it had goes on elsewhere,
        and where no other instance can run it, waits."""
        logger.error("instance %s runs nothing for now: %s", instance.name, error)
        self.has_work = True
        self._go_on_elsewhere(self.desk.lose(instance))

    def _go_on_elsewhere(self, had: Iterable[RoutedRequest]) -> None:
        """The instance that had these requests has been given up."""
        for flow in had:
            if flow.stage is not RequestStage.OVER:
                self._go_on(flow)
        self.desk.look()
        self._check_waiting()

    def came_back(self, instance: Instance) -> None:
        """One that was lost or stranded can run requests again, and has none."""
        self.desk.members.come_and_go(instance, is_there=True)
        self.desk.look()

    def set_role(self, name: str, role: InstanceRole) -> None:
        """What an instance is given from now on. What it has, it goes on with.

        Raises:
            ConfigError: there is none of that name.
        """
        before = list(self.desk.members.roles)
        if not self.desk.set_role(name, role):
            names = ", ".join(each.name for each in self.desk.instances)
            raise ConfigError(f"there is no instance {name!r}: they are {names}")
        self.num_role_changes += self.desk.members.roles != before
        self._check_waiting()

    def _check_waiting(self) -> None:
        """Requests that no instance decodes yet may fit on none any more."""
        for flow in list(self.flows.by_request.values()):
            if flow.stage is not RequestStage.DECODE:
                try:
                    self.desk.dispatcher.check_possible(flow.job)
                except CapacityError as error:
                    self._fail(flow, flow.failure or error)

    def _go_on(
        self,
        flow: RoutedRequest,
        *,
        fits_prefill: bool = True,
        failed: tuple[int, FastDecodeError] | None = None,
    ) -> None:
        """What was made of a request is lost but for its tokens. ``failed``: the
        instance that has failed it, and why."""
        self.num_moved += 1
        self.desk.leave(flow)
        flow.sources = ()
        if failed is not None:
            flow.fail_at(*failed)
        try:
            self.desk.dispatcher.check_possible(flow.job)
        except CapacityError as error:
            self._fail(flow, flow.failure or error)
            return
        if flow.has_said or not fits_prefill:
            self.desk.wait(flow, is_first=True)
        else:
            self.desk.begin_anew(flow)

    def _fail(self, flow: RoutedRequest, error: FastDecodeError) -> None:
        self.desk.end(flow)
        if flow.listener is not None:
            flow.listener.tell(Delta(flow.request.request_id, 0, error=without_frames(error)))


def _role(prefills: bool, decodes: bool) -> InstanceRole:
    if prefills and decodes:
        return InstanceRole.BOTH
    return InstanceRole.PREFILL if prefills else InstanceRole.DECODE
