"""Every message between an S-worker and an R-worker. This docstring is the protocol.

==================  ===========  ============================================================================
message             direction    meaning, and the answer
==================  ===========  ============================================================================
``Hello``           S → R        protocol version, model, KV cache and attention of every layer → ``Welcome``; said
                                 again, it begins anew: sequences, cache and open steps are forgotten
``OpenSequence``    S → R        reserve room for a new sequence → ``Accepted`` or ``Refused``
``ForkSequence``    S → R        a new sequence that starts with a prefix of its parent's cached tokens (blocks are
                                 shared, copied on write) → ``Accepted`` or ``Refused``
``ExtendSequence``  S → R        enlarge an open sequence's room → ``Accepted`` or ``Refused``
``CloseSequence``   S → R        free a sequence's blocks; no answer
``BeginStep``       S → R        which sequences step, how many tokens each appends and attends; travels once a
                                 step and lane, not once a layer; no answer
``Attend``          S → R        one layer of the lane's step: append k and v, attend q → ``AttendResult``, always
``Inspect``         S → R        tell about yourself; before ``Hello``, and never in a job → ``Report``
``Shutdown``        S → R        leave the loop; no answer
``Welcome``         R → S        the worker's name and capacity
``Accepted``        R → S        the sequence is open
``Refused``         R → S        the sequence is not open, and why (out of blocks); nothing was changed
``Report``          R → S        the worker's host, and what it would offer
``AttendResult``    R → S        o (and log-sum-exp, if the step asked for it), and the seconds it took
``Failed``          R → S        the peer broke the protocol, or a kernel failed: the worker stops serving this peer
==================  ===========  ============================================================================

One lane has at most one step open at an R-worker; within a step, layers come in order 0 … num_layers - 1, and the
last layer's ``Attend`` closes the step. Arrays declare dtype and dims in their annotation, and the codec holds peers to
it: ``Activations`` are of the dtype agreed in ``Hello`` (float32, or uint16 carrying the bits of a 16-bit float); a
dim that stands twice in one message is the same both times. T_kv sums ``num_new`` and T_q sums ``num_queries`` over the
step's sequences, in the order of ``sequence_ids``.

Queries of one sequence are its last ``num_queries`` tokens: the query i of a sequence stands at position
``num_past + num_new + num_beyond - num_queries + i`` and sees keys up to its own position, below ``num_visible``, and
inside the layer's window. So one contract covers decode (``num_new = num_queries = 1``, ``num_visible = num_past +
1``), a prompt's first chunk, attended on the S-worker (``num_queries = 0``), its later chunks, whose past alone is
attended here and merged there by log-sum-exp (``num_queries = num_new``, ``num_visible = num_past``), and several new
tokens attended here causally (``num_queries = num_new``, ``num_visible = num_past + num_new``). A query that sees no
key at all gets o = 0 and a log-sum-exp of -inf.

A long sequence may be **split**: consecutive tokens of it, its **parts**, are on several R-workers, each a sequence of
its own to them, with positions from 0. New tokens are appended to the last part; the others are **closed**: they
append nothing and only attend (``num_new = 0``, ``num_visible = num_past``), to queries that stand ``num_beyond``
tokens further on.

From ``BeginStep`` to the step's last ``Attend``, its sequences may be neither closed nor stepped in another lane, and
forked only at tokens that were cached before the step: the others' K and V are not there in every layer yet. A
sequence never grows past its reservation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError
from fastdecode.core.host import HostFacts
from fastdecode.core.spec import AttentionSpec, KVSpec

PROTOCOL_VERSION = 2

MAX_ID = (1 << 63) - 1
"""Of sequences and steps; both count from 0."""
MAX_LANES = 256
MAX_STEP_TOKENS = 1 << 23
"""That one step of one lane appends on one R-worker, and as many that it attends there. With the longest sequence no
more than the 2^24 positions that kernels count exactly, in float32."""

Activations: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]


@dataclass(frozen=True)
class Hello:
    protocol_version: int
    model_hash: str
    kv: KVSpec
    attention: tuple[AttentionSpec, ...]
    """One a layer."""
    activation_dtype: DType
    """Of q, k, v and o: a floating-point type."""

    def __post_init__(self) -> None:
        if not self.activation_dtype.is_float:
            raise ConfigError(f"activation_dtype={self.activation_dtype.value!r}: q, k, v and o travel as floats")


@dataclass(frozen=True)
class OpenSequence:
    sequence_id: int
    num_reserved_tokens: int
    """Room is set aside for this many tokens, so that no later step of the sequence can run out of blocks."""


@dataclass(frozen=True)
class ForkSequence:
    parent_id: int
    sequence_id: int
    num_shared_tokens: int
    """The prefix of the parent that the new sequence starts with: 1 to the parent's cached tokens, in whole tokens. Its
    blocks are shared; the first append into a shared block copies that block first."""
    num_reserved_tokens: int
    """In all, the shared tokens included."""


@dataclass(frozen=True)
class ExtendSequence:
    sequence_id: int
    num_reserved_tokens: int
    """In all; not fewer than before."""


@dataclass(frozen=True)
class CloseSequence:
    sequence_id: int


@dataclass(frozen=True, eq=False)
class BeginStep:
    step: int
    lane: int
    sequence_ids: Annotated[NDArray[np.int64], "N"]
    num_past: Annotated[NDArray[np.int32], "N"]
    """Tokens cached before this step; must equal the worker's own count."""
    num_new: Annotated[NDArray[np.int32], "N"]
    """Tokens appended, >= 0; where it is 0, something is attended."""
    num_queries: Annotated[NDArray[np.int32], "N"]
    """0 or more, at most num_new + num_beyond."""
    num_visible: Annotated[NDArray[np.int32], "N"]
    """Keys visible at most: num_past or num_past + num_new."""
    want_lse: bool = False
    num_beyond: Annotated[NDArray[np.int32] | None, "N"] = None
    """Tokens of the whole sequence, up to the last query, that come after those here; None: 0 for all."""


