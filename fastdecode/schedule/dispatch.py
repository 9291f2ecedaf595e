"""Dispatch of requests to prefill and decode instances. The controller and the simulator of plans
drive the same object.

Requests start in order of arrival. A request is bound to the prefill instance with the shortest
predicted queue, and only while that holds less than two batches. Its finished prompt goes to the
decode instance with the least reserved and promised KV, by our own counts: instance reports are too
late when many requests arrive at once. Without room the oldest prompt waits, and none overtakes it.
Among instances with both roles and equal queues, the one with the least reserved KV wins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from fastdecode.core.errors import CapacityError

QUEUED_BATCHES = 2


@dataclass(frozen=True)
class DispatchJob:
    """What dispatch knows of a request."""

    job_id: int
    prompt_tokens: int
    reserved_tokens: int
    """Tokens of its prompt, and all that it may generate."""
    not_at: frozenset[int] = frozenset()
    """Instances that have failed it, and do not get it again."""


JobQueue: TypeAlias = OrderedDict[int, DispatchJob]
"""Jobs in order, by number."""


@dataclass(frozen=True)
class AssignPrefill:
    job: DispatchJob
    instance: int


@dataclass(frozen=True)
class AssignDecode:
    """Room is reserved, so the job's KV may come."""

    job: DispatchJob
    instance: int


@dataclass
class PrefillQueue:
    """Prompts that are bound to a prefill instance, and not done."""

    batch_tokens: int
    """Most prompt tokens of a batch. A longer prompt is one by itself."""
    seconds: Callable[[int], float]
    """Predicts the seconds of a number of prompt tokens."""
    num_tokens: int = 0
    is_open: bool = True
    """True if it can run requests, and its role is to prefill."""
    own_room: DecodeReservations | None = None
    """Room in which it decodes what it has prefilled. None if others decode it."""

    @property
    def has_room(self) -> bool:
        return self.is_open and self.num_tokens < QUEUED_BATCHES * self.batch_tokens

    @property
    def burden(self) -> tuple[float, float]:
        """The instance with the least gets the next prompt: predicted seconds of its queue, then
        the room that prompts take which it decodes itself."""
        fullness = 0.0 if self.own_room is None else self.own_room.fullness
        return self.seconds(self.num_tokens), fullness


@dataclass
class DecodeReservations:
    """Room that is reserved at a decode instance."""

    capacity_tokens: int
    max_sequences: int
    num_tokens: int = 0
    num_sequences: int = 0
    is_open: bool = True
    """True if its role is to decode."""
    is_there: bool = True
    """True if it can run requests, whatever its role."""
    may_return: bool = False
    """True if it cannot run any now, and is expected to return."""

    @property
    def fullness(self) -> float:
        """Return the share of its room that is reserved."""
        return self.num_tokens / self.capacity_tokens

    def fits(self, job: DispatchJob) -> bool:
        fits = self.num_tokens + job.reserved_tokens <= self.capacity_tokens
        return fits and self.num_sequences < self.max_sequences


