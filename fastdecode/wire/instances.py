"""Messages between a client and an engine elsewhere. The client is the HTTP process
(``fastdecode.server.link``), or the controller of instances, whose protocol this docstring is.

====================  =========  ===================================================
message               direction  meaning, and the answer
====================  =========  ===================================================
``InstanceHello``     C → I      which model is meant → ``InstanceWelcome``
``InstanceWelcome``   I → C      its capacity and role, once its engine has dropped
                                 the requests of the controller before
``Submit``            C → I      run these requests; output comes as ``Deltas``
``Cancel``            C → I      end these requests and free what they hold; no
                                 answer, but for output that was on its way
``SetRole``           C → I      kind of requests that it gets next; no answer
``EndConversation``   C → I      a conversation has ended; no answer
``Deltas``            I → C      new output of requests
``StatusReport``      I → C      its state, twice a second, and when it becomes idle
``Failed``            I → C      it serves another controller (``busy``), or can't
                                 continue
====================  =========  ===================================================

An engine that is busy with a long step sends no ``StatusReport``; an instance that lives and is
silent for minutes hangs. One comes at once when the last R-worker is lost or the first is back. A
controller cancels all requests of an instance without R-workers, and sends none until it has one.

Output is checked against the request (``fastdecode.engine.instances.routed``): an instance whose
output can't be true is lost. A request that it can't run ends with an error of its own.

An instance serves one controller at a time. When that is lost, the instance drops its requests,
frees all that they held, and waits for the next. When an instance is lost, its requests continue
elsewhere. A controller gives a request's name to no other request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeAlias

from msgspec import Meta, field

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.delta import Delta
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError
from fastdecode.core.sequence import Request, TokenIds
from fastdecode.core.spec import MAX_SEQUENCE_TOKENS
from fastdecode.core.version import VERSION
from fastdecode.wire.traits import MAX_HOLDERS, Asking, Count, Message, Role, Text, Worded

_MOST: Final = 1 << 40
_STATUS_FIELDS: Final = (
    "num_running", "num_waiting", "num_r_workers", "num_live_r_workers", "kv_used", "figures",
)  # fmt: skip
_CONTROLLERS: Final = frozenset({Role.CONTROLLER})


class InstanceWelcome(Worded, frozen=True, tag=193):
    name: Text
    role: InstanceRole
    model_hash: Text
    dtype: DType
    """Type of weights and activations."""
    kv_dtype: DType
    max_model_len: Annotated[int, Meta(ge=1, le=MAX_SEQUENCE_TOKENS)]
    num_tokens: Annotated[int, Meta(ge=1, le=_MOST)]
    """KV capacity in tokens."""
    block_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    max_sequences: Annotated[int, Meta(ge=1, le=1 << 20)]
    """Sequences that it runs at once."""
    batch_tokens: Annotated[int, Meta(ge=1, le=1 << 24)]
    """Prompt tokens that it runs at once."""
    num_r_workers: Annotated[int, Meta(ge=0, le=MAX_HOLDERS)]
    """0 if its KV is on its device."""
    num_threads: Annotated[int, Meta(ge=1, le=MAX_HOLDERS)]
    """Threads of each R-worker; the most of any, if they differ."""
    version: Text = VERSION
    """Version of FastDecode at the instance."""


class InstanceHello(Asking, frozen=True, tag=129):
    model_hash: Text

    answers = (InstanceWelcome,)
    said_by = _CONTROLLERS


class Submit(Asking, frozen=True, tag=130):
    """Run these requests."""

    requests: tuple[Request, ...]
    every_step: bool = True
    """Report after each step, or each sequence once it is over."""

    said_by = _CONTROLLERS
    is_long = True


class Cancel(Asking, frozen=True, tag=131):
    """End these requests, and free what they hold."""

    request_ids: tuple[str, ...]

    said_by = _CONTROLLERS
    is_long = True


class SetRole(Asking, frozen=True, tag=132):
    """Change the kind of requests that the engine gets."""

    role: InstanceRole

    said_by = _CONTROLLERS


class EndConversation(Asking, frozen=True, tag=133):
    """Nothing continues a conversation that has come to these tokens."""

    token_ids: TokenIds
    salt: Text

    said_by = _CONTROLLERS
    is_long = True


class Deltas(Message, frozen=True, tag=194):
    """New output of requests."""

    deltas: tuple[Delta, ...]

    is_long = True


class EngineNumbers(Message, frozen=True):
    """How an engine is, as its thread saw it last."""

    num_steps: Annotated[int, Meta(ge=0, lt=_MOST)] = 0
    stepped_s: float | None = None
    """``time.monotonic()`` at the end of the last step: the same for all processes of a host."""
    longest_step_s: float = 0.0
    """Longest of the last 256 steps."""
    num_unfinished: Count = 0
    """Sequences, waiting or running."""
    num_running: Count = 0
    """Sequences."""
    num_r_workers: Count = 0
    """R-workers that it began with."""
    num_live_r_workers: Count = 0
    """R-workers that are not lost, replacements included."""
    has_hung_r_workers: bool = False
    """Whether one was given up because it didn't answer: it may still be there, and hang."""

    @property
    def workers(self) -> tuple[int, int]:
        """R-workers that aren't lost, and all."""
        return self.num_live_r_workers, self.num_r_workers

    @property
    def num_waiting(self) -> int:
        """Sequences of which nothing runs."""
        return self.num_unfinished - self.num_running


class StatusReport(EngineNumbers, frozen=True, tag=195):
    """How an engine is. An instance without a live R-worker, of some, can run nothing until one
    is back, and gives up what it was asked."""

    state: Text = "starting"
    """State of a ``Snapshot``."""
    error: str | None = None
    """The code of what broke it."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Report of the engine between two steps. Empty before the first."""

    is_long = True

    @property
    def kv_used(self) -> float:
        """Share of the live R-workers' KV blocks that is reserved, 0 to 1."""
        workers = [each for each in self.figures.get("r_workers", ()) if not each.get("lost")]
        total = sum(worker["kv_blocks"] for worker in workers)
        return sum(worker["kv_blocks_used"] for worker in workers) / total if total else 0.0

    @property
    def fields(self) -> dict[str, Any]:
        """As ``/status.json``, status files and the page have it."""
        return {name: getattr(self, name) for name in _STATUS_FIELDS}

    def check(self, num_r_workers: int) -> None:
        """Raise ProtocolError if an instance with that many R-workers can't report this."""
        if self.num_live_r_workers > num_r_workers:
            raise ProtocolError(
                f"reports {self.num_live_r_workers} live R-workers, and began with {num_r_workers}"
            )


ToEngine: TypeAlias = Submit | Cancel | SetRole | EndConversation
FromEngine: TypeAlias = Deltas | StatusReport
ToInstance: TypeAlias = InstanceHello | ToEngine
InstanceSays: TypeAlias = InstanceWelcome | FromEngine
