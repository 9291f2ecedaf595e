"""Moves cached KV blocks between a cache's memory and its file, in its own threads.

A **job** is some blocks one way, in **units**: a block that is stored, or some layers of a block
that is fetched. Reads precede writes. What is fetched comes a **group** of layers at a time, all of
a job's first groups before any later ones, as layers are attended in that order. So the first
layers may be attended while later ones are still to come (``wait_for_layer``).

Every layer of a block is compared with its checksum before it is put into the cache. Whatever goes
wrong is a block that is not stored, or missing: it is counted, and reported as failed. A failed
block is zeros in the cache: a step that attends it has started too early, computes nothing that is
not finite, and is reported before its result counts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.clock import Clock
from rworker.tiers.lower_tier import LowerTier, MoveJob
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


class Health:
    """Faults of the disk that has a file.

    Args:
        path: path of the file, for the log.
    """

    def __init__(self, path: Path) -> None:
        self.counts: Final = Counter[str]()
        """By kind: blocks that were unread, damaged, unwritten, or late for a step."""
        self.is_broken = False
        """True if the disk is no longer used."""
        self.is_full = False
        """True if nothing more is stored."""
        self._path = path
        self._num_failures = 0
        self._taken = Counter[str]()

    def take_faults(self) -> tuple[int, int, int, int]:
        """Return the unread, damaged, unwritten and late blocks since the last call."""
        now = Counter(self.counts)
        new, self._taken = now - self._taken, now
        return new["unread"], new["damaged"], new["unwritten"], new["late"]

    def note(self, kind: str, what: str, count: int = 1) -> None:
        """Count faults of a kind, and log the first one."""
        if not self.counts[kind]:
            logger.warning("%s %s", self._path, what)
        self.counts[kind] += count

    def note_unwritten(self, error: OSError) -> None:
        self.note("unwritten", f"can't be written ({error.strerror})")
        self._num_failures += 1
        if self._num_failures >= MOST_FAILURES and not self.is_full:
            self.is_full = True
            self.note("full", "isn't written any more: what it has is read")

    def note_written(self) -> None:
        self._num_failures = 0


@dataclass(frozen=True)
class Unit:
    """Work of a thread: a block of a job, or a group of its layers."""

    job: MoveJob
    index: int
    group: int


class Units:
    """The work of one mover's threads. Any thread may call.

    Args:
        num_groups: groups of layers.
        clock: seconds.
    """

    def __init__(self, num_groups: int, clock: Clock) -> None:
        self._num_groups = num_groups
        self._clock = clock
        self._changed = threading.Condition()
        self._fetches: deque[Unit] = deque()
        self._stores: deque[Unit] = deque()
        self._running: dict[Unit, float] = {}  # since when
        self._placing: set[Unit] = set()  # into the cache
        self._jobs: dict[int, MoveJob] = {}
        self._is_closed = False
        self._is_giving_up = False

    @property
    def oldest_s(self) -> float | None:
        """When the unit began that has run for longest. None if none runs."""
        with self._changed:
            return min(self._running.values(), default=None)

    def begin(self, job: MoveJob) -> None:
        with self._changed:
            job.asked_s = self._clock()
            self._jobs[job.number] = job
            count, num_groups = len(job.keys), self._num_groups if job.is_fetch else 1
            job.num_left = [count] * num_groups
            queue = self._fetches if job.is_fetch else self._stores
            queue += [Unit(job, i, group) for group in range(num_groups) for i in range(count)]
            self._changed.notify_all()

    def next(self) -> Unit | None:
        """Wait for a unit to do. Return None once it is closed."""
        with self._changed:
            while not self._is_closed:
                is_fetching = any(unit.job.is_fetch for unit in self._running)
                queue = self._fetches or (None if is_fetching else self._stores)
                if queue:
                    unit = queue.popleft()
                    self._running[unit] = now_s = self._clock()
                    unit.job.began_s = unit.job.began_s or now_s
                    return unit
                self._changed.wait()
        return None

    @contextmanager
    def placing(self, unit: Unit) -> Iterator[bool]:
        """Hold a unit while its layers are put into the cache. False if it was given up: another
        sequence may have the block."""
        with self._changed:
            may_place = unit in self._running
            if may_place:
                self._placing.add(unit)
        try:
            yield may_place
        finally:
            with self._changed:
                self._placing.discard(unit)
                if self._is_giving_up:
                    self._changed.notify_all()

    def done(self, unit: Unit, *, has_failed: bool) -> None:
        job = unit.job
        with self._changed:
            if self._running.pop(unit, None) is None:
                return  # it was given up
            num_before = job.num_there
            job.num_left[unit.group] -= 1
            if has_failed:
                job.failed.add(unit.index)
            if job.num_there > num_before:
                job.seconds = self._clock() - job.began_s
                self._end_if_over(job)
                self._changed.notify_all()
            elif not job.is_fetch or not self._fetches:
                self._changed.notify_all()  # a store may begin now

    def progress(self, job: MoveJob) -> int:
        """Return a job's groups that are there, or have failed."""
        with self._changed:
            job.num_told = job.num_there
            if job.is_over:
                self._jobs.pop(job.number, None)
            return job.num_told

    def wait(self, timeout_s: float | None) -> None:
        """Wait until more of some job is there than was reported, or no job is left."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._jobs or any(job.has_more for job in self._jobs.values()),
                timeout_s,
            )

    def wait_for(self, numbers: Iterable[int], group: int, most_s: float) -> list[MoveJob]:
        """Wait until a group of layers of these jobs is there. Give up jobs that were waited for
        longer than ``most_s`` in all, and return them."""
        late: list[MoveJob] = []
        with self._changed:
            for job in [self._jobs[number] for number in numbers if number in self._jobs]:
                if job.num_there > group:
                    continue
                started_s = self._clock()
                is_there = self._changed.wait_for(
                    lambda job=job: job.num_there > group,  # type: ignore[misc]
                    max(0.0, most_s - job.waited_s),
                )
                job.waited_s += self._clock() - started_s
                if not is_there:
                    late.append(job)
        if late:
            self.give_up(late)
        return late

    def give_up(self, jobs: Collection[MoveJob] | None = None) -> None:
        """Let these jobs fail, or all. A thread that returns later finds that out, and places
        nothing."""
        with self._changed:
            doomed = set(self._jobs.values() if jobs is None else jobs)
            self._fetches = deque(unit for unit in self._fetches if unit.job not in doomed)
            self._stores = deque(unit for unit in self._stores if unit.job not in doomed)
            self._is_giving_up = True
            self._changed.wait_for(lambda: all(x.job not in doomed for x in self._placing))
            self._is_giving_up = False
            self._running = {x: s for x, s in self._running.items() if x.job not in doomed}
            for job in doomed:
                if not job.is_over:
                    job.failed.update(range(len(job.keys)))
                    job.num_left = [0] * len(job.num_left)
                    self._end_if_over(job)
            self._changed.notify_all()

    def close(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._is_closed = True
            self._fetches.clear()
            self._stores.clear()
            self._changed.notify_all()

    def _end_if_over(self, job: MoveJob) -> None:
        if job.is_over:
            job.seconds = self._clock() - job.asked_s


class Mover(LowerTier):
    """See the module. One thread calls. Only ``close`` and ``wait_for_layer`` wait for the disk.

    Args:
        slots: the file.
        pool: the cache, or its array as ``ArrayMemory`` takes it.
        num_threads: threads that read and write.
        clock: seconds.
        least_unit_bytes: least bytes to read at once, if the layers have them.
        late_s: see ``LATE_S``.
    """

    def __init__(
        self,
        slots: SlotFile,
        pool: NDArray[np.uint8] | CacheMemory,
        num_threads: int = NUM_THREADS,
        clock: Clock = time.monotonic,
        least_unit_bytes: int = LEAST_UNIT_BYTES,
        late_s: float = LATE_S,
    ) -> None:
        self.slots: Final = slots
        self.num_layers, self.stored_bytes = slots.shape.num_layers, slots.shape.slot_bytes
        self.health: Final = Health(slots.path)
        self._memory = ArrayMemory(pool) if isinstance(pool, np.ndarray) else pool
        self._clock = clock
        self._late_s = late_s
        self._groups = groups_of(self.num_layers, slots.shape.layer_bytes, least_unit_bytes)
        self._units = Units(len(self._groups), clock)
        self._threads = [
            threading.Thread(target=self._work, name=f"mover-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, job: MoveJob) -> None:
        self._units.begin(job)

    def wait(self, timeout_s: float | None) -> None:
        self._units.wait(timeout_s)

    def take_faults(self) -> tuple[int, int, int, int]:
        return self.health.take_faults()

    def progress(self, job: MoveJob) -> int:
        oldest_s = self._units.oldest_s
        stuck_s = self._clock() - STUCK_S
        if oldest_s is not None and oldest_s <= stuck_s and not self.health.is_broken:
            self.health.is_broken = True
            what = f"doesn't answer for {STUCK_S:g} s, and isn't asked any more"
            self.health.note("stuck", what)
            self._units.give_up()
        num_there = self._units.progress(job)
        if num_there == len(job.num_left):
            return self.num_layers
        return self._groups[num_there - 1].stop if num_there else 0

    def wait_for_layer(self, numbers: Collection[int], layer: int) -> None:
        group = next(i for i, layers in enumerate(self._groups) if layer in layers)
        for job in self._units.wait_for(numbers, group, self._late_s):
            what = "is too slow for steps that wait for it: KV blocks are run again"
            self.health.note("late", what, len(job.keys))
            for block in job.blocks:
                self._memory.clear(block)

    def close(self) -> None:
        """Drop what has not begun, and wait for what has, for up to ``STUCK_S``. A disk that hangs
        keeps its threads and its files."""
        self._units.close()
        end_s = self._clock() + (0.0 if self.health.is_broken else STUCK_S)
        for thread in self._threads:
            thread.join(max(0.0, end_s - self._clock()))
        if any(thread.is_alive() for thread in self._threads):
            self.health.is_broken = True
            self._units.give_up()
        else:
            self.slots.close()

    def drop(self, keys: Iterable[bytes]) -> None:
        """Drop blocks. If the disk answers, a restart does not find them either."""
        for key in keys:
            if self.health.is_broken:
                self.slots.drop(key)
                continue
            with contextlib.suppress(OSError):  # a reader that finds it finds it whole
                self.slots.erase(key)

    def _work(self) -> None:
        buffer = page_buffer(self.slots.shape.slot_bytes)
        while (unit := self._units.next()) is not None:
            try:
                act = self._fetch if unit.job.is_fetch else self._store
                is_done = act(unit, buffer)
            except Exception:  # a defect here must not let steps wait for ever
                logger.exception("moving a KV block failed")
                is_done = False
            if not is_done and unit.job.is_fetch and unit.index not in unit.job.failed:
                with self._units.placing(unit) as may_place:
                    if may_place:  # a step may attend it
                        self._memory.clear(unit.job.blocks[unit.index])
            self._units.done(unit, has_failed=not is_done)

    def _fetch(self, unit: Unit, buffer: NDArray[np.uint8]) -> bool:
        """Fetch some layers of a block. Return True if they are right."""
        if self.health.is_broken or unit.index in unit.job.failed:
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
            self.health.note("unread", what)
            self._lose(key, for_good=True)
            return False
        at = layers.start * size - first
        data = buffer[at : at + len(layers) * size].reshape(len(layers), size)
        if tuple(map(crc32, data)) != entry.checksums[layers.start : layers.stop]:
            self.health.note("damaged", "holds damaged KV blocks (checksum): they are run again")
            self._lose(key)
            return False
        with self._units.placing(unit) as may_place:
            if may_place:
                self._memory.write(layers, unit.job.blocks[unit.index], data)
        return True

    def _store(self, unit: Unit, buffer: NDArray[np.uint8]) -> bool:
        """Store a whole block. Return True if it is stored."""
        if self.health.is_broken or self.health.is_full:
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
            self.health.note_unwritten(error)
            return False
        self.health.note_written()
        return True

    def _lose(self, key: bytes, *, for_good: bool = False) -> None:
        """Drop a block that is not as it was written."""
        with contextlib.suppress(OSError):
            self.slots.erase(key, for_good=for_good)


def groups_of(
    num_layers: int, layer_bytes: int, least_bytes: int = LEAST_UNIT_BYTES
) -> list[range]:
    """Return the layers that are read at once."""
    many = max(1, UNIT_BYTES // layer_bytes)
    few = max(-(-num_layers // NUM_GROUPS), -(-least_bytes // layer_bytes))
    a_group = min(many, few, num_layers)
    return [range(at, min(at + a_group, num_layers)) for at in range(0, num_layers, a_group)]