@dataclass
class Dispatcher:
    """Events in, decisions out. Instances are known by their places in the lists."""

    prefill: list[PrefillQueue]
    decode: list[DecodeReservations]
    _arrived: JobQueue = field(default_factory=OrderedDict)
    _offered: JobQueue = field(default_factory=OrderedDict)

    def arrived(self, job: DispatchJob) -> Iterator[AssignPrefill | AssignDecode]:
        """Queue a request.

        Raises:
            CapacityError: If no instance that may decode it could ever hold it.
        """
        self.check_possible(job)
        self._arrived[job.job_id] = job
        return self.look()

    def check_possible(self, job: DispatchJob) -> None:
        """Raise CapacityError if no instance that may decode a job could ever hold it. Instances
        that are expected back count."""
        away = [i for i, room in enumerate(self.decode) if room.may_return and i not in job.not_at]
        capacities = [self.decode[i].capacity_tokens for i in (*self._decoders(job), *away)]
        if job.reserved_tokens > max(capacities, default=0):
            raise CapacityError(
                f"a request of {job.reserved_tokens} tokens fits on no decode instance; the "
                f"largest holds {max(capacities, default=0)}"
            )

    def returned(self, job: DispatchJob) -> Iterator[AssignPrefill | AssignDecode]:
        """Queue a job first again whose prompt's tokens are lost, before anything was drawn."""
        _put_first(self._arrived, job)
        yield from self.look()

    def resumed(self, job: DispatchJob, *, is_first: bool) -> Iterator[AssignDecode]:
        """Queue a job whose decode instance runs its prompt, too. ``is_first``: before all that
        wait."""
        if is_first:
            _put_first(self._offered, job)
        else:
            self._offered[job.job_id] = job
        yield from self._fetch()

    def withdrawn(self, job: DispatchJob) -> Iterator[AssignPrefill | AssignDecode]:
        """Remove a waiting job."""
        self._arrived.pop(job.job_id, None)
        self._offered.pop(job.job_id, None)
        yield from self.look()

    def look(self) -> Iterator[AssignPrefill | AssignDecode]:
        """Assign what waits: jobs or instances have changed."""
        yield from self._bind()
        yield from self._fetch()

    def prefilled(self, job: DispatchJob, instance: int) -> Iterator[AssignPrefill | AssignDecode]:
        """Queue a job for decoding whose prompt is done, and whose first token is drawn."""
        yield from self.left(job, instance)
        self._offered[job.job_id] = job
        yield from self._fetch()

    def left(self, job: DispatchJob, instance: int) -> Iterator[AssignPrefill | AssignDecode]:
        """Remove a job from its prefill instance: there is nothing to decode."""
        queue = self.prefill[instance]
        queue.num_tokens -= job.prompt_tokens
        assert queue.num_tokens >= 0
        yield from self.look()

    def kept(self, bound: AssignPrefill) -> AssignDecode | None:
        """Let a prefill instance decode a prompt that is bound to it, if it may, has room, and no
        other job waits for that. Return where the job is then prefilled and decoded."""
        job, room = bound.job, self.decode[bound.instance]
        if self._offered or not room.fits(job):
            return None
        self.prefill[bound.instance].num_tokens -= job.prompt_tokens
        return self._assigned(job, bound.instance)

    def decoded(self, job: DispatchJob, instance: int) -> Iterator[AssignDecode]:
        """Free the room of a job that is over."""
        room = self.decode[instance]
        room.num_tokens -= job.reserved_tokens
        room.num_sequences -= 1
        assert room.num_tokens >= 0 and room.num_sequences >= 0
        yield from self._fetch()

    @property
    def num_waiting(self) -> int:
        """Requests that no prefill instance has."""
        return len(self._arrived)

    @property
    def num_offered(self) -> int:
        """Prompts that wait for a decode instance."""
        return len(self._offered)

    def _decoders(self, job: DispatchJob) -> list[int]:
        """Return the instances that may decode a job: those whose role is to decode, or any if none
        of them is left for it."""
        able = [i for i, room in enumerate(self.decode) if room.is_there and i not in job.not_at]
        return [i for i in able if self.decode[i].is_open] or able

    def _assigned(self, job: DispatchJob, instance: int) -> AssignDecode:
        self.decode[instance].num_tokens += job.reserved_tokens
        self.decode[instance].num_sequences += 1
        return AssignDecode(job, instance)

    def _bind(self) -> Iterator[AssignPrefill]:
        while self._arrived:
            job = next(iter(self._arrived.values()))
            open_for_it = [
                i for i, queue in enumerate(self.prefill) if queue.is_open and i not in job.not_at
            ]
            if not open_for_it:
                if not self._decoders(job):
                    return  # no instance can run it now
                del self._arrived[job.job_id]
                self._offered[job.job_id] = job  # a decoder runs its prompt, too
                continue
            queues = [i for i in open_for_it if self.prefill[i].has_room]
            if not queues:
                return
            best = min(queues, key=lambda i: self.prefill[i].burden)
            del self._arrived[job.job_id]
            self.prefill[best].num_tokens += job.prompt_tokens
            yield AssignPrefill(job, best)

    def _fetch(self) -> Iterator[AssignDecode]:
        expecting: list[DispatchJob] = []  # no instance that is there could take them
        while self._offered:
            job = next(iter(self._offered.values()))
            decoders = self._decoders(job)
            if not any(self.decode[i].capacity_tokens >= job.reserved_tokens for i in decoders):
                expecting.append(self._offered.pop(job.job_id))
                continue
            rooms = [i for i in decoders if self.decode[i].fits(job)]
            if not rooms:
                break
            del self._offered[job.job_id]
            yield self._assigned(job, min(rooms, key=lambda i: self.decode[i].fullness))
        for job in reversed(expecting):
            _put_first(self._offered, job)


def _put_first(queue: JobQueue, job: DispatchJob) -> None:
    queue[job.job_id] = job
    queue.move_to_end(job.job_id, last=False)
