"""The queue's arithmetic, and what health says of what is known."""

from __future__ import annotations

import pytest
from values import replace

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from fastdecode.core.errors import CapacityError
from fastdecode.server.client import OpenRequests
from fastdecode.server.front import Outlook, QueueAdmission
from fastdecode.server.http.errors import HttpRefusal, refused
from fastdecode.server.link import StatusReport
from fastdecode.server.metrics import Metrics


def refusal(admission: QueueAdmission, requests: int, tokens: int, now: float) -> int:
    with pytest.raises(HttpRefusal) as caught:
        admission.enter(object(), requests, tokens, now)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    return int(caught.value.headers["retry-after"])


def test_requests_and_tokens_are_bounded_but_an_empty_queue_takes_any() -> None:
    admission = QueueAdmission(max_requests=2, max_tokens=100)
    admission.enter("a", 1, 500, 0.0)
    refusal(admission, 1, 1, 0.0)
    admission.remove("a", 0.0)
    admission.enter("b", 1, 60, 0.0)
    admission.enter("c", 1, 40, 0.0)
    refusal(admission, 1, 0, 0.0)
    admission.remove("b")
    admission.remove("b")
    assert (admission.num_requests, admission.num_tokens) == (1, 40)
    refusal(admission, 1, 61, 0.0)
    admission.enter("d", 1, 60, 0.0)


def test_when_to_come_again_follows_from_how_fast_the_queue_moves() -> None:
    admission = QueueAdmission(max_requests=10, max_tokens=10**9)
    for i in range(20):  # two a second
        admission.enter(i, 1, 10, i / 2)
        admission.remove(i, i / 2)
    for i in range(10):
        admission.enter(("waits", i), 1, 10, 10.0)
    assert refusal(admission, 1, 10, 10.0) == 1
    assert refusal(admission, 10, 10, 10.0) == 5
    assert refusal(admission, 1000, 10, 10.0) == 60, "and never longer than a minute"
    assert refusal(admission, 1, 10, 200.0) == 5, "nothing has moved for a minute"


def test_health_says_the_first_thing_that_keeps_tokens_from_coming() -> None:
    seen = StatusReport(10, 100.0, 0.5, 1, 1, 2, 2, state="ready")
    good = Outlook(is_ready=True, seen=seen, seen_s=100.0)

    def of(
        outlook: Outlook, waiting_since_s: float | None = None, now: float = 101.0
    ) -> str | None:
        return outlook.trouble(waiting_since_s, now, 60.0)

    assert of(good) is None and of(good, 50.0) is None
    assert of(Outlook()) == of(replace(good, is_ready=False)) == "starting"
    assert of(replace(good, is_draining=True)) == "draining"
    assert of(replace(good, is_lost=True)) == "broken"
    assert of(replace(good, seen=replace(seen, state="broken"))) == "broken"
    closed = replace(good, seen=replace(seen, state="closed"))
    assert of(closed) == "broken" and of(replace(closed, is_draining=True)) == "draining"
    failed = replace(seen, state="closed", error="workers_lost")
    assert of(replace(good, seen=failed, is_draining=True)) == "broken"
    assert of(replace(good, seen=replace(seen, num_live_r_workers=1))) is None
    assert of(replace(good, seen=replace(seen, num_live_r_workers=0))) == "no_r_worker"
    assert of(good, now=121.0) == "stalled", "nothing was heard of it"
    late = replace(good, seen_s=200.0)
    assert of(late, 50.0, 200.0) == "stalled" and of(late, None, 200.0) is None
    assert of(late, 150.0, 200.0) is None, "there has been work for a while only"
    slow = replace(late, seen=replace(seen, longest_step_s=11.0))
    assert of(slow, 50.0, 200.0) is None, "its steps take that long"


def test_only_what_could_never_fit_is_the_clients_mistake() -> None:
    never = refused(CapacityError("more than all have", code="exceeds_capacity"))
    assert (never.status, never.code, str(never)) == (400, "exceeds_capacity", "more than all have")
    for code in (None, "of_another_kind"):
        now = refused(CapacityError("R-worker r7 at 10.0.0.7 is full", code=code))
        assert (now.status, now.code, now.kind) == (503, "out_of_capacity", "server_error")
        assert now.headers == {"retry-after": "1"} and "r7" not in str(now)


def test_who_is_being_prepared_enters_with_his_size_later() -> None:
    admission = QueueAdmission(max_requests=2, max_tokens=100)
    admission.enter("a", 1, 0, 0.0)
    admission.enter("b", 1, 0, 0.0)
    refusal(admission, 1, 0, 0.0)
    admission.enter("a", 1, 90, 0.0)
    assert (admission.num_requests, admission.num_tokens) == (2, 90)
    with pytest.raises(HttpRefusal):
        admission.enter("b", 1, 11, 0.0)
    assert (admission.num_requests, admission.num_tokens) == (1, 90), "who is refused is out"
    admission.enter("a", 5, 500, 0.0)
    assert (admission.num_requests, admission.num_tokens) == (5, 500), "alone in it, any may"


def test_who_went_away_was_not_answered() -> None:
    metrics = Metrics(64)
    for reason in ("stop", "length", "abort", "error"):
        metrics.finished(OpenRequests([], metrics), reason)
    assert (metrics.num_succeeded, metrics.ended.total()) == (2, 4)
