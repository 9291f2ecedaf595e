"""An instance, as its controller sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.errors import FastDecodeError, WorkerError
from fastdecode.core.sequence import Request
from fastdecode.engine.instances.status_report import status_from_json
from fastdecode.engine.stats import EngineFigures, EngineStats
from fastdecode.wire.instances import (
    Cancel,
    EndConversation,
    InstanceWelcome,
    SetRole,
    StatusReport,
    Submit,
    ToEngine,
    ToInstance,
)


class Post(Protocol):
    """See ``InstanceConnections.post``."""

    def __call__(self, number: int, turn: int, message: ToInstance) -> None: ...


class RemoteEngine:
    """See ``EngineClient``. Belongs to the thread that owns the controller.

    Args:
        number: of its connection.
        address: of it, by which people know it.
        post: sends to it.
        welcome: what it has said it is; None: it is not connected yet.
        room: what it has room for as long as it is not.
    """

    def __init__(
        self,
        number: int,
        address: str,
        post: Post,
        welcome: InstanceWelcome | None,
        room: InstanceWelcome,
    ) -> None:
        self.number = number
        self.name = address
        self._post = post
        self.turn = 0
        """How often it was there before."""
        self.welcome = welcome
        self.broken: FastDecodeError | None = None
        """Why it is lost; None: it isn't."""
        if welcome is None:
            self.broken = WorkerError(f"instance {address} is not connected yet")
        self.stranded: FastDecodeError | None = None
        """Why it runs nothing for now, though it lives; None: it runs what it is given."""
        self.num_tokens, self.max_sequences = room.num_tokens, room.max_sequences
        self.num_steps = 0
        self.stats = EngineStats()
        self._figures: EngineFigures | None = None
        self._num_live: int | None = None  # R-workers; None: it hasn't reported any

    def figures(self) -> EngineFigures | None:
        """As it has reported them last; R-workers of one that is lost are lost."""
        if self.broken is None or self._figures is None:
            return self._figures
        return self._figures.lost_with(self.broken.message)

    @property
    def num_live_r_workers(self) -> int:
        """All of one that is there, unless it has reported fewer."""
        if self.broken is not None or self.welcome is None:
            return 0
        return self.welcome.num_r_workers if self._num_live is None else self._num_live

    @property
    def has_no_r_worker(self) -> bool:
        """Whether it has lost all; one with KV on its device has none to lose."""
        return self.welcome is not None and self.welcome.num_r_workers > 0 and self._num_live == 0

    def update(self, status: StatusReport) -> None:
        """Take in its status. Raises ProtocolError: it can't be."""
        stats, figures = status_from_json(status.figures)
        status.check(0 if self.welcome is None else self.welcome.num_r_workers)
        self.stats, self._figures = stats, figures or self._figures
        self.num_steps, self._num_live = status.num_steps, status.num_live_r_workers

    def submit(self, request: Request, *, every_step: bool) -> None:
        """Have it run a request. Raises FastDecodeError: it is lost, or stranded."""
        refusal = self.broken or self.stranded
        if refusal is not None:
            raise refusal
        self._send(Submit((request,), every_step))

    def cancel(self, request_id: str) -> None:
        """End a request, and let go of what it holds."""
        self._send(Cancel((request_id,)))

    def give_role(self, role: InstanceRole) -> None:
        """What it will be given from now on."""
        self._send(SetRole(role))

    def end_conversation(self, token_ids: Sequence[int], salt: str) -> None:
        """Nobody goes on with a conversation that has come to these tokens."""
        self._send(EndConversation(tuple(token_ids), salt))

    def came_back(self, welcome: InstanceWelcome, role: InstanceRole) -> None:
        """It was lost, and is there again."""
        self.turn += 1
        self.broken = self.stranded = self._num_live = None
        self.welcome = welcome
        self.num_tokens, self.max_sequences = welcome.num_tokens, welcome.max_sequences
        if role is not welcome.role:
            self.give_role(role)

    def _send(self, message: ToEngine) -> None:
        """Lost if the instance is gone."""
        if self.broken is None:
            self._post(self.number, self.turn, message)