@dataclass(frozen=True, eq=False)
class Attend:
    step: int
    lane: int
    layer: int
    q: Annotated[Activations, "T_q Hq D"]
    k: Annotated[Activations, "T_kv Hkv D"]
    v: Annotated[Activations, "T_kv Hkv D"]


@dataclass(frozen=True)
class Inspect:
    pass


@dataclass(frozen=True)
class Shutdown:
    pass


@dataclass(frozen=True)
class Welcome:
    worker: str
    num_blocks: int
    block_size: int
    num_threads: int


@dataclass(frozen=True)
class Report:
    worker: str
    protocol_version: int
    host: HostFacts
    num_threads: int
    kv_bytes: int
    """Memory that it would give to K and V."""
    model_hash: str
    """Of the only model that it serves; empty: any."""


@dataclass(frozen=True)
class Accepted:
    sequence_id: int


@dataclass(frozen=True)
class Refused:
    sequence_id: int
    code: str
    """``out_of_capacity``: there is no room now; ``exceeds_capacity``: there would be none in an empty R-worker."""
    message: str


@dataclass(frozen=True, eq=False)
class AttendResult:
    step: int
    lane: int
    layer: int
    o: Annotated[Activations, "T_q Hq D"]
    lse: Annotated[NDArray[np.float32] | None, "T_q Hq"]
    """None unless the step wants it."""
    compute_s: float
    """Seconds spent appending and attending, waiting excluded."""


@dataclass(frozen=True)
class Failed:
    worker: str
    code: str
    message: str


ToRWorker: TypeAlias = (
    Hello | OpenSequence | ForkSequence | ExtendSequence | CloseSequence | BeginStep | Attend | Inspect | Shutdown
)
FromRWorker: TypeAlias = Welcome | Report | Accepted | Refused | AttendResult | Failed
Message: TypeAlias = ToRWorker | FromRWorker

OPCODES: Mapping[type[Message], int] = {
    Hello: 1,
    OpenSequence: 2,
    ForkSequence: 3,
    CloseSequence: 4,
    BeginStep: 5,
    Attend: 6,
    Shutdown: 7,
    ExtendSequence: 8,
    Inspect: 9,
    Welcome: 65,
    Accepted: 66,
    Refused: 67,
    AttendResult: 68,
    Failed: 69,
    Report: 70,
}
"""What messages are called on the wire; from 65 on, those that R-workers send. A retired number isn't used again."""
