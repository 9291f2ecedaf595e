"""The router alone, over instances that a test speaks for: whatever happens,
every request says what it would say anyway, once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from messages_for_tests import INSTANCE_WELCOME as WELCOME
from values import replace

from examples import examples
from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.delta import CANCELLED, Delta, DeltaQueue, Listener
from fastdecode.core.errors import (
    CapacityError,
    ConfigError,
    FastDecodeError,
    RequestError,
    WorkerError,
)
from fastdecode.core.holders import KVSource
from fastdecode.core.sequence import FinishReason, Request, SamplingParams
from fastdecode.engine.instances.client import EngineClient
from fastdecode.engine.instances.routed import RequestStage
from fastdecode.engine.instances.router import Router
from fastdecode.schedule.life.handing import HANDED_OVER_LOST

BLOCK_SIZE = 16
SOURCE = KVSource("p-r0", 7, 0, 1, 0, 2, 0, 1, is_held=True)


def answer(request: Request, index: int) -> list[int]:
    """All tokens of a sequence; those that end early are shorter than they may be."""
    rng = random.Random(f"{request.seed}/{index}")
    most = request.params.max_tokens or 1
    return [rng.randrange(100) for _ in range(rng.choice([1, most, rng.randint(1, most)]))]


class Scripted(EngineClient):
    """An instance. Text is a letter a token, of which
    the last is held back until the next comes."""

    def __init__(self, name: str, role: InstanceRole, *, num_tokens: int = 16 * BLOCK_SIZE) -> None:
        super().__init__(name, lambda message: None, WELCOME, replace(WELCOME, role=role))
        self.num_tokens, self.max_sequences = num_tokens, 100
        self.asked: dict[str, Request] = {}
        self._drawn: dict[str, dict[int, int]] = {}
        self._told: dict[str, set[str]] = {}
        self.most = 0

    def submit(self, request: Request, *, every_step: bool) -> None:
        assert self.stranded is None, "it has no R-worker, and is given a request"
        if self.broken is not None:
            raise self.broken
        assert request.request_id not in self.asked
        self.asked[request.request_id] = request
        known = {i: len(request.drawn.get(i, ())) for i in range(request.params.n)}
        for index, count in known.items():
            assert list(request.drawn.get(index, ())) == answer(request, index)[:count]
            assert count < len(answer(request, index)), "one that is over isn't asked for"
        self._drawn[request.request_id] = known
        self._told[request.request_id] = set()
        self.most = max(self.most, len(self.asked))

    def cancel(self, request_id: str) -> None:
        self.asked.pop(request_id, None)

    def set_role(self, role: InstanceRole) -> None:
        self.role = role

    def step(self, name: str) -> list[Delta]:
        """The next token of each of a request's sequences."""
        request, told = self.asked[name], []
        if request.sources and "fetched" not in self._told[name]:
            self._told[name].add("fetched")
            has_failed = random.Random(name).random() < 0.3
            return [Delta(name, 0, has_fetched=True, fetch_failed=has_failed)]
        for index, count in self._drawn[name].items():
            tokens = answer(request, index)
            limit = len(request.drawn.get(index, ())) + 1 if request.hands_over else len(tokens)
            if count < min(limit, len(tokens)):
                is_over = count + 1 == len(tokens)
                first = 0 if f"{index}" not in self._told[name] else count
                self._told[name].add(f"{index}")
                text = "".join(chr(256 + token) for token in tokens[: count + is_over])
                before = max(0, first - 1)
                is_long = len(tokens) == request.params.max_tokens
                end: FinishReason = "length" if is_long and not request.hands_over else "stop"
                reason = end if is_over else None
                token_ids = tuple(tokens[first : count + 1])
                told.append(Delta(name, index, text[before:], token_ids, finish_reason=reason))
                self._drawn[name][index] += 1
                num_kept = len(request.prompt_token_ids) // BLOCK_SIZE * BLOCK_SIZE
                if is_over and num_kept:
                    kept = replace(SOURCE, num_tokens=num_kept, is_held=False)
                    told.insert(0, Delta(name, index, sources=(kept,)))
        if request.hands_over and "offered" not in self._told[name]:
            self._told[name].add("offered")
            if any(len(answer(request, i)) > 1 for i in range(request.params.n)):
                told.insert(0, Delta(name, 0, sources=(SOURCE,)))
        return told

    def fail(self, error: FastDecodeError) -> list[Delta]:
        self.broken = error
        names, self.asked = list(self.asked), {}
        return [Delta(name, 0, error=error) for name in names]


