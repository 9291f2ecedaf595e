"""Requests over several instances: which runs a prompt, which continues it, and what becomes of
them when an instance is lost.

To its loop the router is an engine (``fastdecode.engine.service``). All happens in one thread, and
nothing waits.

Whatever fails, a request continues with its known tokens: at an instance that fetches its prompt,
or else runs prompt and tokens itself. Nothing is reported twice. An instance that reports an error
of a request isn't given it again. The request fails once no other instance can run it.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Final

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.delta import Delta, Listener
from fastdecode.core.errors import (
    CapacityError,
    ConfigError,
    FastDecodeError,
    ProtocolError,
    WorkerError,
    duplicate_id,
    without_frames,
)
from fastdecode.core.holders import KVSource, num_offered
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.sequence import Request
from fastdecode.engine.instances.client import EngineClient, sum_figures, sum_stats
from fastdecode.engine.instances.routed import InstanceRun, RequestStage, RoutedRequest
from fastdecode.engine.stats import EngineFigures, EngineStats
from fastdecode.schedule.dispatch import (
    AssignDecode,
    AssignPrefill,
    DecodeReservations,
    Dispatcher,
    DispatchJob,
    PrefillQueue,
)
from fastdecode.schedule.kept_prefixes import BlockChain, KeptPrefixes
from fastdecode.schedule.life.handing import HANDED_OVER_LOST

logger = logging.getLogger(__name__)

_LEAST_BORROWED: Final = 4
"""Blocks: to run fewer again takes no longer than to fetch them."""


class Router:
    """Spreads requests over instances.

    Args:
        clients: All instances. Their numbers are their places here.
        spec: Of the model. What instances say is checked against it.
        batch_tokens: Prompt tokens that an instance runs at once.
        block_size: Tokens of a KV block, in which room is counted.
    """

    pause_s = 0.0

    def __init__(
        self,
        clients: Sequence[EngineClient],
        spec: ModelSpec,
        *,
        batch_tokens: int,
        block_size: int,
    ) -> None:
        self.clients = tuple(clients)
        self._spec = spec
        self.batch_tokens = batch_tokens
        self._block_size = block_size
        self.dispatcher = Dispatcher(
            [PrefillQueue(batch_tokens, float) for _ in clients],
            [DecodeReservations(each.num_tokens, each.max_sequences) for each in clients],
        )
        self._numbers = itertools.count()
        self.by_request: dict[str, RoutedRequest] = {}  # the requests that aren't over
        self.by_job: dict[int, RoutedRequest] = {}
        self.by_run: dict[str, tuple[RoutedRequest, InstanceRun]] = {}
        """What counts that instances say, by the runs' names."""
        self._prefixes = KeptPrefixes()
        self._decided: deque[AssignPrefill | AssignDecode] = deque()
        """What is to be carried out. Its room is booked already."""
        self._is_at_work = False
        self.observe: Callable[[RoutedRequest], None] | None = None
        """Called when a request arrives, and when it is over."""
        self._broken: FastDecodeError | None = None
        self.has_work = False  # something has been reported since the last step
        self.counts = EngineStats()
        """Counts of prompts handed over, requests moved and roles changed."""
        self._set_open()

    @property
    def num_running(self) -> int:
        """Sequences that an instance continues."""
        every = self.by_request.values()
        return sum(routed.num_left for routed in every if routed.decoding is not None)

    @property
    def num_unfinished_sequences(self) -> int:
        """Sequences that aren't over."""
        return sum(routed.num_left for routed in self.by_request.values())

    def submit(self, request: Request, listener: Listener | None = None) -> None:
        """Queue a valid request. All of its sequences are reserved whole.

        Raises:
            RequestError: If an unfinished request has the same id.
            CapacityError: If no instance could ever hold it.
        """
        if self._broken is not None:
            raise copy(self._broken)
        if request.request_id in self.by_request:
            raise duplicate_id(request.request_id)
        if request.cache.is_off:  # its blocks get names when it is handed over, which no other has
            request = replace(request, cache=replace(request.cache, salt=secrets.token_hex(16)))
        prompt, size = len(request.prompt_token_ids), self._block_size
        blocks = -(-(prompt + request.max_tokens - 1) // size)
        job = DispatchJob(next(self._numbers), prompt, request.params.n * blocks * size)
        self.dispatcher.check_possible(job)
        routed = RoutedRequest(request, listener, job)
        self.by_request[request.request_id] = self.by_job[job.job_id] = routed
        if self.observe is not None:
            self.observe(routed)
        if request.drawn:
            self._wait(routed, is_first=False)
        else:
            self._do(self.dispatcher.arrived(job))

    def step(self) -> None:
        """End a turn. Raises WorkerError: If no instance is left."""
        self.has_work = False
        if self._broken is not None:
            raise copy(self._broken)

    def look(self) -> None:
        """Do nothing: instances report by themselves."""

    @property
    def stats(self) -> EngineStats:
        """Totals of all instances together, as far as each has reported."""
        return sum_stats([self.counts, *(each.stats for each in self.clients)])

    def figures(self) -> EngineFigures:
        """Return those of all instances together, as far as each has reported."""
        each = [client.figures() for client in self.clients]
        return sum_figures([figures for figures in each if figures is not None])

    def end_conversation(self, token_ids: Sequence[int], salt: str) -> None:
        """Let go of what is kept for a conversation that has come to these tokens."""
        for client in self.clients:
            client.end_conversation(token_ids, salt)

    def cancel(self, request_id: str) -> bool:
        """Forget an unfinished request. Return False if none has this id."""
        routed = self.by_request.get(request_id)
        if routed is not None:
            self._end(routed)
        return routed is not None

    def cancel_waiting(self, among: Container[str] | None = None) -> list[str]:
        """Forget the requests, ``among`` these or all, that no instance has and that have no
        output. Return their ids."""
        waiting = [
            request_id
            for request_id, routed in self.by_request.items()
            if routed.stage in (RequestStage.QUEUED, RequestStage.WAITING)
            and not routed.has_said
            and (among is None or request_id in among)
        ]
        for request_id in waiting:
            self.cancel(request_id)
        return waiting

    def abandon(self, error: FastDecodeError) -> None:
        """End every unfinished request with this error."""
        self._broken = without_frames(error)
        for routed in list(self.by_request.values()):
            self._fail(routed, error)

    # Output of instances, and their losses.

    def arrived(self, client: EngineClient, deltas: Iterable[Delta]) -> None:
        """Take in an instance's output of its requests. All of its tokens are reported before
        anything is made of them.

        Raises:
            ProtocolError: If it can't be true.
        """
        self.has_work = True
        known = [(*self.by_run[x.request_id], x) for x in deltas if x.request_id in self.by_run]
        for routed, run, delta in known:
            if self.clients[run.instance] is not client:
                raise ProtocolError("says something of a request that another instance has")
            if delta.error is not None:
                continue
            run.check(delta, self._spec)
            if delta.has_fetched and routed.sources:
                self.counts.num_handed_over += not delta.fetch_failed
                self.counts.num_failed_fetches += delta.fetch_failed
            routed.tell(run, delta)
        for routed, run, delta in known:
            if delta.request_id in self.by_run:
                self._advance(routed, run, delta)

    def lost(self, client: EngineClient) -> None:
        """Continue elsewhere all that an instance had, which is broken or stranded. What no other
        one can run waits for a stranded one."""
        why, self.has_work = client.broken or client.stranded, True
        what = "is lost" if client.broken is not None else "runs nothing for now"
        logger.error("instance %s %s: %s", client.name, what, why)
        self._prefixes.forget_lost(self.clients.index(client))
        self._set_open()
        had = [  # an instance that fetches from it notices that by itself
            routed
            for routed in self.by_request.values()
            if (run := routed.decoding or routed.offering) and self.clients[run.instance] is client
        ]
        if why is not None and all(each.broken is not None for each in self.clients):
            self._broken = WorkerError(f"no instance is left: {why.message}", code=why.code)
            return
        for routed in had:
            if routed.stage is not RequestStage.OVER:
                self._continue(routed)
        self.dispatch()
        self._check_waiting()

    def came_back(self) -> None:
        """Give requests to an instance that was lost or stranded. It has none."""
        self._set_open()
        self.dispatch()

    def set_role(self, name: str, role: InstanceRole) -> None:
        """Change what an instance is given. It continues what it has. Raises ConfigError: If no
        instance has that name."""
        found = [each for each in self.clients if each.name == name]
        if not found:
            names = ", ".join(each.name for each in self.clients)
            raise ConfigError(f"there is no instance {name!r}: they are {names}")
        self.counts.num_role_changes += found[0].role is not role
        found[0].set_role(role)
        self.came_back()
        self._check_waiting()

    def dispatch(self) -> None:
        """Give what waits to instances that have come, or changed their roles."""
        self._do(self.dispatcher.look())

    def _advance(self, routed: RoutedRequest, run: InstanceRun, delta: Delta) -> None:
        if delta.error is not None:
            self._failed(routed, run, delta.error)
            return
        if delta.fetch_failed and routed.borrowed and not routed.sources:
            self._prefixes.forget(routed.borrowed[0].reading)
        if delta.has_fetched and routed.sources:
            self._release(routed)
        if not routed.num_left:
            if self.observe is not None:
                self.observe(routed)
            self._note_kept(routed)
            self._end(routed)
        elif routed.stage is RequestStage.PREFILL and any(x.is_held for x in delta.sources):
            if not all(said.token_ids for said in routed.said):
                raise ProtocolError("offers a prompt before its first tokens are drawn")
            routed.sources = delta.sources
            self._note_kept(routed)
            routed.stage = RequestStage.OFFERED
            self._do(self.dispatcher.prefilled(routed.job, run.instance))

    def _failed(self, routed: RoutedRequest, run: InstanceRun, error: FastDecodeError) -> None:
        """Continue a request whose run has ended with an error. Others may be able to run it: its
        instance may be about to break down."""
        client, is_prompt = self.clients[run.instance], run is routed.offering
        is_too_long = isinstance(error, CapacityError)
        if client.broken is not None:
            self.lost(client)
        elif is_prompt and routed.decoding is not None:  # which runs it again where it has to
            self._release(routed)
        elif is_prompt and (is_too_long or error.code == HANDED_OVER_LOST):
            self._continue(routed, fits_prefill=not is_too_long)
        else:
            logger.warning("instance %s has failed a request: %s", client.name, error)
            routed.failure = routed.failure or error
            not_at = routed.job.not_at | {run.instance}
            self._continue(routed, replace(routed.job, not_at=not_at))

    def _continue(
        self, routed: RoutedRequest, job: DispatchJob | None = None, *, fits_prefill: bool = True
    ) -> None:
        """Continue a request of which only the tokens are left, as ``job``."""
        self.counts.num_moved += 1
        self._leave(routed)
        routed.sources, routed.job = (), job or routed.job
        for said in routed.said:
            said.kept_at = ()
        try:
            self.dispatcher.check_possible(routed.job)
        except CapacityError as error:
            self._fail(routed, routed.failure or error)
            return
        if routed.has_said or not fits_prefill:
            self._wait(routed, is_first=True)
        else:
            routed.stage = RequestStage.QUEUED
            self._do(self.dispatcher.returned(routed.job))

    def _check_waiting(self) -> None:
        """Fail requests that no instance decodes yet, and that no longer fit on any."""
        for routed in list(self.by_request.values()):
            if routed.stage is not RequestStage.DECODE:
                try:
                    self.dispatcher.check_possible(routed.job)
                except CapacityError as error:
                    self._fail(routed, routed.failure or error)

    def _fail(self, routed: RoutedRequest, error: FastDecodeError) -> None:
        self._end(routed)
        if routed.listener is not None:
            routed.listener.tell(Delta(routed.request.request_id, 0, error=without_frames(error)))

    # Requests, to instances and back.

    def _set_open(self) -> None:
        """Tell the dispatcher what each instance can be given."""
        for client, queue, room in zip(
            self.clients, self.dispatcher.prefill, self.dispatcher.decode, strict=True
        ):
            room.capacity_tokens, room.max_sequences = client.num_tokens, client.max_sequences
            room.is_there = client.broken is None and client.stranded is None
            room.may_return = client.broken is None and client.stranded is not None
            queue.is_open = room.is_there and client.role.prefills
            room.is_open = room.is_there and client.role.decodes
            queue.own_room = room if client.role is InstanceRole.BOTH else None

    def _wait(self, routed: RoutedRequest, *, is_first: bool) -> None:
        """Queue a request for an instance that does all of it that is left."""
        routed.stage = RequestStage.WAITING
        self._do(self.dispatcher.resumed(routed.job, is_first=is_first))

    def _do(self, decisions: Iterable[AssignPrefill | AssignDecode]) -> None:
        """Carry out decisions in turn. An instance that takes nothing makes others be taken back,
        and more be decided."""
        self._decided.extend(decisions)
        if self._is_at_work:
            return
        self._is_at_work = True
        try:
            while self._decided:
                self._carry_out(self._decided.popleft())
        finally:
            self._is_at_work = False

    def _carry_out(self, decision: AssignPrefill | AssignDecode) -> None:
        """Submit a request to the instance that was decided on."""
        routed, client = self.by_job[decision.job.job_id], self.clients[decision.instance]
        if isinstance(decision, AssignPrefill) and client.role is InstanceRole.BOTH:
            kept = self.dispatcher.kept(decision)
            if kept is not None:  # it is in no batch of prompts there, so others may be bound
                self._decided.extend(self.dispatcher.look())
                decision = kept
        every_step = self.observe is not None
        every_step |= routed.listener is not None and routed.listener.every_step
        name = f"{routed.job.job_id}.{next(self._numbers)}"  # that no run had before
        routed.borrowed = self._kept_elsewhere(routed, decision.instance)
        if isinstance(decision, AssignPrefill):
            run = InstanceRun(routed.prompt_run(name), decision.instance)
            routed.stage, routed.offering, every_step = RequestStage.PREFILL, run, True
        else:
            run = InstanceRun(routed.whole_run(name), decision.instance)
            routed.stage, routed.decoding = RequestStage.DECODE, run
        self.by_run[name] = routed, run
        try:
            client.submit(run.asked, every_step=every_step)
        except FastDecodeError as error:
            self._failed(routed, run, error)

    def _end(self, routed: RoutedRequest) -> None:
        """Forget a request that is over, or no longer wanted."""
        self._leave(routed)
        del self.by_request[routed.request.request_id], self.by_job[routed.job.job_id]

    def _leave(self, routed: RoutedRequest) -> None:
        """Take a request from all instances, and from the dispatcher."""
        stage, routed.stage = routed.stage, RequestStage.OVER
        offering, decoding = routed.offering, routed.decoding
        decided = next((one for one in self._decided if one.job is routed.job), None)
        if decided is not None:
            self._decided.remove(decided)
        self._release(routed)
        if decided is not None:
            is_prompt = isinstance(decided, AssignPrefill)
            give_back = self.dispatcher.left if is_prompt else self.dispatcher.decoded
            self._do(give_back(routed.job, decided.instance))
        elif decoding is not None:
            self._cancel_run(decoding)
            routed.decoding = None
            self._do(self.dispatcher.decoded(routed.job, decoding.instance))
        elif stage is RequestStage.PREFILL and offering is not None:
            self._do(self.dispatcher.left(routed.job, offering.instance))
        else:
            self._do(self.dispatcher.withdrawn(routed.job))

    def _release(self, routed: RoutedRequest) -> None:
        """Let go of what is offered of a request."""
        offering, routed.offering = routed.offering, None
        if offering is not None:
            self._cancel_run(offering)

    def _cancel_run(self, run: InstanceRun) -> None:
        name = run.asked.request_id
        self.by_run.pop(name, None)
        self.clients[run.instance].cancel(name)

    # Prefixes that other instances keep.

    def _kept_elsewhere(self, routed: RoutedRequest, instance: int) -> tuple[KVSource, ...]:
        """Return where another instance may keep first tokens of a prompt: many more than this one
        does, or none."""
        request, rooms = routed.request, self.dispatcher.decode
        others = [i for i, room in enumerate(rooms) if room.is_there and i != instance]
        needs_all = routed.sources or request.params.prompt_logprobs is not None
        if needs_all or request.cache.is_off or not others:
            return ()
        kept = self._prefixes.kept(self._prompt_blocks(routed))
        least = num_offered(kept.get(instance, ())) + _LEAST_BORROWED * self._block_size
        found = max((kept.get(i, ()) for i in others), key=num_offered)
        return found if num_offered(found) >= least else ()

    def _prompt_blocks(self, routed: RoutedRequest) -> BlockChain:
        """Return those of its prompt, hashed once."""
        request = routed.request
        if routed.prompt_blocks is None:
            prompt, salt = request.prompt_token_ids, request.cache.salt
            routed.prompt_blocks = BlockChain.of(prompt, salt, self._block_size)
        return routed.prompt_blocks

    def _note_kept(self, routed: RoutedRequest) -> None:
        """Note that the instance that has a request keeps its tokens."""
        run = routed.decoding or routed.offering
        if run is None or routed.request.cache.is_off:
            return
        prompt = self._prompt_blocks(routed)
        for said in routed.said:
            self._prefixes.note(prompt.then(said.token_ids), run.instance, said.kept_at)
            said.kept_at = ()
