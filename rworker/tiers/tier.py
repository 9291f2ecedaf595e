"""Lower tiers of a cache, and the jobs that move blocks between both.

A **job** is some blocks one way, in **units**: a block that is stored, or some layers of a block
that is fetched. Reads precede writes. What is fetched comes a **group** of layers at a time, all of
a job's first groups before any later ones, as layers are attended in that order. So the first
layers may be attended while later ones are still to come (``Tier.wait_for_layer``).

A disk compares every layer of a block with its checksum before it is put into the cache. Whatever
goes wrong is a block that is not stored, or missing: it is counted, and reported as failed. A
failed block is zeros in the cache: a step that attends it has started too early, computes nothing
that is not finite, and is reported before its result counts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.clock import Clock
from rworker.tiers.slots import SlotFile, page_buffer

logger = logging.getLogger(__name__)

UNIT_BYTES: Final = 1 << 20
"""Several layers are read at once where one has less."""
LEAST_UNIT_BYTES: Final = 1 << 17
"""But fewer, where a model would come in less than ``NUM_GROUPS`` groups."""
NUM_GROUPS: Final = 6
NUM_THREADS: Final = 3
STUCK_S: Final = 30.0
"""Longest time of a read or write. After a longer one the disk is no longer used."""
LATE_S: Final = 1.0
"""Longest time that steps wait for a job's layers. Then the job fails."""
MOST_FAILURES: Final = 8
"""Failed writes in a row after which nothing more is stored."""


@dataclass(eq=False)
class MoveJob:
    """Blocks to be moved."""

    number: int
    is_fetch: bool
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    """Blocks of the cache, one for each key."""
    num_tokens: tuple[int, ...] = ()
    """Tokens up to each block's end, as in ``Retain``. Empty for a fetch."""
    failed: set[int] = field(default_factory=set)
    """Places of blocks that could not be moved."""
    num_left: list[int] = field(default_factory=list)
    """Units to be done, of each group of layers, or of all."""
    asked_s: float = 0.0
    began_s: float = 0.0
    """When its first unit began."""
    seconds: float = 0.0
    """Time that it took since it was asked for. Until it is over, time from its beginning to its
    last complete group."""
    num_told: int = 0
    """Groups that were reported as complete."""
    waited_s: float = 0.0
    """Time that steps have waited for its layers."""

    @property
    def is_over(self) -> bool:
        return not any(self.num_left)

    @property
    def num_there(self) -> int:
        """Return the leading groups that are complete. Blocks that are stored have one."""
        return next((i for i, left in enumerate(self.num_left) if left), len(self.num_left))


class CacheMemory(Protocol):
    """A cache's blocks, whose bytes are moved. Any thread may call."""

    @property
    def num_layers(self) -> int: ...

    @property
    def layer_bytes(self) -> int:
        """Bytes of a block in one layer."""

    def read(self, block: int, into: NDArray[np.uint8]) -> None:
        """Read a whole block into [num_layers, layer_bytes]."""

    def write(self, layers: range, block: int, data: NDArray[np.uint8]) -> None:
        """Write some layers of a block from [len(layers), layer_bytes]."""

    def clear(self, block: int) -> None:
        """Fill a block with zeros."""


class ArrayMemory:
    """``CacheMemory`` of an R-worker's cache in its host's memory.

    Args:
        pool: uint8 [num_layers, num_blocks, block_bytes].
    """

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self._pool = pool
        self.num_layers, self.layer_bytes = len(pool), pool.shape[2]

    def read(self, block: int, into: NDArray[np.uint8]) -> None:
        into[:] = self._pool[:, block]

    def write(self, layers: range, block: int, data: NDArray[np.uint8]) -> None:
        self._pool[layers.start : layers.stop, block] = data

    def clear(self, block: int) -> None:
        self._pool[:, block] = 0


