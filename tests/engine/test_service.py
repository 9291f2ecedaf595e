"""The one way into an engine, around one that only counts: who is told what,
whatever happens meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
from counting_engine import Counting

from fastdecode.core.delta import CANCELLED, Delta, DeltaQueue, Listener
from fastdecode.core.errors import CapacityError, ConfigError, FastDecodeError, WorkerError
from fastdecode.core.sequence import Request, SamplingParams
from fastdecode.engine.service import EngineService

PATIENCE_S = 60.0
ENDLESS = 10**12  # more tokens than anybody says before he is stopped


def request(request_id: str, max_tokens: int = 3, n: int = 1) -> Request:
    return Request(request_id, (1,), SamplingParams(n=n), max_tokens, seed=0)


@pytest.fixture
def serve() -> Iterator[Callable[[Counting], EngineService]]:
    opened: list[EngineService] = []

    def make(engine: Counting) -> EngineService:
        opened.append(EngineService(lambda: engine))
        opened[-1].open()
        return opened[-1]

    yield make
    for service in opened:
        service.close()


def read(service: EngineService, reader: DeltaQueue, num_ends: int) -> list[Delta]:
    """Deltas until so many sequences, or requests with an error, are over."""
    found: list[Delta] = []
    while sum(d.finish_reason is not None or d.error is not None for d in found) < num_ends:
        taken = service.take(reader, PATIENCE_S)
        assert taken, f"nothing came any more after {found}"
        found += taken
    return found


def tokens_of(deltas: list[Delta], request_id: str, index: int = 0) -> list[int]:
    return [
        t for d in deltas if (d.request_id, d.index) == (request_id, index) for t in d.token_ids
    ]


Serve = Callable[[Counting], EngineService]


def test_every_reader_is_told_of_its_own_requests(serve: Serve) -> None:
    service = serve(engine := Counting())
    first, second = DeltaQueue(), DeltaQueue(every_step=False)
    service.submit([request("a", 5, n=2), request("b", 2)], first)
    service.submit([request("c", 4)], second)
    of_first = read(service, first, 3)
    assert tokens_of(of_first, "a", 0) == tokens_of(of_first, "a", 1) == [0, 1, 2, 3, 4]
    assert tokens_of(of_first, "b") == [0, 1]
    of_second = read(service, second, 1)
    assert {d.request_id for d in of_first} == {"a", "b"} and {d.request_id for d in of_second} == {
        "c"
    }
    assert len(engine.threads) == 1


def test_refusals_end_one_request_alone(serve: Serve) -> None:
    service, reader = serve(Counting()), DeltaQueue()
    service.submit([request("big", 2000), request("a", 3), request("a", 3), request("b")], reader)
    errors = {d.request_id: d.error for d in read(service, reader, 4) if d.error is not None}
    assert isinstance(errors["big"], CapacityError)
    assert errors["a"] is not None and errors["a"].code == "duplicate_id"
    assert set(errors) == {"big", "a"}


def test_a_cancelled_request_ends_with_an_error_once(serve: Serve) -> None:
    engine, reader = Counting(most_tokens=ENDLESS), DeltaQueue()
    service = serve(engine)
    service.submit([request("a", ENDLESS), request("b", 3)], reader)
    service.cancel("a")
    service.cancel("a")
    service.cancel("nobody")
    ends = {d.request_id: d for d in read(service, reader, 2) if d.error or d.finish_reason}
    assert ends["a"].error is not None and ends["a"].error.code == CANCELLED
    assert ends["b"].finish_reason == "length"
    assert not engine.said


def test_a_forgotten_reader_is_told_nothing_more(serve: Serve) -> None:
    engine, gone, reader = Counting(most_tokens=ENDLESS), DeltaQueue(), DeltaQueue()
    service = serve(engine)
    service.submit([request("a", ENDLESS)], gone)
    forget = service.forgetting(gone)
    forget()
    forget()
    service.submit([request("a", 2)], reader)  # its id is free again
    assert tokens_of(read(service, reader, 1), "a") == [0, 1]


@pytest.mark.parametrize(
    ("error", "told", "code"),
    [
        (WorkerError("it failed", code="s_worker_failed"), "it failed", "s_worker_failed"),
        (KeyError("x"), "a step broke down before: KeyError: 'x'", "internal_error"),
        (
            RuntimeError("shapes differ"),
            "a step broke down before: RuntimeError: shapes differ",
            "internal_error",
        ),
    ],
)
def test_a_step_that_breaks_ends_all_and_whoever_comes_later(
    serve: Serve, error: Exception, told: str, code: str
) -> None:
    def fail() -> None:
        raise error

    service, reader = serve(Counting(before_step=fail)), DeltaQueue()
    service.submit([request("a"), request("b")], reader)
    errors = [delta.error for delta in read(service, reader, 2)]
    assert [(str(each), each and each.code) for each in errors] == [(told, code)] * 2
    assert service.snapshot().state == "broken"
    with pytest.raises(FastDecodeError, match=told):
        service.submit([request("c")], reader)


def test_draining_ends_what_is_open_and_takes_nothing_new(serve: Serve) -> None:
    service, reader = serve(Counting()), DeltaQueue()
    service.submit([request("a", 50)], reader)
    assert service.drain(PATIENCE_S)
    assert service.snapshot().state == "draining"
    assert tokens_of(read(service, reader, 1), "a") == list(range(50))
    with pytest.raises(ConfigError) as refused:
        service.submit([request("b")], reader)
    assert refused.value.code == "draining"


def test_who_comes_too_late_is_answered_all_the_same(serve: Serve) -> None:
    """A request that was on its way when the engine was closed, and who waits
    for the end of others'."""
    service, reader = serve(Counting()), DeltaQueue()
    service.close()
    service._put(lambda: service._accept([request("late")], reader))  # it found the service open
    (last,) = reader.take(0)
    assert last.error is not None and last.error.code == "closed"
    assert service.drain(PATIENCE_S)


