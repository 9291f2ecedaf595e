"""An instance as its router sees it, and the status that engines report over a connection.
Whatever is read there is typed, finite and bounded: it is summed with what others report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, fields
from typing import Annotated, Any, Final, TypeAlias, TypeVar

from msgspec import Meta, ValidationError, convert

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.sequence import Request
from fastdecode.engine.stats import EngineFigures, EngineStats, HolderFigures, LatencyHistogram
from fastdecode.schedule.cache.rates import TierCounts
from fastdecode.schedule.life.adoption import AdoptionCounts
from fastdecode.wire.instances import (
    Cancel,
    EndConversation,
    InstanceWelcome,
    SetRole,
    StatusReport,
    Submit,
    ToEngine,
)

_T = TypeVar("_T")
_MOST: Final = 1 << 53  # of what is counted, and of seconds
_Whole: TypeAlias = Annotated[int, Meta(ge=0, le=_MOST)]
_Holders: TypeAlias = Annotated[list[dict[str, Any]], Meta(max_length=1 << 16)]
_KINDS: Final[dict[Any, Any]] = {
    "int": _Whole,
    "float": Annotated[float, Meta(ge=0, le=_MOST)],
    "str": str,
    "str | None": str | None,
}
"""How fields of these types are read."""
_FRESH: Final = EngineStats()
_NUMBERS, _TOTALS, _TIMES = (
    [each.name for each in fields(_FRESH) if isinstance(getattr(_FRESH, each.name), kinds)]
    for kinds in ((int, float), (AdoptionCounts, TierCounts), LatencyHistogram)
)
"""Fields of ``EngineStats``: numbers, totals that have totals of their own, and times."""


class EngineClient:
    """An instance. Belongs to the router's thread, and never waits.

    Args:
        name: What people call it: its address, for example.
        welcome: Its answer to the greeting. None if it is not connected yet.
        room: The welcome of an instance like it, for as long as it is not connected.
    """

    def __init__(
        self,
        name: str,
        send: Callable[[ToEngine], None],
        welcome: InstanceWelcome | None,
        room: InstanceWelcome,
    ) -> None:
        self.name = name
        self._send_to = send
        self.welcome = welcome
        self.role = room.role
        self.num_tokens, self.max_sequences = room.num_tokens, room.max_sequences
        self.broken: FastDecodeError | None = None
        """Why it is lost. None if it isn't."""
        if welcome is None:
            self.broken = WorkerError(f"instance {name} is not connected yet")
        self.stranded: FastDecodeError | None = None
        """Why it runs nothing for now, though it lives."""
        self.unsent: Exception | None = None  # why a message could not be sent
        self.num_steps = 0
        self.quiet_s = 0.0  # seconds without a message from it
        self.stats = EngineStats()
        self._figures: EngineFigures | None = None
        self._num_live: int | None = None  # R-workers, as reported

    def figures(self) -> EngineFigures | None:
        """Return those it has reported last, if any. R-workers of a lost instance are lost."""
        if self.broken is None or self._figures is None:
            return self._figures
        return self._figures.lost_with(self.broken.message)

    @property
    def num_live_r_workers(self) -> int:
        """All of a connected instance, unless it has reported fewer."""
        if self.broken is not None or self.welcome is None:
            return 0
        return self.welcome.num_r_workers if self._num_live is None else self._num_live

    @property
    def has_no_r_worker(self) -> bool:
        """Return whether it has lost all. With KV on its device it has none to lose."""
        return self.welcome is not None and self.welcome.num_r_workers > 0 and self._num_live == 0

    def update(self, status: StatusReport) -> None:
        """Take in its status. Raises ProtocolError: If it can't be true."""
        stats, figures = status_from_json(status.figures)
        status.check(0 if self.welcome is None else self.welcome.num_r_workers)
        self.stats, self._figures = stats, figures or self._figures
        self.num_steps, self._num_live = status.num_steps, status.num_live_r_workers

    def submit(self, request: Request, *, every_step: bool) -> None:
        """Send it a request to run. Raises FastDecodeError: If it is lost or stranded."""
        if (refusal := self.broken or self.stranded) is not None:
            raise copy(refusal)  # raised again it would keep the frames of each time
        self._send(Submit((request,), every_step))

    def cancel(self, request_id: str) -> None:
        self._send(Cancel((request_id,)))

    def set_role(self, role: InstanceRole) -> None:
        """Change what it is given."""
        self.role = role
        self._send(SetRole(role))

    def end_conversation(self, token_ids: Sequence[int], salt: str) -> None:
        self._send(EndConversation(tuple(token_ids), salt))

    def came_back(self, welcome: InstanceWelcome) -> None:
        """Use it again: it was lost, and has nothing of what it had."""
        self.quiet_s = 0.0
        self.broken = self.stranded = self.unsent = self._num_live = None
        if self.welcome is None:
            self.role = welcome.role
        self.welcome = welcome
        self.num_tokens, self.max_sequences = welcome.num_tokens, welcome.max_sequences
        if self.role is not welcome.role:
            self._send(SetRole(self.role))

    def _send(self, message: ToEngine) -> None:
        """Send, unless it is gone."""
        if self.broken is None and self.unsent is None:
            try:
                self._send_to(message)
            except Exception as error:
                self.unsent = error


