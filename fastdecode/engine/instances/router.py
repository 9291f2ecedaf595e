"""Routes requests: which instance each is at, and how it gets to the next. Carries out
the dispatcher's decisions."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.delta import Delta, Listener
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.holders import KVSource, num_offered
from fastdecode.core.sequence import Request
from fastdecode.engine.instances.claims import Claims
from fastdecode.engine.instances.engine_client import EngineClient
from fastdecode.engine.instances.routed_request import InstanceRun, RequestStage, RoutedRequest
from fastdecode.schedule.dispatch import (
    AssignDecode,
    AssignPrefill,
    DecodeReservations,
    Dispatcher,
    DispatchJob,
    PrefillQueue,
)
from fastdecode.schedule.kept_prefixes import BlockChain, KeptPrefixes

_LEAST_BORROWED: Final = 4
"""Blocks: to run fewer again takes no longer than to fetch them."""

Failed = Callable[[RoutedRequest, Delta], None]
"""A run of a request has ended with an error."""


class RoutedRequests:
    """All requests that aren't over.

    Args:
        block_size: in which room is counted.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._numbers = itertools.count()
        self.by_request: dict[str, RoutedRequest] = {}
        self.by_job: dict[int, RoutedRequest] = {}
        self.by_run: dict[str, RoutedRequest] = {}

    def make(self, request: Request, listener: Listener | None) -> RoutedRequest:
        """Of a request that isn't queued yet. All of its sequences are reserved
        whole."""
        if request.cache.is_off:  # its blocks get names when it is handed over, which no other has
            request = replace(request, cache=replace(request.cache, salt=secrets.token_hex(16)))
        prompt, size = len(request.prompt_token_ids), self.block_size
        blocks = -(-(prompt + request.max_tokens - 1) // size)
        reserved = request.params.n * blocks * size
        return RoutedRequest(request, listener, DispatchJob(next(self._numbers), prompt, reserved))

    def add(self, routed: RoutedRequest) -> None:
        """It is queued."""
        self.by_request[routed.request.request_id] = self.by_job[routed.job.job_id] = routed

    def remove(self, routed: RoutedRequest) -> None:
        """It is over."""
        del self.by_request[routed.request.request_id], self.by_job[routed.job.job_id]

    def begin(self, routed: RoutedRequest, instance: int) -> InstanceRun:
        """An instance is given it, by a name that no run had before."""
        run = InstanceRun(f"{routed.job.job_id}.{next(self._numbers)}", instance)
        self.by_run[run.name] = routed
        return run

    def end(self, run: InstanceRun) -> None:
        """What that run says counts no more."""
        self.by_run.pop(run.name, None)

    def untouched(self, among: Container[str] | None) -> list[str]:
        """Ids of requests, ``among`` these or all, that no instance has, and of
        which nothing was said."""
        return [
            request_id
            for request_id, routed in self.by_request.items()
            if routed.stage in (RequestStage.QUEUED, RequestStage.WAITING)
            and not routed.has_said
            and (among is None or request_id in among)
        ]

    @property
    def stages(self) -> Mapping[str, RequestStage]:
        """Where each request is."""
        return {request_id: routed.stage for request_id, routed in self.by_request.items()}


class InstanceRegistry:
    """The instances that there are: what each is given, and who can be given anything.

    Args:
        instances: all.
        roles: of each.
        dispatcher: keeps which of them is open for what.
    """

    def __init__(
        self,
        instances: Sequence[EngineClient],
        roles: Sequence[InstanceRole],
        dispatcher: Dispatcher,
    ) -> None:
        self.all = tuple(instances)
        self.roles = list(roles)
        self._is_there = [True for _ in instances]
        self._dispatcher = dispatcher
        self._set_open()

    @property
    def are_all_lost(self) -> bool:
        """Whether no instance is left."""
        return all(each.broken is not None for each in self.all)

    def come_and_go(self, instance: EngineClient, *, is_there: bool) -> None:
        """One is lost, or is there again."""
        self._is_there[self.all.index(instance)] = is_there
        self._set_open()

    def set_role(self, name: str, role: InstanceRole) -> bool:
        """What an instance is given from now on. False: there is none of that name."""
        found = [i for i, each in enumerate(self.all) if each.name == name]
        for index in found:
            self.roles[index] = role
            self.all[index].give_role(role)
        self._set_open()
        return bool(found)

    def _set_open(self) -> None:
        """Which instance is given what."""
        every = zip(self.all, self.roles, self._is_there, strict=True)
        for index, (instance, role, is_there) in enumerate(every):
            queue, room = self._dispatcher.prefill[index], self._dispatcher.decode[index]
            room.capacity_tokens, room.max_sequences = instance.num_tokens, instance.max_sequences
            is_stranded = instance.broken is None and instance.stranded is not None
            room.is_there = is_there and instance.broken is None and not is_stranded
            room.may_return = is_stranded
            queue.is_open = room.is_there and role.prefills
            room.is_open = room.is_there and role.decodes
            queue.own_room = room if role is InstanceRole.BOTH else None


class Router:
    """Gives requests to instances, and takes them back.

    Args:
        routed_requests: all unfinished requests.
        instances: all that there are.
        roles: of each.
        batch_tokens: of prompts that one runs at once.
        failed: is told of instances that take nothing.
    """

    def __init__(
        self,
        routed_requests: RoutedRequests,
        instances: Sequence[EngineClient],
        roles: Sequence[InstanceRole],
        batch_tokens: int,
        failed: Failed,
    ) -> None:
        self._routed_requests = routed_requests
        self.dispatcher = Dispatcher(
            [PrefillQueue(batch_tokens, float) for _ in instances],
            [DecodeReservations(each.num_tokens, each.max_sequences) for each in instances],
        )
        self.registry = InstanceRegistry(instances, roles, self.dispatcher)
        self.instances, self.roles = self.registry.all, self.registry.roles
        self._failed = failed
        self._block_size = routed_requests.block_size
        self._prefixes = KeptPrefixes()
        self._decided: deque[AssignPrefill | AssignDecode] = deque()
        """What is to be carried out, its room booked already."""
        self._is_at_work = False

    def where(self, run: InstanceRun) -> EngineClient:
        """Who has a run."""
        return self.instances[run.instance]

    def arrive(self, routed: RoutedRequest) -> None:
        """A request waits for an instance that runs its prompt."""
        routed.stage = RequestStage.QUEUED
        self.do(self.dispatcher.arrived(routed.job))

    def begin_anew(self, routed: RoutedRequest) -> None:
        """A request whose prompt is to be run again."""
        routed.stage = RequestStage.QUEUED
        self.do(self.dispatcher.returned(routed.job))

    def wait(self, routed: RoutedRequest, *, is_first: bool) -> None:
        """A request waits for an instance that does all of it that is left."""
        routed.stage = RequestStage.WAITING
        self.do(self.dispatcher.resumed(routed.job, is_first=is_first))

    def offer(self, routed: RoutedRequest) -> None:
        """Its prompt is done, and waits to be fetched."""
        assert routed.offering is not None
        routed.stage = RequestStage.OFFERED
        self.do(self.dispatcher.prefilled(routed.job, routed.offering.instance))

    def do(self, decisions: Iterable[AssignPrefill | AssignDecode]) -> None:
        """Carry out what was decided, one after the other: an instance that
        takes nothing makes others be taken back, and more be decided."""
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
        routed = self._routed_requests.by_job[decision.job.job_id]
        if (
            isinstance(decision, AssignPrefill)
            and self.roles[decision.instance] is InstanceRole.BOTH
        ):
            decision = self._kept(decision)
        self._begin(routed, decision)

    def _begin(self, routed: RoutedRequest, decision: AssignPrefill | AssignDecode) -> None:
        """Submit a request to the instance that was decided on."""
        run = self._routed_requests.begin(routed, decision.instance)
        routed.borrowed = self._kept_elsewhere(routed, decision.instance)
        every_step = isinstance(decision, AssignPrefill) or routed.is_watched
        if isinstance(decision, AssignPrefill):
            routed.stage, routed.offering = RequestStage.PREFILL, run
            asked = routed.prompt_run(run.name)
        else:
            routed.stage, routed.decoding = RequestStage.DECODE, run
            asked = routed.whole_run(run.name)
        run.claims = Claims(asked)
        try:
            self.where(run).submit(asked, every_step=every_step)
        except FastDecodeError as error:
            self._failed(routed, Delta(run.name, 0, error=error))

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
        """Of its prompt, hashed once."""
        request = routed.request
        if routed.prompt_blocks is None:
            prompt, salt = request.prompt_token_ids, request.cache.salt
            routed.prompt_blocks = BlockChain.of(prompt, salt, self._block_size)
        return routed.prompt_blocks

    def note_kept(self, routed: RoutedRequest) -> None:
        """The instance that has a request keeps its tokens from now on."""
        run = routed.decoding or routed.offering
        if run is None or routed.request.cache.is_off:
            return
        prompt = self._prompt_blocks(routed)
        for said in routed.said:
            self._prefixes.note(prompt.then(said.token_ids), run.instance, said.kept_at)
            said.kept_at = ()

    def _kept(self, bound: AssignPrefill) -> AssignPrefill | AssignDecode:
        """Whether the instance goes on with the prompt itself. It waits for no
        batch of prompts there then, and so others may be bound."""
        fetch = self.dispatcher.kept(bound)
        if fetch is None:
            return bound
        self._decided.extend(self.dispatcher.look())
        return fetch

    def end(self, routed: RoutedRequest) -> None:
        """A request is over, or nobody wants it."""
        self.leave(routed)
        self._routed_requests.remove(routed)

    def leave(self, routed: RoutedRequest) -> None:
        """No instance has a request any more, and none is to have it."""
        stage, routed.stage = routed.stage, RequestStage.OVER
        offering, decoding = routed.offering, routed.decoding
        decided = next((one for one in self._decided if one.job is routed.job), None)
        if decided is not None:
            self._decided.remove(decided)
        self.release(routed)
        if decided is not None:
            give_back = (
                self.dispatcher.left
                if isinstance(decided, AssignPrefill)
                else self.dispatcher.decoded
            )
            self.do(give_back(routed.job, decided.instance))
        elif decoding is not None:
            self._routed_requests.end(decoding)
            routed.decoding = None
            self.where(decoding).cancel(decoding.name)
            self.do(self.dispatcher.decoded(routed.job, decoding.instance))
        elif stage is RequestStage.PREFILL and offering is not None:
            self.do(self.dispatcher.left(routed.job, offering.instance))
        else:
            self.do(self.dispatcher.withdrawn(routed.job))

    def release(self, routed: RoutedRequest) -> None:
        """What is offered of a request isn't needed any more."""
        offering, routed.offering = routed.offering, None
        if offering is not None:
            self._routed_requests.end(offering)
            self.where(offering).cancel(offering.name)

    def lose(self, lost: EngineClient) -> list[RoutedRequest]:
        """An instance is broken or stranded: nothing more is given to it. Returns
        the requests that it had, and that are to go on elsewhere."""
        self.registry.come_and_go(lost, is_there=False)
        had = []
        for routed in list(self._routed_requests.by_request.values()):
            # What is being fetched from it is another's, who looks after that himself.
            run = routed.decoding or routed.offering
            if run is not None and self.where(run) is lost:
                had.append(routed)
        return had

    def set_role(self, name: str, role: InstanceRole) -> bool:
        """What an instance is given from now on; what it has it goes on with.
        False: there is none of that name."""
        is_known = self.registry.set_role(name, role)
        self.look()
        return is_known

    def look(self) -> None:
        """Instances have come, gone, or changed their roles."""
        self.do(self.dispatcher.look())