def test_only_the_waiting_requests_of_one_reader_are_cancelled(serve: Serve) -> None:
    service = serve(Counting())
    mine, others = DeltaQueue(), DeltaQueue()
    service.submit([request("mine", 900)], mine)
    service.submit([request("others", 3)], others)
    service.cancel_waiting(mine)
    assert tokens_of(read(service, others, 1), "others") == [0, 1, 2]


def test_closing_ends_what_is_open_with_an_error(serve: Serve) -> None:
    engine, reader = Counting(most_tokens=ENDLESS), DeltaQueue()
    service = serve(engine)
    service.submit([request("a", ENDLESS)], reader)
    service.take(reader, PATIENCE_S)
    service.close()
    service.close()
    assert engine.is_closed and service.snapshot().state == "closed"
    (last,) = [d for d in reader.take(0) if d.error is not None]
    assert last.error is not None and last.error.code == "closed"
    with pytest.raises(ConfigError, match="closed"):
        service.submit([request("b")], reader)


def test_what_closing_raises_reaches_whoever_closes(serve: Serve) -> None:
    def fail() -> None:
        raise WorkerError("r0 did not stop")

    service = serve(Counting(before_close=fail))
    with pytest.raises(WorkerError, match="did not stop"):
        service.close()
    service.close()


def test_what_making_raises_reaches_whoever_opens() -> None:
    def make() -> Counting:
        raise ConfigError("no such device")

    service = EngineService(make)
    with pytest.raises(ConfigError, match="no such device"):
        service.open()
    service.close()


def test_a_call_is_made_between_steps_and_its_error_comes_back(serve: Serve) -> None:
    service = serve(engine := Counting())
    seen: list[Counting] = []
    service.call(seen.append)
    assert seen == [engine]

    def fail(engine: Counting) -> None:
        raise ValueError("not like this")

    with pytest.raises(ValueError, match="not like this"):
        service.call(fail)
    assert service.snapshot().state == "ready"


def test_a_call_ends_though_what_was_asked_before_it_breaks_the_engine_down(serve: Serve) -> None:
    class Unforgetful(Counting):
        def cancel(self, request_id: str) -> bool:
            raise WorkerError("a stage is lost")

    service = serve(Unforgetful())
    service.submit([request("a")], reader := DeltaQueue())
    service.cancel("a")
    with pytest.raises(WorkerError, match="a stage is lost"):
        service.call(lambda engine: None)
    (delta,) = read(service, reader, 1)
    assert delta.error is not None and "a stage is lost" in delta.error.message


def test_a_mistake_while_a_request_is_queued_ends_that_request_alone(serve: Serve) -> None:
    class Mistaken(Counting):
        def submit(self, request: Request, listener: Listener | None = None) -> None:
            super().submit(request, listener)
            if request.request_id == "b":
                raise TypeError("unsupported operand")

    service = serve(Mistaken())
    service.submit([request("a"), request("b"), request("c")], reader := DeltaQueue())
    found = read(service, reader, 3)
    (ended,) = [delta for delta in found if delta.error is not None]
    assert ended.request_id == "b" and "TypeError: unsupported operand" in str(ended.error)
    assert tokens_of(found, "a") == tokens_of(found, "c") == [0, 1, 2]
    assert service.snapshot().state == "ready"


def test_a_mistake_while_a_request_is_cancelled_ends_no_other(serve: Serve) -> None:
    class Unforgetful(Counting):
        def cancel(self, request_id: str) -> bool:
            raise ValueError("a mistake of ours")

    service = serve(Unforgetful())
    service.submit([request("a", 500), request("b")], reader := DeltaQueue())
    service.cancel("a")
    found = read(service, reader, 2)
    assert [d.error.code for d in found if d.error is not None] == [CANCELLED]
    assert tokens_of(found, "b") == [0, 1, 2]
    assert service.snapshot().state == "ready"


def test_a_mistake_in_a_look_breaks_nothing(serve: Serve) -> None:
    def mistaken(engine: Counting) -> None:
        raise TypeError("3 + 'x'")

    service = serve(Counting())
    service.look(mistaken)
    service.submit([request("a")], reader := DeltaQueue())
    service.look(mistaken)
    assert tokens_of(read(service, reader, 1), "a") == [0, 1, 2]


