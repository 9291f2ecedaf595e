"""What an engine's server sends to its client, in which order, and by which thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from counting_engine import Counting
from values import replace

from fastdecode.core.delta import Delta
from fastdecode.core.sequence import Request, SamplingParams
from fastdecode.engine.instances.server import EngineServer, RequestLimits
from fastdecode.engine.service import EngineService, Snapshot
from fastdecode.wire.instances import Deltas, EngineNumbers, FromEngine, StatusReport, Submit

LIMITS = RequestLimits(vocab_size=100, max_model_len=50)
GOOD = Request("good", (1, 2), SamplingParams(), 3, seed=0)


@pytest.fixture
def service() -> Iterator[EngineService]:
    service: EngineService = EngineService(Counting)
    service.open()
    yield service
    service.close()


class Client:
    """Takes what a server sends, whenever it wakes it."""

    def __init__(self, service: Any, totals: Callable[[], dict[str, Any]] | None = None) -> None:
        self._is_woken = threading.Event()
        self.server = EngineServer(
            service, LIMITS, lambda served: {"figures": 1}, self._is_woken.set, totals=totals
        )

    def until(self, is_last: Callable[[Delta], bool]) -> list[FromEngine]:
        """All messages up to the one with such a delta."""
        messages: list[FromEngine] = []
        while not any(
            is_last(x) for each in messages if isinstance(each, Deltas) for x in each.deltas
        ):
            self._is_woken.wait(self.server.wait_s)
            self._is_woken.clear()
            messages += self.server.messages()
        return messages


def test_totals_come_before_the_end_of_a_request(service: EngineService) -> None:
    client = Client(service, lambda: {"totals": "at the end"})
    client.server.obey(Submit([GOOD]))
    *before, last = client.until(lambda delta: delta.finish_reason is not None)
    assert isinstance(last, Deltas)
    reports = [each.figures for each in before if isinstance(each, StatusReport)]
    assert any(report.get("totals") == "at the end" for report in reports), reports


class Hanging:
    """A service whose engine answers nothing."""

    def look(self, at: object) -> None:
        """It is not called."""

    def snapshot(self) -> Snapshot:
        return Snapshot("ready", EngineNumbers())


def test_an_engine_that_hangs_reports_nothing_where_totals_are_wanted() -> None:
    assert list(Client(Hanging(), dict).server.messages()) == []
    (report,) = Client(Hanging()).server.messages()
    assert isinstance(report, StatusReport) and report.state == "ready"


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, prompt_token_ids=(1, 100)),
        replace(GOOD, prompt_token_ids=()),
        replace(GOOD, max_tokens=49),
        replace(GOOD, drawn={1: (5,)}),
        replace(GOOD, drawn={0: (5, 5, 5)}),
    ],
)
def test_a_refused_request_leaves_totals_to_the_engines_thread(
    service: EngineService, bad: Request
) -> None:
    askers = set()

    def totals() -> dict[str, Any]:
        askers.add(threading.get_ident())
        return {}

    client = Client(service, totals)
    client.server.obey(Submit([bad, replace(GOOD, request_id="other")]))
    told = client.until(lambda delta: delta.finish_reason is not None)
    errors = [x for each in told if isinstance(each, Deltas) for x in each.deltas if x.error]
    assert [each.request_id for each in errors] == ["good"]
    assert askers and threading.get_ident() not in askers


def test_the_end_of_a_sequence_outlives_what_is_said_after_it() -> None:
    """Nobody reads between a prompt's end and the offer of its KV."""
    over = Delta("a", 0, token_ids=(7,), finish_reason="stop", stop_reason=7, num_cached_tokens=5)
    both = over.then(Delta("a", 0, has_fetched=True))
    assert (both.finish_reason, both.stop_reason, both.num_cached_tokens) == ("stop", 7, 5)
    assert both.has_fetched and both.token_ids == (7,)