def sum_stats(each: Sequence[EngineStats]) -> EngineStats:
    """Return the totals of several engines together."""
    total = EngineStats()
    for stats in each:
        _add(total, stats, _NUMBERS)
        for name in _TOTALS:
            own = getattr(total, name)
            _add(own, getattr(stats, name), [field.name for field in fields(own)])
        for name in _TIMES:
            getattr(total, name).add_all(getattr(stats, name))
    return total


def _add(total: Any, more: Any, names: Sequence[str]) -> None:
    for name in names:
        setattr(total, name, getattr(total, name) + getattr(more, name))


def sum_figures(each: Sequence[EngineFigures]) -> EngineFigures:
    """Return the figures of several engines together."""
    holders = tuple(holder for figures in each for holder in figures.r_workers)
    return EngineFigures(sum(figures.lanes for figures in each), holders)


def status_of(running: Any) -> dict[str, Any]:
    """Return the report of a ``RunningEngine``, in its thread and between two steps."""
    return status_to_json(running.engine.stats, running.engine.figures())


def status_to_json(stats: EngineStats, figures: EngineFigures | None) -> dict[str, Any]:
    """Return totals by their names, and figures if they are reported this time: the one form of
    status files, ``/status.json``, metrics and instances' reports."""
    return {
        **{name: getattr(stats, name) for name in _NUMBERS},
        **{name: asdict(getattr(stats, name)) for name in _TOTALS},
        "s_compute_s": stats.s_compute_s,
        "times": {name: list(getattr(stats, name).counts.items()) for name in _TIMES},
        **({} if figures is None else asdict(figures)),
    }


def status_from_json(said: Any) -> tuple[EngineStats, EngineFigures | None]:
    """Read a report. Raises ProtocolError: If no instance can have seen that."""
    try:
        stats = _read(EngineStats, said)
        for name in _TOTALS:
            setattr(stats, name, _read(type(getattr(stats, name)), said[name]))
        for name in _TIMES:
            for bucket, count in convert(said["times"][name], list[tuple[_Whole, _Whole]]):
                getattr(stats, name).add_count(bucket, count)
        if "r_workers" not in said:
            return stats, None
        holders = [_read(HolderFigures, each) for each in convert(said["r_workers"], _Holders)]
        return stats, EngineFigures(convert(said["lanes"], _Whole), tuple(holders))
    except (LookupError, TypeError, ValidationError) as error:
        raise ProtocolError(f"what should be an instance's totals is none: {error}") from None


def _read(kind: type[_T], said: Any) -> _T:
    """Return a dataclass of reported numbers and texts, which have its names."""
    every: Any = fields(kind)  # type: ignore[arg-type]
    kinds = {field.name: _KINDS[field.type] for field in every if field.type in _KINDS}
    return kind(**{name: convert(said[name], what) for name, what in kinds.items()})