def route(clients: list[Scripted]) -> Router:
    spec: Any = SimpleNamespace(vocab_size=100, num_kv_heads=2, num_layers=1)
    return Router(clients, spec, batch_tokens=40, block_size=BLOCK_SIZE)


def stages(world: World) -> dict[str, RequestStage]:
    return {name: routed.stage for name, routed in world.router.by_request.items()}


class World:
    """A router, its instances, and who listens."""

    def __init__(self, num_prefill: int, num_decode: int) -> None:
        self.prefill = [Scripted(f"p{i}", InstanceRole.PREFILL) for i in range(num_prefill)]
        self.decode = [Scripted(f"d{i}", InstanceRole.DECODE) for i in range(num_decode)]
        self.router = route([*self.decode, *self.prefill])
        self.requests: dict[str, Request] = {}
        self.said: dict[str, list[Delta]] = {}
        self.cancelled: set[str] = set()

    def submit(self, name: str, rng: random.Random) -> None:
        tokens = rng.randint(1, 20)
        n = rng.choice([1, 1, 3])
        params = SamplingParams(n=n, max_tokens=tokens)
        # Long ones begin with what others have kept.
        most = rng.choice([30, 110]) if n == 1 else 30
        prompt = (5,) * rng.randint(1, most)
        request = Request(name, prompt, params, tokens, seed=rng.randrange(1 << 30))
        self.send(request, every_step=rng.random() < 0.5)

    def send(self, request: Request, *, every_step: bool) -> None:
        name = request.request_id
        self.requests[name], self.said[name] = request, []
        self.router.submit(request, Listener(self.said[name].append, every_step=every_step))

    def cancel(self, name: str) -> None:
        if self.router.cancel(name):
            self.cancelled.add(name)

    def turn(self, rng: random.Random) -> bool:
        """Let an instance speak. False: None has anything to say."""
        every = (*self.prefill, *self.decode)
        able = [x for x in every if x.broken is None and x.stranded is None and x.asked]
        rng.shuffle(able)
        for instance in able:
            names = list(instance.asked)
            rng.shuffle(names)
            told: list[Delta] = []
            most = rng.randint(1, 9)
            while names and len(told) < most:
                told += instance.step(names.pop())
            if told:
                self.router.arrived(instance, told)
                self.router.step()
                return True
        return False

    def lose(self, instance: Scripted) -> None:
        self.router.arrived(instance, instance.fail(WorkerError(f"{instance.name} is lost")))

    def strand(self, instance: Scripted) -> None:
        """An instance loses its last R-worker, and lives."""
        instance.stranded = WorkerError("no R-worker is left")
        self.router.lost(instance)

    def recover(self, instance: Scripted) -> None:
        instance.stranded = None
        self.router.came_back()

    def traffic(self, rng: random.Random) -> Iterator[int]:
        """Submit requests, and let instances speak for some turns after each."""
        for number in range(40):
            self.submit(f"r{number}", rng)
            for _ in range(rng.randint(0, 6)):
                self.turn(rng)
            yield number

    def run(self, rng: random.Random) -> None:
        """Let instances speak until they have nothing to say."""
        while self.turn(rng):
            pass

    def finish(self, rng: random.Random) -> None:
        self.run(rng)
        self.check()

    def check(self) -> None:
        """Requests without a cancel give the outputs of an undisturbed run."""
        for name, request in self.requests.items():
            whole = [answer(request, index) for index in range(request.params.n)]
            for index, tokens in enumerate(whole):
                deltas = [delta for delta in self.said[name] if delta.index == index]
                said = [token for delta in deltas for token in delta.token_ids]
                text = "".join(delta.text for delta in deltas)
                assert said == tokens[: len(said)], "a token was repeated, or left out"
                assert text == "".join(chr(256 + token) for token in tokens)[: len(text)]
                if name not in self.cancelled:
                    assert said == tokens and len(text) == len(tokens)
                    assert sum(d.finish_reason is not None for d in deltas) == 1
        router, dispatcher = self.router, self.router.dispatcher
        assert not (router.by_request or router.by_job or router.by_run)
        assert not router.num_unfinished_sequences and not router.num_running
        assert not (dispatcher.num_waiting or dispatcher.num_offered)
        assert not any(queue.num_tokens for queue in dispatcher.prefill)
        assert not any(room.num_tokens or room.num_sequences for room in dispatcher.decode)
        for instance in (*self.prefill, *self.decode):
            assert instance.broken is not None or not instance.asked, "a run is left"


