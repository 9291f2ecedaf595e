"""Sequences that step while later layers of their blocks are still on disk say
what they would have said, whatever comes of the rest."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from disk_talks import Said, talk, talk_in_turns, until_some_are_fetched
from held_slots import held
from numpy.typing import NDArray
from trouble import give

from examples import TRIES_ALL
from fastdecode import LLM
from fastdecode.engine import engine as engine_module
from fastdecode.engine.setup import launch
from fastdecode.schedule.life.lifecycle import Lifecycle
from rworker.attention import AttentionExecutor
from rworker.tiers.disk import Disk
from rworker.tiers.slots import SlotFile
from rworker.tiers.tier import CacheMemory, DiskTier, Unit
from rworker.tiers.tiers import Tiers

WAIT_S = 60.0
NUM_THREADS = 24
"""Some for each layer of what may be on its way: with few, units that no step has
asked for yet would keep all of them, and what a step waits for would stay queued,
here or at the other R-worker."""
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "r_threads": 1,
    "block_size": 16,
    "kv_memory_gb": 0.00025,  # 10 blocks
    "r_workers": 2,
    "max_num_sequences": 4,
    "cache_disk_gb": 0.004,
    "swap_threshold": 0.6,
}
WAYS: list[tuple[dict[str, Any], float]] = [
    ({"prompt_attention": "r"}, 0.3),
    ({"r_partition": "heads", "lanes": 2}, 0.3),
    ({"prompt_attention": "s"}, 0.0),
]
MORE_WAYS: list[tuple[dict[str, Any], float]] = [
    ({"prompt_attention": "r"}, 0.0),
    ({"prompt_attention": "s", "lanes": 2}, 0.3),
    ({"r_partition": "heads"}, 0.0),
    ({"split_tokens": 32}, 0.3),
    ({"prefill_chunk": 16}, 0.3),
]


class AtTheLastMoment(DiskTier):
    """Every layer but the first is on disk until a step waits for it. It all
    takes no time, so whoever starts joins."""

    def __init__(self, fails: float, slots: SlotFile, memory: CacheMemory) -> None:
        self._asked: dict[int, int] = {}  # by job: the last layer that a step waits for
        self._changed = threading.Condition()
        disk = held(slots)
        disk.damaged = By(random.Random(5), fails)
        for layer in range(slots.shape.num_layers):
            disk.let(layer)
        super().__init__(
            disk, memory, NUM_THREADS, clock=lambda: 0.0, least_unit_bytes=1, late_s=WAIT_S
        )

    def wait_for_layer(self, numbers: Collection[int], layer: int) -> None:
        with self._changed:
            self._asked.update(dict.fromkeys(numbers, layer))
            self._changed.notify_all()
        super().wait_for_layer(numbers, layer)

    def _fetch(self, unit: Unit, buffer: NDArray[np.uint8]) -> bool:
        number, layer = unit.job.number, unit.group
        with self._changed:
            is_asked = self._changed.wait_for(lambda: self._asked.get(number, 0) >= layer, WAIT_S)
        assert is_asked, "no step has waited for it"
        return super()._fetch(unit, buffer)


class By(set[tuple[int, int]]):
    """What is read of later layers is damaged by chance."""

    def __init__(self, chance: random.Random, share: float) -> None:
        super().__init__()
        self._chance, self._share = chance, share

    def __contains__(self, place: object) -> bool:
        assert isinstance(place, tuple)
        return place[1] > 0 and self._chance.random() < self._share


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> str:
    """Layers of whole pages."""
    return str(tiny_checkpoint("llama", head_dim=32))


@pytest.fixture(scope="module")
def plain(model: str) -> Said:
    options = {**OPTIONS, "prefix_cache": "off", "cache_disk_gb": None, "kv_memory_gb": 0.004}
    with LLM(model, **options) as llm:
        return talk(llm)


@pytest.mark.parametrize(("way", "fails"), WAYS + MORE_WAYS * TRIES_ALL, ids=str)
def test_who_joins_early_says_the_same(
    way: dict[str, Any],
    fails: float,
    tmp_path: Path,
    model: str,
    plain: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the same steps as others, also where a later layer turns out to be
    damaged when the first were attended."""
    disk = Disk(tmp_path, 4_000_000)
    make_tier = partial(AtTheLastMoment, fails)

    def attention() -> AttentionExecutor:
        return AttentionExecutor(num_threads=1, tiers=Tiers(disk, make_tier))

    give(monkeypatch, {"r0": attention, "r1": attention})
    with LLM(model, **{**OPTIONS, **way}, cache_disk=str(tmp_path)) as llm:
        assert talk(llm) == plain
        counts = llm.stats.tiers
        assert counts.num_joined > 0 and counts.num_fetched > 0
        assert (counts.num_failed > 0) == (fails > 0)


def test_what_is_read_before_a_step_is_none_of_its_time(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the next ones would be thought to take as long, and join too early."""
    away_s, steps_s = [0.0], []
    read, stepped = SlotFile.read, Lifecycle.stepped

    def far_away(self: SlotFile, slot: int, first: int, into: NDArray[np.uint8]) -> None:
        away_s[0] += 1000.0
        read(self, slot, first, into)

    def note(self: Lifecycle, num_prompt_tokens: int, seconds: float, idle_s: float) -> None:
        steps_s.append(seconds)
        assert 0 <= idle_s <= seconds
        stepped(self, num_prompt_tokens, seconds, idle_s)

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + away_s[0])
    monkeypatch.setattr(engine_module, "time", clock)
    monkeypatch.setattr(SlotFile, "read", far_away)
    monkeypatch.setattr(Lifecycle, "stepped", note)
    whole = partial(Lifecycle, joins_early=False)
    monkeypatch.setattr(launch, "Lifecycle", lambda scheduler, **_: whole(scheduler))
    with LLM(model, **{**OPTIONS, "r_workers": 1}, cache_disk=str(tmp_path)) as llm:
        until_some_are_fetched(llm, lambda: talk_in_turns(llm))
        assert llm.stats.tiers.num_fetched > 0 and steps_s
    assert away_s[0] >= 1000.0 > max(steps_s)
