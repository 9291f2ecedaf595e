"""An instance that lies: stands before a real one, passes on what both sides say, and
once makes something else of it."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Raw
from raw_messages import RawDeltas, raw_report, said
from values import replace

from fastdecode.core.errors import FastDecodeError, WorkerError
from fastdecode.engine.instances.addresses import InstanceHub, InstanceListener
from fastdecode.wire.instances.messages import (
    Deltas,
    InstanceHello,
    InstanceWelcome,
    StatusReport,
    Submit,
)
from fastdecode.wire.messages import Failed
from fastdecode.wire.transport import PeerLostError

_LOOK_S = 0.005
_END_S = 30.0
TOKENS, REASON, ERROR, SOURCES = "token_ids", "finish_reason", "error", "sources"
FETCHED, NAME = "has_fetched", "request_id"
"""Fields of a delta."""

Lie = Callable[[Any, "Heard"], "list[Any] | None"]
"""Makes other messages of one that an instance has sent; None: not of that one."""


class Heard:
    """What the instance was asked."""

    def __init__(self) -> None:
        self.limits: dict[str, int] = {}
        """Tokens that each request may come to, by its name."""
        self.is_mute = False
        """It says nothing any more."""


def _of_deltas(change: Callable[[dict[str, Any], Heard], bool]) -> Lie:
    """A lie about the first delta that can be changed so."""

    def lie(message: Any, heard: Heard) -> list[Any] | None:
        if not isinstance(message, Deltas):
            return None
        deltas = [said(delta) for delta in message.deltas]
        if not any(change(delta, heard) for delta in deltas):
            return None
        return [RawDeltas(deltas)]

    return lie


def _of_status(change: Callable[[dict[str, Any]], None]) -> Lie:
    def lie(message: Any, heard: Heard) -> list[Any] | None:
        if not isinstance(message, StatusReport):
            return None
        figures = copy.deepcopy(dict(message.figures))
        if "r_workers" not in figures:
            return None
        change(figures)
        return [raw_report(message, figures)]

    return lie


def _live(number: int) -> Lie:
    def lie(message: Any, heard: Heard) -> list[Any] | None:
        if not isinstance(message, StatusReport):
            return None
        return [replace(message, num_live_r_workers=number)]

    return lie


def _raw(kind: type[Any], fields: Any) -> Lie:
    def lie(message: Any, heard: Heard) -> list[Any] | None:
        if not isinstance(message, kind):
            return None
        if isinstance(message, StatusReport):
            return [raw_report(message, fields)]
        return [RawDeltas(fields)]

    return lie


def _add_tokens(delta: dict[str, Any], heard: Heard) -> bool:
    if not delta[TOKENS]:
        return False
    delta[TOKENS] = [*delta[TOKENS], *[7] * heard.limits.get(delta[NAME], 1)]
    return True


def _beyond(delta: dict[str, Any], heard: Heard) -> bool:
    if not delta[TOKENS]:
        return False
    delta[TOKENS] = [*delta[TOKENS][:-1], (1 << 31) - 1]
    return True


def _half_tokens(delta: dict[str, Any], heard: Heard) -> bool:
    if not delta[TOKENS]:
        return False
    delta[TOKENS] = [*delta[TOKENS][:-1], 6.5]
    return True


def _too_early(delta: dict[str, Any], heard: Heard) -> bool:
    if not delta[TOKENS] or delta[REASON] == "stop":
        return False
    if delta[REASON] == "length":
        delta[TOKENS] = delta[TOKENS][:-1]
    delta[REASON] = "length"
    return True


def _fails(code: str) -> Callable[[dict[str, Any], Heard], bool]:
    def change(delta: dict[str, Any], heard: Heard) -> bool:
        delta[ERROR] = ["RequestError", "no reason", code]
        return True

    return change


def _offers_elsewhere(delta: dict[str, Any], heard: Heard) -> bool:
    """From where nobody is, by a ticket that nobody gave."""
    for source in delta[SOURCES]:
        source["address"], source["ticket"] = "tcp://127.0.0.1:9", "0" * 32
    return bool(delta[SOURCES])


def _offers_much(delta: dict[str, Any], heard: Heard) -> bool:
    for source in delta[SOURCES]:
        source["num_tokens"] += 1 << 20
    return bool(delta[SOURCES])


def _offers_at_length(delta: dict[str, Any], heard: Heard) -> bool:
    for source in delta[SOURCES]:
        source["address"] = "tcp://" + "x" * (1 << 20)
    return bool(delta[SOURCES])


def _has_fetched(delta: dict[str, Any], heard: Heard) -> bool:
    if delta[FETCHED] or delta[SOURCES]:
        return False
    delta[FETCHED] = True
    return True


def _unknown(message: Any, heard: Heard) -> list[Any] | None:
    """Requests that were never asked of it, and nothing else that is untrue."""
    if not isinstance(message, Deltas):
        return None
    delta = said(message.deltas[0])
    delta[NAME], delta[TOKENS] = "4711.4711", [7] * 9
    return [message, RawDeltas([delta])]


def _breaks_down(message: Any, heard: Heard) -> list[Any] | None:
    """As an engine does that breaks down, and whose requests say so first."""
    if not isinstance(message, Deltas):
        return None
    error = ["FastDecodeError", "a step broke down before: KeyError: 'x'", "internal_error"]
    ended = [{NAME: name, "index": 0, ERROR: error} for name in heard.limits]
    return [RawDeltas(ended), Failed("liar", "internal_error", error[1])]


def _welcomes_again(message: Any, heard: Heard) -> list[Any] | None:
    return [heard.welcome] if isinstance(message, Deltas) else None  # type: ignore[attr-defined]


def _falls_silent(message: Any, heard: Heard) -> list[Any] | None:
    if not isinstance(message, Deltas):
        return None
    heard.is_mute = True
    return []


LIES: Mapping[str, Lie] = {
    "steps 1e999": _of_status(lambda said: said.update(num_steps=float("inf"))),
    "seconds 1e999": _of_status(lambda said: said.update(prefill_s=float("inf"))),
    "seconds as text": _of_status(lambda said: said.update(wait_s="3")),
    "steps below 0": _of_status(lambda said: said.update(num_steps=-1)),
    "histogram": _of_status(lambda said: said["times"].update(ttft=[[3, float("inf")]])),
    "figures as text": _of_status(lambda said: said.update(lanes="many")),
    "figures without R-workers": _of_status(lambda said: said.update(r_workers=7)),
    "R-workers of nothing": _of_status(lambda said: said.update(r_workers=[None])),
    "no status": _raw(StatusReport, []),
    "no R-worker": _live(0),
    "R-workers below 0": _live(-1),
    "more R-workers than there are": _live(1 << 20),
    "no msgpack": _raw(Deltas, Raw(b"\xc1")),
    "deep lists": _raw(Deltas, Raw(b"\x91" * 100_000 + b"\x01")),
    "no list": _raw(Deltas, 7),
    "too many tokens": _of_deltas(_add_tokens),
    "tokens beyond the vocabulary": _of_deltas(_beyond),
    "tokens that are none": _of_deltas(_half_tokens),
    "an end too early": _of_deltas(_too_early),
    "an error": _of_deltas(_fails("invalid")),
    "a cancelled request": _of_deltas(_fails("cancelled")),
    "an unknown request": _unknown,
    "sources elsewhere": _of_deltas(_offers_elsewhere),
    "sources of more": _of_deltas(_offers_much),
    "sources at length": _of_deltas(_offers_at_length),
    "a fetch of nothing": _of_deltas(_has_fetched),
    "errors before Failed": _breaks_down,
    "another welcome": _welcomes_again,
    "silence": _falls_silent,
}
"""By what is untrue."""
ONLY_PREFILL = ("sources elsewhere", "sources of more", "sources at length")
HARMLESS = ("no R-worker", "an error", "a cancelled request", "an unknown request",
            "sources elsewhere")  # fmt: skip
"""After which the instance isn't lost, or not at once."""


