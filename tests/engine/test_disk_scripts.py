"""Turns, branches, salts, forgotten conversations and faults of the disk at random: an engine with
little memory and a disk says what one without a cache does."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from trouble import give

from examples import examples
from fastdecode import LLM, SamplingParams
from fastdecode.core.sequence import CacheUse
from rworker.attention import AttentionExecutor
from rworker.tiers.disk import Disk
from rworker.tiers.slots import SlotFile
from rworker.tiers.tier import CacheMemory, DiskTier
from rworker.tiers.tiers import Tiers

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "r_threads": 1,
    "r_workers": 2,
    "block_size": 16,
    "max_num_sequences": 4,
    "prefill_chunk": 24,
}
TURNS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SIBLINGS = SamplingParams(temperature=0.9, seed=4, n=2, max_tokens=6, ignore_eos=True)
SALTS = ("", "tenant")


@dataclass
class Faults:
    """Of a disk, by chance."""

    chance: random.Random
    share: float = 0.0

    def strikes(self) -> bool:
        return self.chance.random() < self.share


class FaultyFile(SlotFile):
    """What it reads has flipped bits, or can't be read; some can't be written."""

    faults: Faults

    def read(self, slot: int, first: int, into: NDArray[np.uint8]) -> None:
        super().read(slot, first, into)
        if self.faults.strikes():
            into[self.faults.chance.randrange(len(into))] ^= 4
        if self.faults.strikes():
            raise OSError(errno.EIO, "the disk has a fault")

    def take_slot(self) -> int | None:
        if self.faults.strikes():
            raise OSError(errno.ENOSPC, "the disk is full")
        return super().take_slot()


@dataclass
class Pair:
    """An engine without a cache, and one with a disk that has faults."""

    plain: LLM
    kept: LLM
    faults: Faults
    num_scripts: int = 0

    def say(self, prompts: list[list[int]], params: SamplingParams, **more: Any) -> list[list[int]]:
        """What both say, which is the same; of each prompt's first sequence."""
        told = []
        for llm in (self.plain, self.kept):
            outputs = llm.generate(prompts, params, **more)
            assert all(output.ok for output in outputs), outputs
            told.append([[list(c.token_ids) for c in output.completions] for output in outputs])
        assert told[0] == told[1]
        return [completions[0] for completions in told[0]]


@pytest.fixture(scope="module", params=[None, 24], ids=["all tokens", "window"])
def pair(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Run a model whose layers see all tokens, or a window each."""
    window = {} if request.param is None else {"sliding_window": request.param}
    model = str(tiny_checkpoint("mistral" if window else "llama", **window))
    disk = Disk(tmp_path_factory.mktemp("disk"), 1_000_000)
    faults = Faults(random.Random(8))

    def make_tier(slots: SlotFile, memory: CacheMemory) -> DiskTier:
        slots.__class__ = FaultyFile
        assert isinstance(slots, FaultyFile)
        slots.faults = faults
        return DiskTier(slots, memory, least_unit_bytes=1)

    def executor() -> AttentionExecutor:
        return AttentionExecutor(num_threads=1, tiers=Tiers(disk, make_tier))

    little = {"kv_memory_gb": 0.0001, "swap_threshold": 0.7}
    on_disk = {"cache_disk": str(disk.directory), "cache_disk_gb": 0.001}
    with pytest.MonkeyPatch.context() as patch:
        give(patch, {"r0": executor, "r1": executor})
        kept = LLM(model, **OPTIONS, **little, **on_disk)
    with kept, LLM(model, **OPTIONS, kv_memory_gb=0.004, prefix_cache="off") as plain:
        yield Pair(plain, kept, faults)


Step: TypeAlias = "tuple[str, list[int], int]"
"""What happens, to which conversations, and how much of it."""
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("turn", "turn", "turn", "branch", "siblings", "forget", "fault")),
        st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True),
        st.integers(1, 40),
    ),
    min_size=6,
    max_size=14,
)


@settings(
    max_examples=examples(30, share=15),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(STEPS, st.sampled_from((0.0, 0.05, 0.4)), st.integers(0, 1 << 16))
def test_faults_of_the_disk_change_no_token(
    pair: Pair, steps: list[Step], share: float, seed: int
) -> None:
    pair.num_scripts += 1
    chance = random.Random(seed)
    pair.faults.share = 0.0
    histories: dict[int, list[int]] = {}
    names = {i: f"{pair.num_scripts}-{i}" for i in range(5)}
    for number, (what, whom, count) in enumerate(steps):
        new = [[chance.randrange(3, 200) for _ in range(count)] for _ in whom]
        if what == "turn":
            said = pair.say(new, TURNS, conversation_id=[names[i] for i in whom])
            for i, tokens, answer in zip(whom, new, said, strict=True):
                histories.setdefault(i, []).extend([*tokens, *answer])
        elif what in ("branch", "siblings"):
            begun = [histories.get(i, [])[: 3 * count] for i in whom]
            prompts = [[*start, *tokens] for start, tokens in zip(begun, new, strict=True)]
            cache = CacheUse(salt=SALTS[number % 2], is_off=count % 7 == 0)
            pair.say(prompts, TURNS if what == "branch" else SIBLINGS, cache=cache)
        elif what == "forget":
            for i in whom:
                if histories.pop(i, None) is not None:
                    pair.plain.forget(names[i]), pair.kept.forget(names[i])
                    names[i] = f"{names[i]}+"
        else:
            pair.faults.share = share
    counts = pair.kept.stats.tiers
    assert counts.num_slots > 0
