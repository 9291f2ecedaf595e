"""Every message between the controller of instances and an instance that is a
process of its own. This docstring is the protocol.

====================  ==========  ===================================================
message               direction   meaning, and the answer
====================  ==========  ===================================================
``InstanceHello``     C → I       which model is meant → ``InstanceWelcome``
``InstanceWelcome``   I → C       what it has room for, and its role; once its engine
                                  has forgotten what another controller wanted
``RunRequests``       C → I       run these; what they say comes as ``RequestDeltas``
``CancelRequests``    C → I       they aren't wanted any more; what they hold is let
                                  go of; no answer, but what was on the way
``SetInstanceRole``   C → I       what it will be given from now on; no answer
``EndConversation``   C → I       nobody goes on with a conversation; no answer
``RequestDeltas``     I → C       what requests have said since the last time
``InstanceStatus``    I → C       how it is; now and then, and when nothing is left
                                  to be done
``Failed``            I → C       it serves another controller (``busy``), or can't
                                  go on
====================  ==========  ===================================================

``InstanceStatus`` comes twice a second, by an engine that isn't busy with a long
step: an instance that lives and is silent for minutes hangs. One comes at once when
the last R-worker is lost or the first is back. A controller cancels all that an
instance without R-workers was asked, and gives it nothing until it has one.

What an instance says is held against what it was asked
(``fastdecode.engine.instances.claims``): one that says what can't be true is lost.
A request that an instance can't run as it was asked comes to an error of its own.

An instance serves one controller at a time. When that is gone, however it went,
the instance forgets its requests, frees all that they held, and waits for the
next. When an instance is gone, its requests go on elsewhere.

``said`` is JSON in UTF-8: requests and deltas as
``fastdecode.wire.instances.request_json`` has them. A request is known by a name that
its controller gives to no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import MAX_SEQUENCE_TOKENS
from fastdecode.wire.traits import Asking, Role, Worded

MAX_NAMES: Final = 1 << 12
"""Of one ``CancelRequests``."""
_MOST: Final = 1 << 40
_CONTROLLERS: Final = frozenset({Role.CONTROLLER})


@dataclass(frozen=True)
class InstanceWelcome(Worded):
    name: str
    role: InstanceRole
    model_hash: str
    dtype: DType
    """Of weights and activations."""
    kv_dtype: DType
    max_model_len: int
    num_tokens: int
    """Of KV that it has room for."""
    block_size: int
    max_sequences: int
    """That it runs at once."""
    batch_tokens: int
    """Of prompts that it runs at once."""
    num_r_workers: int
    """0: its KV is on its device."""
    num_threads: int
    """Of each of those; where they differ, the most that one has."""

    def check(self) -> None:
        """Raises ProtocolError: that can't be."""
        for name, most in (
            ("max_model_len", MAX_SEQUENCE_TOKENS),
            ("num_tokens", _MOST),
            ("block_size", 1 << 20),
            ("max_sequences", 1 << 20),
            ("batch_tokens", 1 << 24),
            ("num_r_workers", 1 << 16),
            ("num_threads", 1 << 16),
        ):
            value, least = getattr(self, name), 0 if name == "num_r_workers" else 1
            if not least <= value <= most:
                raise ProtocolError(f"offers {name}={value}, which is not within {least}..{most}")


@dataclass(frozen=True)
class InstanceHello(Asking):
    protocol_version: int
    model_hash: str

    answers = (InstanceWelcome,)
    said_by = _CONTROLLERS


@dataclass(frozen=True, eq=False)
class RunRequests(Asking):
    every_step: bool
    """Tell after every step what they say; or of each sequence once it is over."""
    said: Annotated[NDArray[np.uint8], "N"]

    said_by = _CONTROLLERS


@dataclass(frozen=True)
class CancelRequests(Asking):
    names: tuple[str, ...]

    said_by = _CONTROLLERS


@dataclass(frozen=True)
class SetInstanceRole(Asking):
    role: InstanceRole

    said_by = _CONTROLLERS


@dataclass(frozen=True, eq=False)
class EndConversation(Asking):
    token_ids: Annotated[NDArray[np.int64], "N"]
    salt: str

    said_by = _CONTROLLERS


@dataclass(frozen=True, eq=False)
class RequestDeltas:
    said: Annotated[NDArray[np.uint8], "N"]


@dataclass(frozen=True, eq=False)
class InstanceStatus:
    num_steps: int
    num_live_r_workers: int
    """0, of one that began with some: it can run nothing until one is back, and gives up
    what it was asked."""
    said: Annotated[NDArray[np.uint8], "N"]
    """Its totals and figures."""

    def check(self, num_r_workers: int) -> None:
        """Raises ProtocolError: an instance with so many R-workers can't say that."""
        if not 0 <= self.num_steps < _MOST:
            raise ProtocolError(f"reports {self.num_steps} steps")
        if not 0 <= self.num_live_r_workers <= num_r_workers:
            raise ProtocolError(
                f"reports {self.num_live_r_workers} live R-workers, and began with {num_r_workers}"
            )


ToInstance: TypeAlias = (
    InstanceHello | RunRequests | CancelRequests | SetInstanceRole | EndConversation
)
InstanceSays: TypeAlias = InstanceWelcome | RequestDeltas | InstanceStatus

INSTANCE_OPCODES: Final[Mapping[type[Any], int]] = {
    InstanceHello: 129,
    RunRequests: 130,
    CancelRequests: 131,
    SetInstanceRole: 132,
    EndConversation: 133,
    InstanceWelcome: 193,
    RequestDeltas: 194,
    InstanceStatus: 195,
}
"""See ``fastdecode.wire.opcodes.OPCODES``; from 193 on, those that instances send."""
