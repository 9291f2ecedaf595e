"""The states of cached blocks: whatever happens, each change is one that the tables allow."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from fastdecode.schedule.cache.blocks import Below, Block, Index, Memory
from fastdecode.schedule.cache.retention import LeastRecent, Policy, Retention

SIZE, SLOTS = 4, 9
M, B = Memory, Below
# Some changes are two, which nothing sees between.
IN_MEMORY = {
    M.ABSENT: {M.READY, M.ARRIVING}, M.ARRIVING: {M.READY, M.VOID, M.ABSENT},
    M.READY: {M.ABSENT, M.VOID}, M.VOID: {M.ABSENT},
}  # fmt: skip
IN_THE_TIER = {B.NONE: {B.STORING, B.STORED}, B.STORING: {B.STORED, B.NONE}, B.STORED: {B.NONE}}


class World:
    """One holder's index, chains of sequences that use it, and jobs under way."""

    def __init__(self, seed: int, policy: Policy, *, only_ends: bool) -> None:
        self.chance = random.Random(seed)
        self.index = Index(policy, only_ends=only_ends)
        self.index.stock(SLOTS, {b"d0": SIZE, b"d1": 2 * SIZE}, 0.0)
        self.running: list[list[bytes]] = []
        self.jobs: dict[int, list[bytes]] = {}
        self.now_s, self._num_jobs = 0.0, 0
        self._before: dict[Block, tuple[Memory, Below]] = {}

    def chain(self) -> list[bytes]:
        """Return keys that begin like others."""
        common, own = self.chance.randrange(4), self.chance.randrange(4)
        return [f"c{i}".encode() for i in range(common)] + [
            f"{self.chance.choice('ab')}{common}{i}".encode() for i in range(own)
        ]

    def start(self) -> None:
        keys = self.chain()
        num_there = self.index.num_leading(keys)
        if num_there < len(keys) and self.index.get(keys[num_there]) is not None:
            return  # it is VOID: another sequence's copy has that key
        before = [None, *keys][:num_there]
        ends = [SIZE * (place + 1) for place in range(num_there)]
        fetched = self.index.begin_fetch(keys[:num_there], before, ends)
        for block in fetched:
            block.job = self._num_jobs
        self._number_job([block.key for block in fetched])
        self.index.use(keys[:num_there], as_hit=True)
        for place in range(num_there, len(keys)):
            if keys[place] in self.index:
                self.index.use([keys[place]], as_hit=False)
            else:
                self.index.name(keys[place], keys[place - 1] if place else None, SIZE * (place + 1))
        self.running.append(keys)

    def end(self) -> None:
        if self.running:
            keys = self.running.pop(self.chance.randrange(len(self.running)))
            if self.chance.random() < 0.1:
                self.index.make_void(keys)
                self.index.drop_below(keys)
            elif keys and self.index[keys[-1]].memory is M.READY and self.chance.random() < 0.5:
                self.index.lease(keys[-1])
            self.index.release(keys, self.now_s)

    def evict(self) -> None:
        left = len(self.index) - len(
            self.index.evict(2, self.now_s, only_unhit=self.chance.random() < 0.3)
        )
        assert left == len(self.index)

    def store(self) -> None:
        if not any(
            self.index[key].below is B.STORING for keys in self.jobs.values() for key in keys
        ):
            blocks, _ = self.index.begin_store(3, self._num_jobs, self.now_s)
            self._number_job([block.key for block in blocks])

    def end_job(self) -> None:
        if self.jobs:
            job = self.chance.choice(list(self.jobs))
            keys = self.jobs.pop(job)
            failed = {key for key in keys if self.chance.random() < 0.2}
            self.index.drop_below(failed)
            self.index.end_job(job, keys, failed, self.now_s)

    def end_turn(self) -> None:
        self.index.end_turn(self.chance.choice((*self.chain(), b"d0")))

    def drop(self) -> None:
        self.index.drop(self.chain())

    def lose_tier(self) -> None:
        if self.chance.random() < 0.1:
            self.index.lose_below()
            for job, keys in self.jobs.items():
                self.index.end_job(job, keys, set(keys), self.now_s)
            self.jobs.clear()
            self.index.stock(SLOTS, {}, self.now_s)

    def check(self) -> None:
        for block, (memory, below) in self._before.items():
            assert (
                block.memory is memory
                or block.memory in IN_MEMORY[memory]
                or (
                    memory is M.ARRIVING and block.memory is M.ABSENT  # VOID between
                )
            )
            assert block.below is below or block.below in IN_THE_TIER[below]
        every = self.index._blocks.values()
        self._before = {block: (block.memory, block.below) for block in every}
        self.index.check_invariants(Counter(key for keys in self.running for key in keys))

    def _number_job(self, keys: list[bytes]) -> None:
        if keys:
            self.jobs[self._num_jobs] = keys
        self._num_jobs += 1


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 1 << 32), st.booleans(), st.booleans())
def test_blocks_change_only_as_the_tables_say(seed: int, is_lru: bool, only_ends: bool) -> None:
    world = World(seed, LeastRecent() if is_lru else Retention(SIZE), only_ends=only_ends)
    w = world
    acts = w.start, w.start, w.end, w.evict, w.store, w.end_job, w.end_turn, w.drop, w.lose_tier
    for _ in range(120):
        world.now_s += world.chance.choice((0.0, 0.1, 5.0))
        world.chance.choice(acts)()
        world.check()
    while world.running or world.jobs:
        world.end()
        world.end_job()
    world.check()
    world.index.lose_below()
    world.index.evict(999, world.now_s)
    assert not len(world.index) and not world.index.num_turns