class Tier:
    """Where the cached blocks of one cache go. One thread calls. Where copies are over at once, no
    method waits."""

    num_layers: int
    """Layers of the cache."""
    stored_bytes: int
    """Bytes of a block, as it is stored."""

    def begin(self, job: MoveJob) -> None:
        """Move blocks. Nothing else writes them until the job is over."""
        raise NotImplementedError

    def progress(self, job: MoveJob) -> int:
        """Return the leading layers that all of a job's blocks have, or have failed in. Of blocks
        that are stored: 0 or all."""
        return self.num_layers

    def take_faults(self) -> tuple[int, int, int, int]:
        """Return the unread, damaged, unwritten and late blocks since the last call."""
        return 0, 0, 0, 0

    def wait(self, timeout_s: float | None) -> None:
        """Wait until some job has come further than was reported, or ``progress`` has to look."""

    def wait_for_layer(self, numbers: Collection[int], layer: int) -> None:
        """Wait until a layer of these jobs' blocks has arrived, or has failed."""

    def drop(self, keys: Iterable[bytes]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End all moves."""


@dataclass(frozen=True)
class Unit:
    """Work of a thread: a block of a job, or a group of its layers."""

    job: MoveJob
    index: int
    group: int


class DiskTier(Tier):
    """A file of slots, read and written by threads. One thread calls; only ``close`` and
    ``wait_for_layer`` wait for the disk.

    Args:
        slots: the file.
        memory: the cache's.
        num_threads: threads that read and write.
        clock: seconds.
        least_unit_bytes: least bytes to read at once, if the layers have them.
        late_s: see ``LATE_S``.
    """

    def __init__(
        self,
        slots: SlotFile,
        memory: CacheMemory,
        num_threads: int = NUM_THREADS,
        clock: Clock = time.monotonic,
        least_unit_bytes: int = LEAST_UNIT_BYTES,
        late_s: float = LATE_S,
    ) -> None:
        self.slots: Final = slots
        self.num_layers, self.stored_bytes = slots.shape.num_layers, slots.shape.slot_bytes
        self.counts: Final = Counter[str]()
        """Blocks by kind of fault: unread, damaged, unwritten, or late for a step."""
        self.is_broken = False
        """True if the disk is no longer used."""
        self.is_full = False
        """True if nothing more is stored."""
        self._memory, self._clock, self._late_s = memory, clock, late_s
        self._groups = groups_of(self.num_layers, slots.shape.layer_bytes, least_unit_bytes)
        self._faults_told = Counter[str]()
        self._num_unwritten = 0  # in a row
        lock = threading.RLock()
        self._moved, self._placed = threading.Condition(lock), threading.Condition(lock)
        self._fetches: deque[Unit] = deque()
        self._stores: deque[Unit] = deque()
        self._running: dict[Unit, float] = {}  # since when
        self._given_up: dict[Unit, float] = {}  # that a thread still has, and since when
        self._placing: set[Unit] = set()  # into the cache
        self._jobs: dict[int, MoveJob] = {}
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"disk-tier-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, job: MoveJob) -> None:
        with self._moved:
            job.asked_s = self._clock()
            self._jobs[job.number] = job
            count, num_groups = len(job.keys), len(self._groups) if job.is_fetch else 1
            job.num_left = [count] * num_groups
            queue = self._fetches if job.is_fetch else self._stores
            queue += [Unit(job, i, group) for group in range(num_groups) for i in range(count)]
            self._moved.notify_all()

    def progress(self, job: MoveJob) -> int:
        with self._moved:
            since_s = min([*self._running.values(), *self._given_up.values(), self._clock()])
            if not self.is_broken and self._clock() - since_s >= STUCK_S:
                self.is_broken = True
                self._note("stuck", f"doesn't answer for {STUCK_S:g} s, and isn't asked any more")
            if self.is_broken:  # all threads may hang
                self._give_up(self._jobs.values())
            job.num_told = job.num_there
            if job.is_over:
                self._jobs.pop(job.number, None)
                return self.num_layers
            return self._groups[job.num_told - 1].stop if job.num_told else 0

    def take_faults(self) -> tuple[int, int, int, int]:
        now = Counter(self.counts)
        new, self._faults_told = now - self._faults_told, now
        return new["unread"], new["damaged"], new["unwritten"], new["late"]

    def wait(self, timeout_s: float | None) -> None:
        def has_news() -> bool:
            jobs = self._jobs.values()
            return not jobs or any(job.num_there > job.num_told for job in jobs)

        with self._moved:
            most_s = STUCK_S if timeout_s is None else min(timeout_s, STUCK_S)
            self._moved.wait_for(has_news, most_s)

    def wait_for_layer(self, numbers: Collection[int], layer: int) -> None:
        group = next(i for i, layers in enumerate(self._groups) if layer in layers)
        late: list[MoveJob] = []
        with self._moved:
            for job in [self._jobs[number] for number in numbers if number in self._jobs]:
                started_s = self._clock()
                is_there = self._moved.wait_for(
                    lambda job=job: job.num_there > group,  # type: ignore[misc]
                    max(0.0, self._late_s - job.waited_s),
                )
                job.waited_s += self._clock() - started_s
                late += [] if is_there else [job]
            late = self._give_up(late)
        for job in late:
            what = "is too slow for steps that wait for it: KV blocks are run again"
            self._note("late", what, len(job.keys))
            for block in job.blocks:
                self._memory.clear(block)

    def close(self) -> None:
        """Drop what has not begun, and wait for what has, for up to ``STUCK_S``. A disk that hangs
        keeps its threads and its files."""
        with self._moved:
            self._is_closed = True
            self._fetches.clear()
            self._stores.clear()
            self._moved.notify_all()
        end_s = self._clock() + (0.0 if self.is_broken else STUCK_S)
        for thread in self._threads:
            thread.join(max(0.0, end_s - self._clock()))
        if any(thread.is_alive() for thread in self._threads):
            self.is_broken = True
            with self._moved:
                self._give_up(self._jobs.values())
        else:
            self.slots.close()

    def drop(self, keys: Iterable[bytes]) -> None:
        """Drop blocks. If the disk answers, a restart does not find them either."""
        for key in keys:
            if self.is_broken:
                self.slots.drop(key)
                continue
            with contextlib.suppress(OSError):  # a reader that finds it finds it whole
                self.slots.erase(key)

    def _give_up(self, jobs: Iterable[MoveJob]) -> list[MoveJob]:
        """Let those of the jobs fail that are not over, under the lock, and return them. A thread
        that returns later finds that out, and places nothing."""
        doomed = set(jobs)
        self._fetches = deque(unit for unit in self._fetches if unit.job not in doomed)
        self._stores = deque(unit for unit in self._stores if unit.job not in doomed)
        self._placed.wait_for(lambda: all(unit.job not in doomed for unit in self._placing))
        for unit in [unit for unit in self._running if unit.job in doomed]:
            self._given_up[unit] = self._running.pop(unit)
        given_up = [job for job in doomed if not job.is_over]
        for job in given_up:
            job.failed.update(range(len(job.keys)))
            job.num_left = [0] * len(job.num_left)
            job.seconds = self._clock() - job.asked_s
        self._moved.notify_all()
        return given_up

    def _work(self) -> None:
        buffer = page_buffer(self.slots.shape.slot_bytes)
        while (unit := self._next()) is not None:
            try:
                act = self._fetch if unit.job.is_fetch else self._store
                has_failed = not act(unit, buffer)
            except Exception:  # a defect here must not let steps wait for ever
                logger.exception("moving a KV block failed")
                has_failed = True
            if has_failed and unit.job.is_fetch and unit.index not in unit.job.failed:
                with self._in_place(unit) as may_place:
                    if may_place:  # a step may attend it
                        self._memory.clear(unit.job.blocks[unit.index])
            self._done(unit, has_failed=has_failed)

    def _next(self) -> Unit | None:
        """Wait for a unit to do. Return None once the tier is closed."""
        with self._moved:
            while not self._is_closed:
                is_fetching = any(unit.job.is_fetch for unit in self._running)
                queue = self._fetches or (None if is_fetching else self._stores)
                if queue:
                    unit = queue.popleft()
                    self._running[unit] = now_s = self._clock()
                    unit.job.began_s = unit.job.began_s or now_s
                    return unit
                self._moved.wait()
        return None

    @contextmanager
    def _in_place(self, unit: Unit) -> Iterator[bool]:
        """Hold a unit while its layers are put into the cache. False if it was given up: another
        sequence may have the block."""
        with self._moved:
            may_place = unit in self._running
            if may_place:
                self._placing.add(unit)
        try:
            yield may_place
        finally:
            with self._placed:
                self._placing.discard(unit)
                self._placed.notify_all()

    def _done(self, unit: Unit, *, has_failed: bool) -> None:
        job = unit.job
        with self._moved:
            if self._given_up.pop(unit, None) is not None or self._running.pop(unit, None) is None:
                return  # it was given up
            num_before = job.num_there
            job.num_left[unit.group] -= 1
            if has_failed:
                job.failed.add(unit.index)
            if job.num_there > num_before:
                job.seconds = self._clock() - (job.asked_s if job.is_over else job.began_s)
                self._moved.notify_all()
            elif not job.is_fetch or not self._fetches:
                self._moved.notify_all()  # a store may begin now

    def _fetch(self, unit: Unit, buffer: NDArray[np.uint8]) -> bool:
        """Fetch some layers of a block. Return True if they are right."""
        if self.is_broken or unit.index in unit.job.failed:
            return False
        key, layers = unit.job.keys[unit.index], self._groups[unit.group]
        size = self.slots.shape.layer_bytes
        found = self.slots.find(key)
        if found is None:
            return False
        slot, entry = found
        first, end = self.slots.shape.range_of(layers)
        try:
            self.slots.read(slot, first, buffer[: end - first])
        except OSError as error:
            what = f"can't be read ({error.strerror}): KV blocks are run again"
            self._note("unread", what)
            self._lose(key, for_good=True)
            return False
        at = layers.start * size - first
        data = buffer[at : at + len(layers) * size].reshape(len(layers), size)
        if tuple(map(crc32, data)) != entry.checksums[layers.start : layers.stop]:
            self._note("damaged", "holds damaged KV blocks (checksum): they are run again")
            self._lose(key)
            return False
        with self._in_place(unit) as may_place:
            if may_place:
                self._memory.write(layers, unit.job.blocks[unit.index], data)
        return True

    def _store(self, unit: Unit, buffer: NDArray[np.uint8]) -> bool:
        """Store a whole block. Return True if it is stored."""
        if self.is_broken or self.is_full:
            return False
        job, slots = unit.job, self.slots
        num_layers, size = slots.shape.num_layers, slots.shape.layer_bytes
        data = buffer[: num_layers * size].reshape(num_layers, size)
        self._memory.read(job.blocks[unit.index], data)
        checksums = tuple(map(crc32, data))
        buffer[num_layers * size :] = 0
        try:
            key, num_tokens = job.keys[unit.index], job.num_tokens[unit.index]
            if not slots.write(key, num_tokens, buffer, checksums):
                return False
        except OSError as error:
            self._note("unwritten", f"can't be written ({error.strerror})")
            self._num_unwritten += 1
            if self._num_unwritten >= MOST_FAILURES and not self.is_full:
                self.is_full = True
                self._note("full", "isn't written any more: what it has is read")
            return False
        self._num_unwritten = 0
        return True

    def _lose(self, key: bytes, *, for_good: bool = False) -> None:
        """Drop a block that is not as it was written."""
        with contextlib.suppress(OSError):
            self.slots.erase(key, for_good=for_good)

    def _note(self, kind: str, what: str, count: int = 1) -> None:
        """Count faults of a kind, and log the first one."""
        with self._moved:
            if not self.counts[kind]:
                logger.warning("%s %s", self.slots.path, what)
            self.counts[kind] += count


def groups_of(
    num_layers: int, layer_bytes: int, least_bytes: int = LEAST_UNIT_BYTES
) -> list[range]:
    """Return the layers that are read at once."""
    many = max(1, UNIT_BYTES // layer_bytes)
    few = max(-(-num_layers // NUM_GROUPS), -(-least_bytes // layer_bytes))
    a_group = min(many, few, num_layers)
    return [range(at, min(at + a_group, num_layers)) for at in range(0, num_layers, a_group)]
