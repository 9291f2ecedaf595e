"""Requests over several instances: which runs a prompt, which goes on with it,
and what becomes of them when one is lost.

To its owner the controller is an engine (``fastdecode.engine.service``): it
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
from fastdecode.engine.instances.engine_client import EngineClient
from fastdecode.engine.instances.routed_request import RequestObserver, RequestStage, RoutedRequest
from fastdecode.engine.instances.router import RoutedRequests, Router
from fastdecode.engine.instances.status_report import sum_figures, sum_stats
from fastdecode.engine.stats import EngineFigures, EngineStats
from fastdecode.schedule.life.handing import HANDED_OVER_LOST

logger = logging.getLogger(__name__)


class Controller:
    """Requests over instances.

    Args:
        prefill: run prompts.
        decode: go on with them; whoever is among both does both.
        batch_tokens: of prompts that a prefill instance runs at once.
        block_size: in which room is counted.
    """

    def __init__(
        self,
        prefill: Sequence[EngineClient],
        decode: Sequence[EngineClient],
        *,
        batch_tokens: int,
        block_size: int,
    ) -> None:
        self.routed_requests = RoutedRequests(block_size)
        """All requests that aren't over."""
        every = [*decode, *(each for each in prefill if each not in decode)]
        roles = [_role(each in prefill, each in decode) for each in every]
        self.router = Router(self.routed_requests, every, roles, batch_tokens, self._failed)
        """Gives them to instances."""
        self.observer: RequestObserver | None = None
        """Is told of requests, from when it is put there."""
        self._broken: FastDecodeError | None = None
        self.has_work = False
        """Something has been said since the last step."""
        self._num_steps = 0
        """Of all instances, when they were looked at last."""
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
        every = self.routed_requests.by_request.values()
        return sum(routed.num_left for routed in every if routed.decoding is not None)

    @property
    def num_unfinished_sequences(self) -> int:
        """Sequences that aren't over."""
        return sum(routed.num_left for routed in self.routed_requests.by_request.values())

    def submit(self, request: Request, listener: Listener | None = None) -> None:
        """Queue a valid request.

        Raises:
            RequestError: an unfinished request has the same id.
            CapacityError: no instance could ever hold it.
        """
        if self._broken is not None:
            raise copy(self._broken)
        if request.request_id in self.routed_requests.by_request:
            raise duplicate_id(request.request_id)
        routed = self.routed_requests.make(request, listener)
        self.router.dispatcher.check_possible(routed.job)
        self.routed_requests.add(routed)
        if self.observer is not None:
            routed.is_observed = True
            self.observer.arrived(routed)
        if request.drawn:
            self.router.wait(routed, is_first=False)
        else:
            self.router.arrive(routed)

    def step(self) -> None:
        """What was said has been told. Raises WorkerError: no instance is left."""
        self.has_work = False
        if self._broken is not None:
            raise self._broken

    def look(self) -> None:
        """Instances look after themselves. A step of one of them is a step, for a caller
        that asks whether this engine hangs."""
        num_steps = sum(each.num_steps for each in self.router.instances)
        self.has_work = self.has_work or num_steps != self._num_steps
        self._num_steps = num_steps

    @property
    def stats(self) -> EngineStats:
        """Of all instances together, as far as each has reported."""
        stats = sum_stats([each.stats for each in self.router.instances])
        stats.num_handed_over, stats.num_moved = self.num_handed_over, self.num_moved
        stats.num_failed_fetches = self.num_failed_fetches
        stats.num_role_changes = self.num_role_changes
        return stats

    def figures(self) -> EngineFigures:
        """Of all instances together, as far as each has reported."""
        each = [instance.figures() for instance in self.router.instances]
        return sum_figures([figures for figures in each if figures is not None])

    def end_conversation(self, token_ids: Sequence[int], salt: str) -> None:
        """Nobody goes on with a conversation that has come to these tokens."""
        for instance in self.router.instances:
            instance.end_conversation(token_ids, salt)

    def arrived(self, deltas: Iterable[Delta]) -> None:
        """What an instance says of its requests. All that is said of tokens
        comes before anything is made of it."""
        self.has_work = True
        told = list(deltas)
        for delta in told:
            routed = self.routed_requests.by_run.get(delta.request_id)
            if routed is not None and delta.error is None and not routed.is_borrowed(delta):
                is_whole = delta.has_fetched and routed.borrowing is None
                self.num_handed_over += is_whole and not delta.fetch_failed
                self.num_failed_fetches += delta.fetch_failed
                routed.tell(delta)
                if self.observer is not None:
                    self.observer.told(routed)
        for delta in told:
            routed = self.routed_requests.by_run.get(delta.request_id)
            if routed is not None:
                self._advance(routed, delta)

    def cancel(self, request_id: str) -> bool:
        """Forget an unfinished request; False if there is none of this id."""
        routed = self.routed_requests.by_request.get(request_id)
        if routed is not None:
            self.router.end(routed)
        return routed is not None

    def cancel_waiting(self, among: Container[str] | None = None) -> list[str]:
        """Forget the requests, ``among`` these or all, that no instance has.
        Returns their ids."""
        waiting = self.routed_requests.untouched(among)
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
        for routed in list(self.routed_requests.by_request.values()):
            self._fail(routed, error)

    def _advance(self, routed: RoutedRequest, delta: Delta) -> None:
        """What a delta means for where a request is."""
        if routed.is_borrowed(delta):
            self.router.lent(routed, delta)
            return
        if delta.error is not None:
            self._failed(routed, delta)
            return
        if delta.has_fetched and routed.borrowing is not None:
            self.router.give_back(routed)
        elif delta.has_fetched:
            self.router.release(routed)
        if routed.is_over:
            if self.observer is not None:
                self.observer.over(routed)
            self.router.note_kept(routed)
            self.router.end(routed)
        elif delta.sources and routed.stage is RequestStage.PREFILL:
            routed.sources = delta.sources
            self.router.note_kept(routed)
            self.router.offer(routed)

    def _failed(self, routed: RoutedRequest, delta: Delta) -> None:
        """A run of a request has ended with an error. Others may be able to run
        it: its instance may be about to break down."""
        error, run = delta.error, routed.run_of(delta)
        assert error is not None
        if run is None:
            return
        where, is_prompt = self.router.where(run), run is routed.offering
        is_too_long = isinstance(error, CapacityError)
        if where.broken is not None:
            self.lost(where, error)
        elif is_prompt and routed.decoding is not None:  # who fetches it looks after himself
            self.router.release(routed)
        elif is_prompt and (is_too_long or error.code == HANDED_OVER_LOST):
            self._go_on(routed, fits_prefill=not is_too_long)
        else:
            logger.warning("instance %s has failed a request: %s", where.name, error)
            self._go_on(routed, failed=(run.instance, error))

    def lost(self, lost: EngineClient, error: FastDecodeError) -> None:
        """An instance is broken: all that it had goes on elsewhere."""
        logger.error("instance %s is lost: %s", lost.name, error)
        had = self.router.lose(lost)
        if self.router.registry.are_all_lost:
            self._broken = WorkerError(f"no instance is left: {error.message}", code=error.code)
            self.has_work = True
            return
        self._go_on_elsewhere(had)

    def strand(self, instance: EngineClient, error: FastDecodeError) -> None:
        """An instance has no R-worker any more: all that it had goes on elsewhere,
        and where no other instance can run it, waits."""
        logger.error("instance %s runs nothing for now: %s", instance.name, error)
        self.has_work = True
        self._go_on_elsewhere(self.router.lose(instance))

    def _go_on_elsewhere(self, had: Iterable[RoutedRequest]) -> None:
        """The instance that had these requests has been given up."""
        for routed in had:
            if routed.stage is not RequestStage.OVER:
                self._go_on(routed)
        self.router.look()
        self._check_waiting()

    def came_back(self, instance: EngineClient) -> None:
        """One that was lost or stranded can run requests again, and has none."""
        self.router.registry.come_and_go(instance, is_there=True)
        self.router.look()

    def set_role(self, name: str, role: InstanceRole) -> None:
        """What an instance is given from now on. What it has, it goes on with.

        Raises:
            ConfigError: there is none of that name.
        """
        before = list(self.router.registry.roles)
        if not self.router.set_role(name, role):
            names = ", ".join(each.name for each in self.router.instances)
            raise ConfigError(f"there is no instance {name!r}: they are {names}")
        self.num_role_changes += self.router.registry.roles != before
        self._check_waiting()

    def _check_waiting(self) -> None:
        """Requests that no instance decodes yet may fit on none any more."""
        for routed in list(self.routed_requests.by_request.values()):
            if routed.stage is not RequestStage.DECODE:
                try:
                    self.router.dispatcher.check_possible(routed.job)
                except CapacityError as error:
                    self._fail(routed, routed.failure or error)

    def _go_on(
        self,
        routed: RoutedRequest,
        *,
        fits_prefill: bool = True,
        failed: tuple[int, FastDecodeError] | None = None,
    ) -> None:
        """What was made of a request is lost but for its tokens. ``failed``: the
        instance that has failed it, and why."""
        self.num_moved += 1
        self.router.leave(routed)
        routed.sources = ()
        if failed is not None:
            routed.fail_at(*failed)
        try:
            self.router.dispatcher.check_possible(routed.job)
        except CapacityError as error:
            self._fail(routed, routed.failure or error)
            return
        if routed.has_said or not fits_prefill:
            self.router.wait(routed, is_first=True)
        else:
            self.router.begin_anew(routed)

    def _fail(self, routed: RoutedRequest, error: FastDecodeError) -> None:
        self.router.end(routed)
        if routed.listener is not None:
            routed.listener.tell(Delta(routed.request.request_id, 0, error=without_frames(error)))


def _role(prefills: bool, decodes: bool) -> InstanceRole:
    if prefills and decodes:
        return InstanceRole.BOTH
    return InstanceRole.PREFILL if prefills else InstanceRole.DECODE