@pytest.fixture(params=range(examples(100, 5)))
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.param)


def test_cancelling_and_losses_at_any_stage(rng: random.Random) -> None:
    world = World(rng.randint(1, 3), rng.randint(1, 3))
    left = len(world.prefill) + len(world.decode) - 1
    for number in world.traffic(rng):
        if rng.random() < 0.3:
            world.cancel(f"r{rng.randrange(number + 1)}")
        if rng.random() < 0.05 and left:
            alive = [x for x in (*world.prefill, *world.decode) if x.broken is None]
            world.lose(rng.choice(alive))
            left -= 1
    world.finish(rng)


def test_instances_without_r_workers_that_come_back_at_any_stage(rng: random.Random) -> None:
    """Also where none has one for a while: requests wait then."""
    world = World(rng.randint(1, 3), rng.randint(1, 3))
    every = [*world.prefill, *world.decode]
    for number in world.traffic(rng):
        if rng.random() < 0.1:
            world.cancel(f"r{rng.randrange(number + 1)}")
        hurt = rng.choice(every)
        if rng.random() < 0.3 and hurt.stranded is None:
            world.strand(hurt)
            left = hurt.asked.values()
            assert all(x.hands_over for x in left), "it keeps more than prompts being fetched"
        elif hurt.stranded is not None:
            world.recover(hurt)
    for instance in every:
        if instance.stranded is not None:
            world.recover(instance)
    world.finish(rng)


def with_a_large_request() -> tuple[World, Scripted]:
    """A world that has just taken a request that only one decode instance has room for."""
    world, large = World(1, 1), Scripted("large", InstanceRole.DECODE, num_tokens=400 * BLOCK_SIZE)
    world.decode.append(large)
    world.router = route([*world.decode, *world.prefill])
    request = Request("large", (5,) * 9, SamplingParams(max_tokens=600), 600, seed=1)
    world.send(request, every_step=False)
    return world, large


def test_a_request_that_fits_only_where_no_r_worker_is_left_keeps_nobody_waiting() -> None:
    rng, (world, large) = random.Random(12), with_a_large_request()
    while not large.asked:
        world.turn(rng)
    world.strand(large)
    world.submit("small", rng)
    world.run(rng)
    assert list(world.router.by_request) == ["large"]
    world.recover(large)
    world.finish(rng)


def test_a_request_whose_only_place_is_lost_for_good_fails() -> None:
    rng, (world, large) = random.Random(13), with_a_large_request()
    del world.requests["large"]  # it fails
    world.strand(large)
    large.broken = WorkerError("its process has ended")
    world.router.lost(large)
    assert isinstance(world.said["large"][-1].error, CapacityError)
    assert not world.turn(rng)
    world.check()


def test_a_prompt_is_fetched_and_its_request_over_in_one_delta() -> None:
    """A router that is slow to read finds one delta a sequence."""
    rng, world = random.Random(14), World(1, 1)
    request = Request("a", (5,) * 9, SamplingParams(max_tokens=9), 9, seed=1)
    world.send(request, every_step=True)
    while not world.decode[0].asked:
        assert world.turn(rng)
    (name,), queue = world.decode[0].asked, DeltaQueue()
    while told := world.decode[0].step(name):
        queue.put(told)
    (delta,) = queue.take(0)
    assert delta.has_fetched and delta.finish_reason is not None
    world.router.arrived(world.decode[0], [delta])
    assert world.router.counts.num_handed_over == 1
    world.check()


