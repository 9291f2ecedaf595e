"""Moves kept KV blocks between a cache's memory and its lower tier, in threads
of its own.

A **job** is some blocks one way (``rworker.tiers.units`` says in which order).
Every layer of a block is held against its checksum before it is put into the
cache. While a fetch is under way its first layers may be attended
(``wait_for_layer``).

Whatever goes wrong is a block that isn't stored, or isn't there: it is counted,
and told as failed. What is in the cache of a block that has failed is zeros:
whoever attends it has started too early, computes nothing that isn't finite,
and is told before anybody believes what came of it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Iterable
from typing import Final, Protocol
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.clock import Clock
from rworker.tiers.health import Faults, Health
from rworker.tiers.lower_tier import LowerTier, MoveJob
from rworker.tiers.slots import SlotFile, page_buffer
from rworker.tiers.units import Unit, Units

logger = logging.getLogger(__name__)

UNIT_BYTES: Final = 1 << 20
"""Several layers are read at once where one has less."""
LEAST_UNIT_BYTES: Final = 1 << 17
"""But fewer, where a model would come in less than ``NUM_GROUPS`` groups."""
NUM_GROUPS: Final = 6
NUM_THREADS: Final = 3
STUCK_S: Final = 30.0
"""A read or write that takes longer: the disk isn't asked again."""
LATE_S: Final = 1.0
"""Steps wait for a job's layers so long in all: then it is given up."""


class CacheMemory(Protocol):
    """A cache's blocks, whose bytes are moved. Any thread may call."""

    @property
    def num_layers(self) -> int: ...

    @property
    def layer_bytes(self) -> int:
        """Of a block, in one layer."""

    def read(self, block: int, into: NDArray[np.uint8]) -> None:
        """A whole block → [num_layers, layer_bytes]."""

    def write(self, layers: range, block: int, data: NDArray[np.uint8]) -> None:
        """Some layers of a block, from [len(layers), layer_bytes]."""

    def clear(self, block: int) -> None:
        """Zeros in place of a block."""


class ArrayMemory:
    """Of an R-worker's cache in its host's memory; see ``CacheMemory``.

    Args:
        pool: uint8 [num_layers, num_blocks, block_bytes].
    """

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self._pool = pool
        self.num_layers, self.layer_bytes = len(pool), pool.shape[2]

    def read(self, block: int, into: NDArray[np.uint8]) -> None:
        """See ``CacheMemory``."""
        into[:] = self._pool[:, block]

    def write(self, layers: range, block: int, data: NDArray[np.uint8]) -> None:
        """See ``CacheMemory``."""
        self._pool[layers.start : layers.stop, block] = data

    def clear(self, block: int) -> None:
        """See ``CacheMemory``."""
        self._pool[:, block] = 0


class Mover(LowerTier):
    """See the module. One thread calls; none of its calls waits for the disk,
    but ``close`` and ``wait_for_layer``.

    Args:
        slots: the lower tier.
        pool: the cache; as an array, what ``ArrayMemory`` takes.
        num_threads: that read and write.
        clock: seconds.
        least_unit_bytes: that are read at once, if the layers have as many.
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
        shape = slots.shape
        self._groups = groups_of(shape.num_layers, shape.layer_bytes, least_unit_bytes)
        self._units = Units(len(self._groups), clock)
        self._threads = [
            threading.Thread(target=self._work, name=f"mover-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def take_faults(self) -> Faults:
        """What has gone wrong since the last call."""
        return self.health.take_faults()

    def begin(self, job: MoveJob) -> None:
        """Move blocks. Nobody writes them until the job is over; of those
        fetched into, layers are read that were waited for."""
        self._units.begin(job)

    def progress(self, job: MoveJob) -> int:
        """See ``LowerTier``."""
        oldest_s = self._units.oldest_s
        stuck_s = self._clock() - STUCK_S
        if oldest_s is not None and oldest_s <= stuck_s and not self.health.is_broken:
            self.health.note_stuck(STUCK_S)
            self._units.give_up()
        num_there = self._units.progress(job)
        if num_there == len(job.num_left):
            return self.num_layers
        return self._groups[num_there - 1].stop if num_there else 0

    def wait(self, timeout_s: float | None) -> None:
        """See ``LowerTier``."""
        self._units.wait(timeout_s)

    def wait_for_layer(self, numbers: Collection[int], layer: int) -> None:
        """Until a layer of these jobs' blocks is there, or has failed: whoever
        keeps steps waiting for too long has."""
        group = next(i for i, layers in enumerate(self._groups) if layer in layers)
        for job in self._units.wait_for(numbers, group, self._late_s):
            self.health.note_late(len(job.keys))
            for index in range(len(job.keys)):
                self._clear(job, index)

    def close(self) -> None:
        """Drop what isn't begun, and wait for what is; for ``STUCK_S`` at most.
        A disk that hangs keeps its threads and its files."""
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
        """See ``LowerTier``. Nor are they found after a restart, if the disk answers."""
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
            except Exception:  # a mistake of ours is no reason to wait for ever
                logger.exception("moving a KV block failed")
                is_done = False
            if not is_done and unit.job.is_fetch and unit.index not in unit.job.failed:
                with self._units.placing(unit) as may_place:
                    if may_place:
                        self._clear(unit.job, unit.index)
            self._units.done(unit, has_failed=not is_done)

    def _clear(self, job: MoveJob, index: int) -> None:
        """Somebody may attend a block that has failed."""
        self._memory.clear(job.blocks[index])

    def _fetch(self, unit: Unit, buffer: NDArray[np.uint8]) -> bool:
        """Some layers of a block; says whether they are right."""
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
            self.health.note_unread(error)
            self._lose(key, for_good=True)
            return False
        at = layers.start * size - first
        data = buffer[at : at + len(layers) * size].reshape(len(layers), size)
        if tuple(map(crc32, data)) != entry.checksums[layers.start : layers.stop]:
            self.health.note_damaged()
            self._lose(key)
            return False
        with self._units.placing(unit) as may_place:
            if may_place:
                self._memory.write(layers, unit.job.blocks[unit.index], data)
        return True

    def _store(self, unit: Unit, buffer: NDArray[np.uint8]) -> bool:
        """A whole block; says whether it is stored."""
        if self.health.is_broken or self.health.is_full:
            return False
        job, slots = unit.job, self.slots
        num_layers, size = slots.shape.num_layers, slots.shape.layer_bytes
        data = buffer[: num_layers * size].reshape(num_layers, size)
        self._memory.read(job.blocks[unit.index], data)
        checksums = tuple(map(crc32, data))
        buffer[num_layers * size :] = 0
        try:
            slot = slots.take_slot()
            if slot is None:
                return False
            tokens = job.num_tokens[unit.index]
            slots.write(slot, job.keys[unit.index], tokens, buffer, checksums)
        except OSError as error:
            self.health.note_unwritten(error)
            return False
        self.health.note_written()
        return True

    def _lose(self, key: bytes, *, for_good: bool = False) -> None:
        """What isn't as it was written isn't found again."""
        with contextlib.suppress(OSError):
            self.slots.erase(key, for_good=for_good)


def groups_of(
    num_layers: int, layer_bytes: int, least_bytes: int = LEAST_UNIT_BYTES
) -> list[range]:
    """Layers that are read at once."""
    many = max(1, UNIT_BYTES // layer_bytes)
    few = max(-(-num_layers // NUM_GROUPS), -(-least_bytes // layer_bytes))
    a_group = min(many, few, num_layers)
    return [range(at, min(at + a_group, num_layers)) for at in range(0, num_layers, a_group)]
