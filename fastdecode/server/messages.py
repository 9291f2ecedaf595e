"""What the HTTP process and the process of the engine say to each other, over a socket pair.

============  ============  ====================================================
Opening       engine        the first: what to serve
Listening     HTTP          the address is bound; nothing is answered yet
Unfit         HTTP          it can't serve: why; it ends
Ready         engine        requests are welcome from now on
Submit        HTTP          requests to run
Cancel        HTTP          nobody waits for these requests any more
Deltas        engine        new output of requests
StatusReport  engine        how the engine is; twice a second
Keys          engine        other keys let in from now on
Reopen        engine        open the request log anew: it was moved away
Drain         engine        take no more requests; report when none is open
CutOff        engine        end the open requests with an error
Drained       HTTP          no request is open any more
StatusAck     HTTP          it reads: the answer to StatusReport
============  ============  ====================================================

Either end may close the socket: the other one ends, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from msgspec import field

from fastdecode.wire.instances.messages import Cancel as Cancel
from fastdecode.wire.instances.messages import Deltas as Deltas
from fastdecode.wire.instances.messages import StatusReport as StatusReport
from fastdecode.wire.instances.messages import Submit as Submit
from fastdecode.wire.traits import Message


class Opening(Message, frozen=True, tag=201):
    model: str
    """Directory, as given."""
    options: Mapping[str, Any]
    """``ServeOptions``."""
    sampling: Mapping[str, Any]
    """Sampling parameters for requests that don't say it themselves."""
    max_model_len: int
    vocab_size: int
    expected_output_tokens: int
    """Of a request that doesn't say its max_tokens."""
    keys: tuple[str, ...]
    """SHA-256, in hex."""
    keeping: Mapping[str, Any] = field(default_factory=dict)
    """``Keeping``, of conversations."""
    no_reuse: str = ""
    """Why no turn of a conversation reuses KV; empty: they do."""
    model_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the model's generation_config.json recommends for such requests."""

    is_long = True


class Listening(Message, frozen=True, tag=202):
    address: str


class Unfit(Message, frozen=True, tag=203):
    message: str


class Ready(Message, frozen=True, tag=204):
    kv_tokens: int
    """What the KV caches hold together."""


class Keys(Message, frozen=True, tag=205):
    keys: tuple[str, ...]


class Reopen(Message, frozen=True, tag=206):
    pass


class Drain(Message, frozen=True, tag=207):
    timeout_s: float


class CutOff(Message, frozen=True, tag=208):
    pass


class Drained(Message, frozen=True, tag=209):
    num_cut: int
    """Requests that were ended with an error meanwhile."""


class StatusAck(Message, frozen=True, tag=210):
    pass


ServerMessage: TypeAlias = (
    Opening
    | Listening
    | Unfit
    | Ready
    | Submit
    | Cancel
    | Deltas
    | StatusReport
    | Keys
    | Reopen
    | Drain
    | CutOff
    | Drained
    | StatusAck
)