def test_roles_that_change_at_any_stage(rng: random.Random) -> None:
    world = World(rng.randint(1, 3), rng.randint(1, 3))
    every = [*world.prefill, *world.decode]
    for number in world.traffic(rng):
        if rng.random() < 0.5:
            name, role = rng.choice(every).name, rng.choice(list(InstanceRole))
            world.router.set_role(name, role)
            assert next(x.role for x in every if x.name == name) is role
        if rng.random() < 0.1:
            world.cancel(f"r{rng.randrange(number + 1)}")
    world.finish(rng)
    assert world.router.counts.num_moved == 0


def test_whoever_has_both_roles_is_given_whole_requests_while_it_has_room() -> None:
    rng, world = random.Random(5), World(1, 1)
    world.router.set_role("p0", InstanceRole.BOTH)
    world.submit("a", rng)
    (asked,) = world.prefill[0].asked.values()
    assert not asked.hands_over and asked.max_tokens == world.requests["a"].max_tokens
    with pytest.raises(ConfigError, match="there is no instance 'p9': they are d0, p0"):
        world.router.set_role("p9", InstanceRole.DECODE)
    world.router.set_role("p0", InstanceRole.BOTH)
    assert world.router.counts.num_role_changes == 1
    world.finish(rng)


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "evicted"])
def test_a_kept_prefix_that_cannot_be_read_is_not_asked_for_again(is_lost: bool) -> None:
    rng, world = random.Random(1), World(2, 1)

    def submit(name: str) -> list[Request]:
        asked = Request(name, (5,) * 110 + (len(name),), SamplingParams(max_tokens=1), 1, seed=1)
        world.send(asked, every_step=True)
        return [run for x in world.prefill for run in x.asked.values()]

    submit("kept")
    world.run(rng)
    world.router.dispatcher.prefill[1].num_tokens += 1_000  # the other one runs what comes
    (run,) = submit("borrows")
    assert run.sources
    if is_lost:
        keeper = world.decode[0] if world.decode[0].name in run.sources[0].address else None
        keeper = keeper or next(x for x in world.prefill if not x.asked)
        keeper.broken = WorkerError("killed")
        world.router.lost(keeper)
        keeper.broken = None
        world.router.came_back()
    else:
        (other,) = (x for x in world.prefill if x.asked)
        failed = Delta(run.request_id, 0, has_fetched=True, fetch_failed=True)
        world.router.arrived(other, [failed])
    world.cancel("borrows")
    (run,) = submit("runs itself")
    assert not run.sources


@pytest.mark.parametrize("seed", range(40))
def test_who_keeps_prompts_lets_others_be_bound(seed: int) -> None:
    """A decode instance keeps many small requests behind a large one that left no room, though
    their prompts are more than a batch."""
    rng, world = random.Random(seed), World(1, 1)
    both = Scripted("b", InstanceRole.BOTH, num_tokens=40 * BLOCK_SIZE)
    world.prefill, world.decode = [], [both]
    world.router = route([both])
    for name, num_prompt, num_tokens in [
        ("large", 10, 610),
        *((str(i), 30, number) for i, number in enumerate(rng.choices(range(2, 21), k=20))),
    ]:
        params = SamplingParams(max_tokens=num_tokens)
        request = Request(name, (5,) * num_prompt, params, num_tokens, seed=rng.randrange(1 << 30))
        world.send(request, every_step=False)
    world.run(rng)
    assert stages(world) == {}


