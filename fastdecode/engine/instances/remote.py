"""An instance that is a process of its own, as its controller sees it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.errors import FastDecodeError, ProtocolError
from fastdecode.core.sequence import Request
from fastdecode.wire.arrays import Array
from fastdecode.wire.instances.messages import (
    CancelRequests,
    EndConversation,
    InstanceWelcome,
    RunRequests,
    SetInstanceRole,
    ToInstance,
)
from fastdecode.wire.instances.request_json import request_to_json


class Post(Protocol):
    """See ``InstanceConnections.post``."""

    def __call__(self, number: int, turn: int, message: ToInstance) -> None: ...


class RemoteInstance:
    """See ``fastdecode.engine.instances.router.Instance``. Belongs to the thread
    that owns the controller.

    Args:
        number: of its line.
        address: of it, by which people know it.
        post: sends to it.
        welcome: what it has said it is.
    """

    def __init__(self, number: int, address: str, post: Post, welcome: InstanceWelcome) -> None:
        self.number = number
        self.name = address
        self._post = post
        self.turn = 0
        """How often it was there before."""
        self.broken: FastDecodeError | None = None
        """Why it is lost; None: it isn't."""
        self.stranded: FastDecodeError | None = None
        """Why it runs nothing for now, though it lives; None: it runs what it is given."""
        self.num_tokens, self.max_sequences = welcome.num_tokens, welcome.max_sequences

    def submit(self, request: Request, *, every_step: bool) -> None:
        """Have it run a request. Raises FastDecodeError: it is lost, or stranded."""
        refusal = self.broken or self.stranded
        if refusal is not None:
            raise refusal
        self._send(RunRequests(every_step, packed([request_to_json(request)])))

    def cancel(self, request_id: str) -> None:
        """End a request, and let go of what it holds."""
        self._send(CancelRequests((request_id,)))

    def give_role(self, role: InstanceRole) -> None:
        """What it will be given from now on."""
        self._send(SetInstanceRole(role))

    def end_conversation(self, token_ids: Sequence[int], salt: str) -> None:
        """Nobody goes on with a conversation that has come to these tokens."""
        self._send(EndConversation(np.asarray(token_ids, np.int64), salt))

    def came_back(self, welcome: InstanceWelcome, role: InstanceRole) -> None:
        """It was lost, and is there again."""
        self.turn += 1
        self.broken = self.stranded = None
        self.num_tokens, self.max_sequences = welcome.num_tokens, welcome.max_sequences
        if role is not welcome.role:
            self.give_role(role)

    def _send(self, message: ToInstance) -> None:
        """What is lost on the way to one that is gone, nobody misses."""
        if self.broken is None:
            self._post(self.number, self.turn, message)


def packed(said: Any) -> Array:
    """In JSON's types → uint8 [N]."""
    raw = json.dumps(said, ensure_ascii=False, separators=(",", ":"))
    return np.frombuffer(raw.encode("utf-8", "surrogatepass"), np.uint8)


def unpacked(raw: Array) -> Any:
    """The other way. Raises ProtocolError: it is no JSON."""
    try:
        return json.loads(raw.tobytes().decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"what should be JSON is none: {error}") from None
