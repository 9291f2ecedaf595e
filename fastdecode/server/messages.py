"""What the HTTP process and the process of the engine say to each other: JSON
behind its length, over a socket pair.

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
Drain         engine        take no more requests; report when none is open
CutOff        engine        end the open requests with an error
Drained       HTTP          no request is open any more
StatusAck     HTTP          it reads: the answer to StatusReport
============  ============  ====================================================

Either end may close the socket: the other one ends, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from fastdecode.core.errors import ProtocolError, RequestError
from fastdecode.wire.instances.messages import Cancel as Cancel
from fastdecode.wire.instances.messages import Deltas as Deltas
from fastdecode.wire.instances.messages import StatusReport as StatusReport
from fastdecode.wire.instances.messages import Submit as Submit
from fastdecode.wire.json_fields import AsJson, json_fields


@dataclass(frozen=True)
class Opening:
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
    keys: Sequence[str]
    """SHA-256, in hex."""
    keeping: Mapping[str, Any] = field(default_factory=dict)
    """``Keeping``, of conversations."""
    no_reuse: str = ""
    """Why no turn of a conversation reuses KV; empty: they do."""
    model_defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the model's generation_config.json recommends for such requests."""


@dataclass(frozen=True)
class Listening:
    address: str


@dataclass(frozen=True)
class Unfit:
    message: str


@dataclass(frozen=True)
class Ready:
    kv_tokens: int
    """What the KV caches hold together."""


@dataclass(frozen=True)
class Keys:
    keys: Sequence[str]


@dataclass(frozen=True)
class Drain:
    timeout_s: float


@dataclass(frozen=True)
class CutOff:
    pass


@dataclass(frozen=True)
class Drained:
    num_cut: int
    """Requests that were ended with an error meanwhile."""


@dataclass(frozen=True)
class StatusAck:
    pass


Message: TypeAlias = (
    "Opening | Listening | Unfit | Ready | Submit | Cancel | Deltas | StatusReport | Keys "
    "| Drain | CutOff | Drained | StatusAck"
)
_KINDS: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Opening, Listening, Unfit, Ready, Submit, Cancel, Deltas, StatusReport, Keys,
        Drain, CutOff, Drained, StatusAck,
    )
}  # fmt: skip


_PLAIN = AsJson(lambda value: value, lambda said: said)
_FIELDS: Mapping[str, Mapping[str, AsJson]] = {
    name: {f.name: json_fields(kind).get(f.name, _PLAIN) for f in fields(kind)}
    for name, kind in _KINDS.items()
}


def to_json(message: Message) -> dict[str, Any]:
    """A message in JSON's types."""
    kind = type(message).__name__
    values = {name: x.to_json(getattr(message, name)) for name, x in _FIELDS[kind].items()}
    return {"kind": kind, **values}


def from_json(said: Any) -> Message:
    """Raises ProtocolError: it is no message."""
    try:
        kind = said.pop("kind")
        values = {name: _FIELDS[kind][name].value(value) for name, value in said.items()}
        message: Message = _KINDS[kind](**values)
        return message
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RequestError,
    ) as error:
        raise ProtocolError(f"the other process said what is no message: {error}") from None
