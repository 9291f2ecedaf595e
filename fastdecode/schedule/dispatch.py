"""Which instance prefills a request, and which decodes it. Pure: the controller
of instances and the simulator of plans drive the same object.

First come, first served. A request is bound to a prefill instance as late as
possible: to the one with the shortest predicted queue, and only while that
holds less than two batches. When its prompt is done, it is fetched by the
decode instance with the least reserved and promised KV, by our own accounts: an
instance's word comes too late when many requests come at once. Where none has
room, the oldest waits, and nobody overtakes it. Of several that do both, and
whose queues are equally short, the one with the least reserved KV gets it.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fastdecode.core.errors import CapacityError

QUEUED_BATCHES = 2


@dataclass(frozen=True)
class DispatchJob:
    """A request, as far as dispatch is concerned."""

    job_id: int
    prompt_tokens: int
    reserved_tokens: int
    """Prompt and all that it may generate: what its KV takes while it decodes."""
    not_at: frozenset[int] = frozenset()
    """Instances that have failed it, and aren't given it again."""


@dataclass(frozen=True)
class AssignPrefill:
    """Prefill the job there."""

    job: DispatchJob
    instance: int


@dataclass(frozen=True)
class AssignDecode:
    """Decode the job there: room is reserved, its KV may come."""

    job: DispatchJob
    instance: int


@dataclass
class PrefillQueue:
    """What is bound to a prefill instance, and not done."""

    batch_tokens: int
    """Prompt tokens that a batch may have; a longer prompt is one by itself."""
    seconds: Callable[[int], float]
    """Predicted, of so many prompt tokens."""
    num_tokens: int = 0
    is_open: bool = True
    """It is there, and its role is to prefill."""
    own_room: DecodeReservations | None = None
    """Where it goes on with what it has prefilled; None: others do."""

    @property
    def has_room(self) -> bool:
        return self.is_open and self.num_tokens < QUEUED_BATCHES * self.batch_tokens

    @property
    def queued_s(self) -> float:
        """Predicted, of all that is bound to it."""
        return self.seconds(self.num_tokens)

    @property
    def burden(self) -> tuple[float, float]:
        """Whoever has the least gets the next prompt. What it keeps isn't bound to
        it any more, but takes its room."""
        return self.queued_s, 0.0 if self.own_room is None else self.own_room.fullness


@dataclass
class DecodeReservations:
    """What is reserved at a decode instance."""

    capacity_tokens: int
    max_sequences: int
    num_tokens: int = 0
    num_sequences: int = 0
    is_open: bool = True
    """It is there, and its role is to decode."""
    is_there: bool = True
    """It can run requests, whatever its role."""
    may_return: bool = False
    """It can't run any now, and is expected to be able to again."""

    @property
    def fullness(self) -> float:
        """Which share of its room is reserved."""
        return self.num_tokens / self.capacity_tokens

    def fits(self, job: DispatchJob) -> bool:
        fits = self.num_tokens + job.reserved_tokens <= self.capacity_tokens
        return fits and self.num_sequences < self.max_sequences