def test_what_a_look_says_cannot_go_on_is_broken(serve: Serve) -> None:
    def gives_up(engine: Counting) -> None:
        raise WorkerError("no instance can be heard")

    service = serve(Counting(most_tokens=ENDLESS))
    service.submit([request("a", ENDLESS)], reader := DeltaQueue())
    service.look(gives_up)
    (delta,) = [x for x in read(service, reader, 1) if x.error is not None]
    assert "no instance can be heard" in str(delta.error)


def test_a_look_may_come_while_the_engine_is_made() -> None:
    """By a thread that it has started: nothing of what it says is left out."""
    looked = threading.Event()

    def make() -> Counting:
        service.look(lambda engine: looked.set())
        return Counting()

    service: EngineService = EngineService(make)
    service.open()
    assert looked.wait(PATIENCE_S)
    service.close()


def test_whoever_asks_much_does_not_starve_the_steps() -> None:
    """Each look asks for the next one, until the request is over."""
    reader = DeltaQueue()
    service = EngineService(Counting)
    service.open()

    def again(engine: Counting) -> None:
        if engine.said or not engine.num_steps:
            service.look(again)

    service.look(again)
    service.submit([request("a", 50)], reader)
    assert tokens_of(read(service, reader, 1), "a") == list(range(50))
    service.close()


class Interrupted(SimpleQueue[BaseException | None]):
    """Raise an interrupt when the loop reports that the engine was made."""

    def put(
        self, item: BaseException | None, block: bool = True, timeout: float | None = None
    ) -> None:
        super().put(item, block, timeout)
        if item is None:
            raise KeyboardInterrupt


def test_an_engine_that_was_made_is_closed_whatever_comes_then() -> None:
    engine, made = Counting(), Interrupted()
    service = EngineService(lambda: engine)
    service._made = made
    service._live()
    assert engine.is_closed and service.snapshot().state == "closed" and not engine.num_steps
    assert made.get(timeout=PATIENCE_S) is None
    assert isinstance(made.get(timeout=PATIENCE_S), KeyboardInterrupt)


def test_a_snapshot_waits_for_no_step_and_a_slow_reader_keeps_none_waiting() -> None:
    in_step, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def wait() -> None:
        in_step.release()
        assert go_on.acquire(timeout=PATIENCE_S)

    engine, reader = Counting(before_step=wait), DeltaQueue()
    service = EngineService(lambda: engine)
    service.open()
    assert service.snapshot().engine.stepped_s is None
    service.submit([request("a", 100)], reader)
    assert in_step.acquire(timeout=PATIENCE_S)
    now = service.snapshot()  # in the middle of the first step
    assert (now.state, now.engine.num_steps, now.engine.workers) == ("ready", 0, (2, 2))
    for _ in range(99):
        go_on.release()
        assert in_step.acquire(timeout=PATIENCE_S)
    now = service.snapshot()
    assert (now.engine.num_steps, now.engine.num_running, now.engine.num_waiting) == (99, 1, 0)
    assert now.engine.stepped_s is not None
    (unread,) = reader.take(0)
    assert unread.token_ids == tuple(range(99))
    go_on.release()
    assert read(service, reader, 1)[-1].token_ids == (99,)
    service.close()


def test_requests_come_from_any_thread() -> None:
    engine = Counting()
    service = EngineService(lambda: engine)
    service.open()
    found: dict[int, list[int]] = {}

    def use(number: int) -> None:
        reader = DeltaQueue()
        for turn in range(20):
            service.submit([request(f"{number}.{turn}", 1 + turn)], reader)
            found.setdefault(number, []).append(
                len(tokens_of(read(service, reader, 1), f"{number}.{turn}"))
            )

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    service.close()
    assert found == {number: list(range(1, 21)) for number in range(8)}
    assert len(engine.threads) == 1 and threading.get_ident() not in engine.threads


def test_without_work_no_step_is_made_and_the_thread_sleeps() -> None:
    engine, reader = Counting(), DeltaQueue()
    service = EngineService(lambda: engine)
    service.open()
    service.submit([request("a", 3)], reader)
    read(service, reader, 1)
    looks: list[int] = []

    class Watched(dict[str, tuple[Request, Listener | None, int]]):
        def __bool__(self) -> bool:
            looks.append(1)
            return len(self) > 0

    service.call(lambda engine: setattr(engine, "said", Watched()))
    service.call(lambda engine: None)
    num_looks = len(looks)
    threading.Event().wait(0.2)  # the time in which a thread that polls would have looked
    assert engine.num_steps == 3 and len(looks) - num_looks <= 2
    service.close()


def test_a_fork_is_told_that_the_engine_isnt_its_own() -> None:
    service = EngineService(Counting)
    service.open()
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            service.submit([request("a")], DeltaQueue())
        except ConfigError as error:
            os.write(tell, error.code.encode())
        service.close()  # returns
        os.write(tell, b" closed")
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(tell)
    with os.fdopen(told) as end:
        assert end.read() == "forked closed"
    reader = DeltaQueue()
    service.submit([request("a", 2)], reader)  # of the parent it still is
    assert tokens_of(read(service, reader, 1), "a") == [0, 1]
    service.close()
