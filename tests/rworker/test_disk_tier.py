"""A tier whose disk the test steers: layers are in place when they are reported, and what has not
come is zeros."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from held_slots import HeldSlots, held

from rworker.tiers import tier as tier_module
from rworker.tiers.disk import open_slots
from rworker.tiers.format import SlotShape
from rworker.tiers.tier import ArrayMemory, DiskTier, MoveJob

SHAPE = SlotShape("ab" * 32, num_layers=4, layer_bytes=4096)
KEYS = tuple(number.to_bytes(16, "little") for number in range(3))
WAIT_S = 20.0


def filled() -> np.ndarray:
    """A cache: uint8 [num_layers, num_blocks, layer_bytes]."""
    return np.random.default_rng(1).integers(1, 256, (4, 3, 4096), np.uint8)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A directory with a file of three blocks."""
    slots, memory = open_slots(tmp_path, SHAPE, SHAPE.file_bytes(4)), ArrayMemory(filled())
    tier = DiskTier(slots, memory, num_threads=1)
    tier.begin(job := MoveJob(0, False, KEYS, (0, 1, 2), (64, 128, 192)))
    tier.wait(WAIT_S)
    assert tier.progress(job) == SHAPE.num_layers and not job.failed
    tier.close()
    return tmp_path


def fetching(
    stored: Path, late_s: float = WAIT_S
) -> tuple[DiskTier, MoveJob, HeldSlots, np.ndarray]:
    """A fetch of all of them, a layer at a time, of a disk that is held at each."""
    slots = held(open_slots(stored, SHAPE, SHAPE.file_bytes(4)))
    pool = np.full_like(filled(), 9)
    tier = DiskTier(slots, ArrayMemory(pool), num_threads=1, least_unit_bytes=1, late_s=late_s)
    tier.begin(job := MoveJob(7, True, KEYS, (0, 1, 2)))
    return tier, job, slots, pool


def told(tier: DiskTier, job: MoveJob) -> int:
    """Return the layers that are reported next."""
    tier.wait(WAIT_S)
    return tier.progress(job)


def test_a_layer_is_there_while_later_ones_are_to_come(stored: Path) -> None:
    tier, job, slots, pool = fetching(stored)
    for layer in range(3):
        slots.let(layer)
        tier.wait_for_layer((7,), layer)
        assert (pool[layer] == filled()[layer]).all() and (pool[layer + 1] == 9).all()
        assert told(tier, job) == layer + 1 and not job.is_over
    slots.let(3)
    tier.wait_for_layer((7,), 3)
    assert told(tier, job) == 4 and not job.failed and (pool == filled()).all()
    tier.wait_for_layer((7,), 3)  # no step waits for a job that is over
    tier.close()


def test_a_block_that_fails_in_a_later_layer_is_zeros_and_told(stored: Path) -> None:
    tier, job, slots, pool = fetching(stored)
    slots.damaged = {(1, 2)}  # the second block's third layer
    for layer in range(4):
        slots.let(layer)
        tier.wait_for_layer((7,), layer)
    assert told(tier, job) == 4 and job.failed == {1} and tier.counts["damaged"] == 1
    assert [tier.take_faults() for _ in range(2)] == [(0, 1, 0, 0), (0, 0, 0, 0)]
    assert not pool[:, 1].any() and (pool[:, [0, 2]] == filled()[:, [0, 2]]).all()
    assert KEYS[1] not in tier.slots
    tier.close()
    again = open_slots(stored, SHAPE, SHAPE.file_bytes(4))
    assert KEYS[1] not in again and len(again) == 2, "it was found after a restart"
    again.close()


def test_who_keeps_a_step_waiting_is_given_up(stored: Path) -> None:
    """What comes later all the same is put nowhere: the block may be another's."""
    tier, job, slots, pool = fetching(stored, late_s=0.01)
    slots.let(0)
    assert told(tier, job) == 1
    tier.wait_for_layer((7,), 1)
    assert told(tier, job) == 4 and job.failed == {0, 1, 2}
    assert tier.counts["late"] == 3 and not pool.any()
    pool[:] = 5
    for layer in (1, 2, 3):
        slots.let(layer)
    tier.close()
    assert (pool == 5).all()


def test_a_late_job_that_ends_meanwhile_is_not_cleared(stored: Path) -> None:
    tier, _, slots, pool = fetching(stored, late_s=0.3)
    tier.begin(last := MoveJob(8, True, KEYS, (0, 1, 2)))
    threading.Timer(0.45, lambda: [slots.let(layer) for layer in range(4)]).start()
    tier.wait_for_layer((7, 8), 0)  # while it waits for the last job, the first one ends
    tier.wait_for_layer((8,), 3)
    assert (pool == (0 if last.failed else filled())).all()
    tier.close()


def test_no_later_job_waits_for_a_disk_that_hangs(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads hang in it, with a job that a step has given up."""
    monkeypatch.setattr(tier_module, "STUCK_S", 0.1)
    tier, job, slots, _ = fetching(stored, late_s=0.01)
    tier.wait_for_layer((7,), 0)
    fetch, store = MoveJob(8, True, KEYS, (0, 1, 2)), MoveJob(9, False, KEYS, (0, 1, 2), (1, 2, 3))
    for each in (job, fetch, store):
        if each is not job:
            tier.begin(each)
        while tier.progress(each) < SHAPE.num_layers:
            tier.wait(None)
        assert each.failed == {0, 1, 2}
    assert tier.is_broken
    for layer in range(4):
        slots.let(layer)
    tier.close()