class JobQueue:
    """Jobs in order. Every operation takes the same time, however many wait."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[int, DispatchJob] = OrderedDict()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[DispatchJob]:
        return iter(self._jobs.values())

    @property
    def head(self) -> DispatchJob:
        return next(iter(self._jobs.values()))

    def append(self, job: DispatchJob) -> None:
        self._jobs[job.job_id] = job

    def append_first(self, job: DispatchJob) -> None:
        self.append(job)
        self._jobs.move_to_end(job.job_id, last=False)

    def pop_first(self) -> DispatchJob:
        return self._jobs.popitem(last=False)[1]

    def discard(self, job: DispatchJob) -> None:
        """Take a job out, if it is in the queue."""
        self._jobs.pop(job.job_id, None)


@dataclass
class Dispatcher:
    """Events in, decisions out. Instances are known by their place in the lists."""

    prefill: list[PrefillQueue]
    decode: list[DecodeReservations]
    _arrived: JobQueue = field(default_factory=JobQueue)
    _offered: JobQueue = field(default_factory=JobQueue)

    def arrived(self, job: DispatchJob) -> Iterator[AssignPrefill | AssignDecode]:
        """A request has come.

        Raises:
            CapacityError: no instance that may decode it could ever hold it.
        """
        self.check_possible(job)
        self._arrived.append(job)
        return itertools.chain(self._bind(), self._fetch())

    def check_possible(self, job: DispatchJob) -> None:
        """Raises CapacityError: no instance that may decode it could ever hold it.
        Instances that are expected back count."""
        away = [i for i, room in enumerate(self.decode) if room.may_return and i not in job.not_at]
        capacities = [self.decode[i].capacity_tokens for i in (*self._decoders(job), *away)]
        if job.reserved_tokens > max(capacities, default=0):
            raise CapacityError(
                f"a request of {job.reserved_tokens} tokens fits on no decode instance; the "
                f"largest holds {max(capacities, default=0)}"
            )

    def returned(self, job: DispatchJob) -> Iterator[AssignPrefill | AssignDecode]:
        """What has been run of its prompt is lost, and nothing was drawn: it
        begins anew, before all that wait."""
        self._arrived.append_first(job)
        yield from self._bind()
        yield from self._fetch()

    def resumed(self, job: DispatchJob, *, is_first: bool) -> Iterator[AssignDecode]:
        """It is to be decoded by who runs its prompt, too; ``is_first``: before
        all that wait."""
        if is_first:
            self._offered.append_first(job)
        else:
            self._offered.append(job)
        yield from self._fetch()

    def withdrawn(self, job: DispatchJob) -> Iterator[AssignPrefill | AssignDecode]:
        """It waits, and nobody wants it any more."""
        self._arrived.discard(job)
        self._offered.discard(job)
        yield from self._bind()
        yield from self._fetch()

    def look(self) -> Iterator[AssignPrefill | AssignDecode]:
        """Instances have come, gone, or changed their roles."""
        yield from self._bind()
        yield from self._fetch()

    def prefilled(self, job: DispatchJob, instance: int) -> Iterator[AssignPrefill | AssignDecode]:
        """Its prompt is done, and its first token drawn; it is to be decoded."""
        yield from self.left(job, instance)
        self._offered.append(job)
        yield from self._fetch()

    def left(self, job: DispatchJob, instance: int) -> Iterator[AssignPrefill | AssignDecode]:
        """Its prompt is done, or nobody wants it any more: there is nothing to decode."""
        queue = self.prefill[instance]
        queue.num_tokens -= job.prompt_tokens
        assert queue.num_tokens >= 0
        yield from self._bind()
        yield from self._fetch()

    def kept(self, bound: AssignPrefill) -> AssignDecode | None:
        """A prompt is bound to an instance that may go on with it itself: whether
        it does, since it has room, and nobody waits for that. It is to be
        prefilled and decoded there then."""
        job, room = bound.job, self.decode[bound.instance]
        if self._offered or not room.fits(job):
            return None
        self.prefill[bound.instance].num_tokens -= job.prompt_tokens
        room.num_tokens += job.reserved_tokens
        room.num_sequences += 1
        return AssignDecode(job, bound.instance)

    def decoded(self, job: DispatchJob, instance: int) -> Iterator[AssignDecode]:
        """It is over, and its room is free."""
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
        """Instances that may decode a job: those whose role is to decode, or any
        if none of them is left for it."""
        able = [i for i, room in enumerate(self.decode) if room.is_there and i not in job.not_at]
        return [i for i in able if self.decode[i].is_open] or able

    def _bind(self) -> Iterator[AssignPrefill]:
        while self._arrived:
            job = self._arrived.head
            open_for_it = [
                i for i, queue in enumerate(self.prefill) if queue.is_open and i not in job.not_at
            ]
            if not open_for_it:
                if not self._decoders(job):
                    return  # no instance can run it now
                self._offered.append(self._arrived.pop_first())  # a decoder runs its prompt, too
                continue
            queues = [i for i in open_for_it if self.prefill[i].has_room]
            if not queues:
                return
            best = min(queues, key=lambda i: self.prefill[i].burden)
            self._arrived.pop_first()
            self.prefill[best].num_tokens += job.prompt_tokens
            yield AssignPrefill(job, best)

    def _fetch(self) -> Iterator[AssignDecode]:
        expecting: list[DispatchJob] = []  # no instance that is there could take them
        while self._offered:
            job = self._offered.head
            decoders = self._decoders(job)
            if not any(self.decode[i].capacity_tokens >= job.reserved_tokens for i in decoders):
                expecting.append(self._offered.pop_first())
                continue
            rooms = [i for i in decoders if self.decode[i].fits(job)]
            if not rooms:
                break
            best = min(rooms, key=lambda i: self.decode[i].fullness)
            self._offered.pop_first()
            self.decode[best].num_tokens += job.reserved_tokens
            self.decode[best].num_sequences += 1
            yield AssignDecode(job, best)
        for job in reversed(expecting):
            self._offered.append_first(job)
