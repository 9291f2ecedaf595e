"""What a client says to an engine elsewhere, and what the engine answers: values, as
``EngineServer`` takes and gives them. How they travel is the channel's business: the HTTP
process's as JSON (``fastdecode.server.messages``), an instance's as messages of
``fastdecode.wire.instances.messages``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.delta import Delta
from fastdecode.core.errors import ProtocolError
from fastdecode.core.sequence import Request
from fastdecode.wire.arrays import Array
from fastdecode.wire.instances import messages as wire
from fastdecode.wire.instances.request_json import (
    delta_from_json,
    delta_to_json,
    packed,
    request_from_json,
    request_to_json,
    unpacked,
)


@dataclass(frozen=True)
class Submit:
    """Run these requests."""

    requests: Sequence[Request]
    every_step: bool = True
    """Report after each step, or each sequence once it is over."""


@dataclass(frozen=True)
class Cancel:
    """End these requests, and free what they hold."""

    request_ids: Sequence[str]


@dataclass(frozen=True)
class SetRole:
    """What the engine is given from now on."""

    role: InstanceRole


@dataclass(frozen=True)
class EndConversation:
    """Nothing continues a conversation that has come to these tokens."""

    token_ids: tuple[int, ...]
    salt: str


@dataclass(frozen=True)
class Deltas:
    """New output of requests."""

    deltas: Sequence[Delta]


@dataclass(frozen=True)
class StatusReport:
    """How an engine is. ``time.monotonic`` is the same for all processes of a host."""

    state: str
    """That of a ``Snapshot``."""
    num_steps: int = 0
    stepped_s: float | None = None
    """When the last step ended."""
    longest_step_s: float = 0.0
    """Of the latest steps."""
    num_running: int = 0
    """Sequences."""
    num_waiting: int = 0
    num_r_workers: int = 0
    num_live_r_workers: int = 0
    error: str | None = None
    """The code of what broke it."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What the engine has reported between two steps; empty: nothing yet."""

    @property
    def kv_used(self) -> float:
        """Share of the live R-workers' KV blocks that is reserved, 0 to 1."""
        workers = [each for each in self.figures.get("r_workers", ()) if not each.get("lost")]
        total = sum(worker["kv_blocks"] for worker in workers)
        return sum(worker["kv_blocks_used"] for worker in workers) / total if total else 0.0

    @property
    def fields(self) -> dict[str, Any]:
        """As ``/status.json``, status files and the page have it."""
        return {
            "num_running": self.num_running,
            "num_waiting": self.num_waiting,
            "num_r_workers": self.num_r_workers,
            "num_live_r_workers": self.num_live_r_workers,
            "kv_used": self.kv_used,
            "figures": self.figures,
        }


ToEngine: TypeAlias = Submit | Cancel | SetRole | EndConversation
FromEngine: TypeAlias = Deltas | StatusReport


def to_wire(message: ToEngine) -> wire.ToInstance:
    """As a controller says it to an instance."""
    match message:
        case Submit(requests, every_step):
            return wire.RunRequests(every_step, packed([request_to_json(r) for r in requests]))
        case Cancel(request_ids):
            return wire.CancelRequests(tuple(request_ids))
        case SetRole(role):
            return wire.SetInstanceRole(role)
        case EndConversation(token_ids, salt):
            return wire.EndConversation(np.asarray(token_ids, np.int64), salt)


def from_engine_to_wire(message: FromEngine) -> wire.InstanceSays:
    """As an instance says it to its controller."""
    match message:
        case Deltas(deltas):
            return wire.RequestDeltas(packed([delta_to_json(delta) for delta in deltas]))
        case StatusReport(num_steps=steps, num_live_r_workers=live, figures=figures):
            return wire.InstanceStatus(steps, live, packed(figures))


def from_wire(message: wire.ToInstance) -> ToEngine:
    """What a controller has sent. Raises ProtocolError: it can't be."""
    match message:
        case wire.RunRequests(every_step, said):
            return Submit([request_from_json(each) for each in _listed(said)], every_step)
        case wire.CancelRequests(names):
            if len(names) > wire.MAX_NAMES:
                raise ProtocolError(f"{len(names)} requests can't be cancelled at once")
            return Cancel(names)
        case wire.SetInstanceRole(role):
            return SetRole(role)
        case wire.EndConversation(token_ids, salt):
            return EndConversation(tuple(token_ids.tolist()), salt)
    raise ProtocolError(f"a controller sent {type(message).__name__}, unasked")


def deltas_of(message: wire.RequestDeltas) -> list[Delta]:
    """What an instance has sent of requests. Raises ProtocolError: it can't be."""
    return [delta_from_json(each) for each in _listed(message.said)]


def _listed(said: Array) -> list[Any]:
    listed = unpacked(said)
    if not isinstance(listed, list):
        raise ProtocolError("what should be a list of requests or their news is none")
    return listed