def test_what_has_been_decided_of_a_request_that_leaves_takes_no_room() -> None:
    """Room is booked for G, but before G is sent there, an instance that takes
    nothing turns out to have had its prompt."""
    rng, world = random.Random(9), World(1, 1)
    dispatcher = world.router.dispatcher
    decode, (_, queue) = dispatcher.decode, dispatcher.prefill
    decode[0].num_sequences = decode[0].max_sequences
    world.submit("G", rng)
    world.run(rng)
    queue.num_tokens = 1000
    world.submit("A", rng)
    assert stages(world) == {
        "G": RequestStage.OFFERED,
        "A": RequestStage.QUEUED,
    }
    queue.num_tokens = decode[0].num_sequences = 0
    world.prefill[0].broken = WorkerError("it takes nothing, and nobody knows")
    world.router.dispatch()
    world.finish(rng)


def test_a_burst_waits_for_room() -> None:
    rng, world = random.Random(1), World(1, 1)
    for number in range(300):
        world.submit(f"r{number}", rng)
    while world.turn(rng):
        assert world.router.dispatcher.decode[0].num_tokens <= 16 * BLOCK_SIZE
    world.check()
    assert world.decode[0].most <= 16, "each has a block at least"
    assert world.router.counts.num_moved == 0


def test_what_cannot_be_prefilled_or_fetched_is_run_where_it_is_decoded() -> None:
    rng = random.Random(2)
    for error in (CapacityError("too long"), WorkerError("lost", code=HANDED_OVER_LOST)):
        world = World(1, 1)
        world.submit("a", rng)
        (name,) = world.prefill[0].asked
        world.router.arrived(world.prefill[0], [Delta(name, 0, error=error)])
        assert not world.prefill[0].asked or error.code == HANDED_OVER_LOST
        world.finish(rng)
        assert world.router.counts.num_moved == 1


@pytest.mark.parametrize("code", [CANCELLED, "not_finite"])
def test_a_request_fails_once_each_instance_has_failed_it(code: str) -> None:
    """An instance that calls a running request cancelled gives an error."""
    rng, world = random.Random(3), World(1, 1)
    world.submit("a", rng)
    world.submit("b", rng)
    first, second = RequestError("first", code=code), RequestError("second", code=code)
    name, _ = world.prefill[0].asked
    world.router.arrived(world.prefill[0], [Delta(name, 0, error=first)])
    assert not world.said["a"] and name not in world.prefill[0].asked
    (elsewhere,) = world.decode[0].asked
    world.router.arrived(world.decode[0], [Delta(elsewhere, 0, error=second)])
    assert world.said["a"][-1].error is first and not world.said["b"]
    del world.requests["a"]
    world.finish(rng)
    assert world.said["b"]


def test_errors_that_come_before_an_engine_says_that_it_has_broken_down(rng: random.Random) -> None:
    """Requests move: the others can run them."""
    world = World(rng.randint(1, 2), rng.randint(2, 3))
    for number in range(12):
        world.submit(f"r{number}", rng)
    for _ in range(rng.randint(0, 30)):
        world.turn(rng)
    hurt = rng.choice([x for x in (*world.prefill, *world.decode) if x.asked] or world.decode)
    error = FastDecodeError("a step broke down before: ZeroDivisionError")
    deltas = hurt.fail(error)
    hurt.broken = None  # its Failed is on its way
    world.router.arrived(hurt, deltas)
    hurt.asked.clear()
    hurt.broken = error
    world.router.lost(hurt)
    world.finish(rng)


def test_when_no_instance_is_left_all_end() -> None:
    rng, world = random.Random(4), World(1, 1)
    for number in range(3):
        world.submit(f"r{number}", rng)
    world.lose(world.prefill[0])
    assert {routed.stage for routed in world.router.by_request.values()} == {RequestStage.DECODE}
    world.lose(world.decode[0])
    with pytest.raises(WorkerError, match="no instance is left"):
        world.router.step()
    world.router.abandon(WorkerError("no instance is left"))
    assert all(said[-1].error is not None for said in world.said.values())
    with pytest.raises(WorkerError):
        world.router.submit(replace(world.requests["r0"], request_id="new"))


def test_what_fits_nowhere_is_refused_at_once() -> None:
    world = World(1, 1)
    request = Request("a", (5,) * 300, SamplingParams(), 100, seed=0)
    with pytest.raises(CapacityError, match="fits on no decode instance"):
        world.router.submit(request)
    assert not world.router.by_request
