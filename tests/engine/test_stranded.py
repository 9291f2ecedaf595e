"""All R-workers are lost, and others may come in their place: whoever wants
something of the engine meanwhile isn't kept waiting. One that comes, and is lost
again soon, is waited for ever longer."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence

import pytest
from schedule_choices import schedule_options
from scripted_engine import Rig, request, rig
from state_machine import HELLO

from fastdecode.core.delta import CANCELLED, DeltaQueue
from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.extensions import EngineState, Recovery
from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.fleet.replacements import LONGEST_PAUSE_S, HubReplacements
from fastdecode.engine.requests import Requests
from fastdecode.engine.service import EngineService
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.modes import make_scheduler
from fastdecode.text.codec import TextCodec
from fastdecode.text.grammars import GrammarMasks
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import Failed, FromRWorker, Hello, Shutdown, ToRWorker, Welcome

DEADLINE_S = 60.0


class Nobody:
    """Replacements that may come at any time, and never do."""

    def __init__(self, timeout_s: float = float("inf")) -> None:
        self.timeout_s = timeout_s
        self.looked = threading.Semaphore(0)
        """Released by every look when all are lost."""

    def look(self, lost: Collection[int]) -> dict[int, Welcome]:
        if len(lost) == 2:
            self.looked.release()
        return {}

    def limit(self, num_blocks: Mapping[int, int]) -> None:
        raise AssertionError("there are no replicas")

    def admit(self, worker: int) -> None:
        raise AssertionError("nobody came")


class Served:
    """A rig as a service wants it."""

    num_r_workers = num_live_r_workers = 2
    has_hung_r_workers = False

    def __init__(self, made: Rig) -> None:
        self.engine = made.engine

    def close(self) -> None:
        pass


@pytest.fixture
def stranded() -> Iterator[tuple[EngineService, DeltaQueue]]:
    """A service whose R-workers are all lost while a request runs."""
    nobody, reader = Nobody(), DeltaQueue()
    with rig(2, crash={0: 20, 1: 20}, replacements=nobody) as made:
        service = EngineService(lambda: Served(made))
        service.open()
        service.submit([request(name, 3, 40) for name in ("a", "bb")], reader)
        for _ in range(3):
            assert nobody.looked.acquire(timeout=DEADLINE_S)
        yield service, reader
        service.close()


def ends(service: EngineService, reader: DeltaQueue, num_ends: int) -> dict[str, str]:
    """The codes of the errors with which so many requests end."""
    found: dict[str, str] = {}
    while len(found) < num_ends:
        taken = service.take(reader, DEADLINE_S)
        assert taken, f"nothing came any more after {found}"
        found.update({d.request_id: d.error.code for d in taken if d.error is not None})
    return found


@pytest.mark.timeout(120)
def test_requests_are_taken_and_cancelled_meanwhile(
    stranded: tuple[EngineService, DeltaQueue],
) -> None:
    service, reader = stranded
    num_steps = service.snapshot().engine.num_steps
    service.cancel("a")
    assert ends(service, reader, 1) == {"a": CANCELLED}
    service.submit([request("ccc", 3, 5)], reader)
    seen: list[int] = []
    service.call(lambda served: seen.append(len(served.engine.requests)))
    assert seen == [2]
    assert service.snapshot().engine.num_steps == num_steps, "looks for R-workers are no steps"
    service.cancel("bb")
    service.cancel("ccc")
    assert ends(service, reader, 2) == {"bb": CANCELLED, "ccc": CANCELLED}
    assert service.drain(DEADLINE_S)


@pytest.mark.timeout(120)
def test_it_is_closed_meanwhile(stranded: tuple[EngineService, DeltaQueue]) -> None:
    service, reader = stranded
    service.close()
    assert ends(service, reader, 2) == {"a": "closed", "bb": "closed"}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def recovery(clock: Clock, timeout_s: float) -> Recovery:
    """After the loss of the only two."""
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    for i in range(2):
        connect(hub, "S", InprocHub[FromRWorker, ToRWorker](), f"r{i}")
    lifecycle = Lifecycle(make_scheduler(schedule_options("greedy", 1), (8, 8), 16))
    requests = Requests(TextCodec(None), (), 97, GrammarMasks(TextCodec(None), 97, ()))
    state = EngineState(WorkerPool(hub, timeout_s=60.0), lifecycle, requests)
    made = Recovery(state, Nobody(timeout_s), clock)
    for holder in range(2):
        assert not made.is_stranded()
        state.fleet.lose(HolderId(holder), WorkerError(f"r{holder} is gone"))
        lifecycle.handle(made.lose(HolderId(holder)))
    return made


def test_when_nobody_comes_in_time_the_first_loss_is_raised() -> None:
    clock = Clock()
    made = recovery(clock, timeout_s=3.0)
    while clock.now < 102.9:
        assert made.is_stranded() and 0 < made.pause_s <= 0.5
        clock.now += 0.25
    clock.now += 0.25
    with pytest.raises(WorkerError, match="r0 is gone"):
        made.is_stranded()


def test_time_in_which_there_was_nothing_to_run_does_not_count() -> None:
    clock = Clock()
    made = recovery(clock, timeout_s=3.0)
    assert made.is_stranded()
    clock.now += 1000.0
    assert made.is_stranded()


@pytest.mark.timeout(120)
def test_a_loss_is_noticed_without_work_by_whoever_looks() -> None:
    """With nobody to come in its place, the service is broken from then on."""
    with rig(1) as made:
        service, reader = EngineService(lambda: Served(made)), DeltaQueue()
        service.open()
        service.submit([request("a", 3, 1)], reader)
        assert service.take(reader, DEADLINE_S)[-1].finish_reason == "length"
        made.fleet.send(HolderId(0), Shutdown())
        while service.snapshot().error is None:
            service.look()
            with contextlib.suppress(WorkerError):
                service.call(lambda served: None)
        assert service.snapshot().state == "broken"
        service.close()


class Willing:
    """A connection to an R-worker that answers every ``Hello``: by ``refusal``, if it has one."""

    refusal: Failed | None = None
    num_asked = 0

    peer = "R-worker r0"
    heard_s = None
    is_reached = True

    def __init__(self) -> None:
        self._answers: deque[FromRWorker] = deque()

    def check(self) -> None:
        pass

    def send(self, message: ToRWorker) -> None:
        assert isinstance(message, Hello)
        Willing.num_asked += 1
        welcome = Welcome("r0", 10, message.kv.block_size, 1)
        self._answers.append(self.refusal or welcome)

    def receive(self, timeout_s: float | None = None) -> FromRWorker:
        raise AssertionError("nobody waits for it")

    def poll(self) -> FromRWorker | None:
        return self._answers.popleft() if self._answers else None

    def close(self) -> None:
        pass


class Place:
    """Where one comes as often as it is wanted."""

    def __init__(self) -> None:
        self.connections: Sequence[Willing] = [Willing()]

    def reconnect(self, index: int) -> Willing:
        return Willing()

    def replace(self, index: int, connection: Willing) -> None:
        self.connections = [connection]


class Job:
    """An R-worker that is lost again and again."""

    def __init__(self, timeout_s: float) -> None:
        self.now_s = 1000.0
        self.comes = HubReplacements(Place(), HELLO, Deadlines(timeout_s, clock=lambda: self.now_s))

    def waits_s(self, *, serves_s: float) -> float:
        """Return the seconds from a loss to a replacement, which then serves ``serves_s``."""
        lost_s = self.now_s
        while not self.comes.look([0]):
            self.now_s += 0.25
        waited_s = self.now_s - lost_s
        self.comes.admit(0)
        self.now_s += serves_s
        return waited_s


@pytest.mark.parametrize(
    ("timeout_s", "longest"), [(300.0, LONGEST_PAUSE_S), (20.0, 5.0), (float("inf"), 60.0)]
)
def test_every_time_it_is_waited_for_twice_as_long(timeout_s: float, longest: float) -> None:
    job = Job(timeout_s)
    waited = [job.waits_s(serves_s=0.01) for _ in range(9)]
    doubling = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
    assert waited == pytest.approx([min(each, longest) for each in doubling], abs=0.25)


@pytest.mark.parametrize(("code", "num_asked"), [("model_mismatch", 7), ("busy", 80)])
def test_refusal_for_another_model_is_asked_ever_less_often(
    code: str, num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Willing, "refusal", Failed("r0", code, "no"))
    monkeypatch.setattr(Willing, "num_asked", 0)
    job, end_s = Job(300.0), 1080.0
    while job.now_s < end_s:
        assert not job.comes.look([0])
        job.now_s += 0.25
    assert Willing.num_asked == num_asked


def test_one_that_has_served_for_long_comes_at_once() -> None:
    job = Job(300.0)
    for _ in range(4):
        job.waits_s(serves_s=0.01)
    assert job.waits_s(serves_s=LONGEST_PAUSE_S) > 1.0
    assert job.waits_s(serves_s=0.01) == 0.0
    assert job.waits_s(serves_s=0.01) == pytest.approx(1.0, abs=0.25), "and from the beginning"