class LyingInstance(threading.Thread):
    """Stands before an instance.

    Args:
        behind: that one's address.
        lie: see ``LIES``; None: it doesn't lie until ``lie``.
        silence_s: of both sides.
        after: messages of the instance's that are passed on as they are before one
            may become a lie.
        at: ``tcp://HOST:PORT``; the port may be *.
    """

    def __init__(self, behind: str, lie: str | None, silence_s: float, after: int = 0) -> None:
        super().__init__(name="liar", daemon=True)
        self._behind = behind
        self._silence_s = silence_s
        self._lie: Lie | None = None if lie is None else LIES[lie]
        self._after = after
        self._listener = InstanceListener("tcp://127.0.0.1:*", "liar", silence_s=silence_s)
        self.address = self._listener.address
        self._controller: int | None = None
        self._hub: InstanceHub | None = None
        self._heard = Heard()
        self.has_lied = threading.Event()
        self.is_over = False
        self.failed: Exception | None = None
        """What went wrong with the liar itself."""

    def run(self) -> None:
        try:
            while not self.is_over:
                self._pass_in()
                self._pass_out()
        except Exception as error:
            self.failed = error
        finally:
            self._hang_up()

    def lie(self, lie: str | None) -> None:
        """From now on, once; None: not any more. Any thread."""
        self.has_lied.clear()
        self._lie = None if lie is None else LIES[lie]

    def end(self) -> None:
        self.is_over = True
        self._listener.wake()
        self.join(_END_S)
        self._listener.close()

    def _pass_in(self) -> None:
        try:
            peer, message = self._listener.receive_any(_LOOK_S)
        except PeerLostError as lost:
            self._listener.connections[lost.index].close()
            if lost.index == self._controller:
                self._hang_up()
            return
        except WorkerError:
            return  # nothing came
        if isinstance(message, InstanceHello):
            self._hang_up()
            self._controller, self._heard = peer, Heard()
            self._hub = InstanceHub([self._behind], None, self._silence_s)
        if isinstance(message, Submit):
            for request in message.requests:
                self._heard.limits[request.request_id] = request.max_tokens
        if self._hub is not None:
            with contextlib.suppress(WorkerError):
                self._hub.connections[0].send(message)

    def _pass_out(self) -> None:
        """All that the instance says."""
        while self._hub is not None and self._controller is not None:
            try:
                message = self._hub.connections[0].poll()
            except FastDecodeError:
                self._hang_up()
                return
            if message is None:
                return
            for told in self._told(message):
                self._send(told)

    def _told(self, message: Any) -> Iterable[Any]:
        if isinstance(message, InstanceWelcome):
            self._heard.welcome = message  # type: ignore[attr-defined]
        if self._heard.is_mute:
            return []
        if isinstance(message, Deltas) and self._after:
            self._after -= 1
        elif self._lie is not None and not self._after:
            told = self._lie(message, self._heard)
            if told is not None:
                self._lie = None
                self.has_lied.set()
                return told
        return [message]

    def _send(self, message: Any) -> None:
        assert self._controller is not None
        with contextlib.suppress(WorkerError):  # the controller may have hung up by now
            self._listener.connections[self._controller].send(message)

    def _hang_up(self) -> None:
        hub, self._hub = self._hub, None
        if self._controller is not None:
            self._listener.connections[self._controller].close()
            self._controller = None
        if hub is not None:
            hub.close()


@contextlib.contextmanager
def lying_instance(
    behind: str, lie: str, silence_s: float, after: int = 0
) -> Iterator[LyingInstance]:
    """One that listens."""
    liar = LyingInstance(behind, lie, silence_s, after)
    liar.start()
    try:
        yield liar
    finally:
        liar.end()
    assert liar.failed is None
