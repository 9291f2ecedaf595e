"""Measurement of the way to one R-worker and back, in the messages that decode steps are made of.

A round trip is from handing over an ``Attend`` to having its ``AttendResult``, less the seconds
that the R-worker reports it computed: codec, transport, wire and both loops. Before each one the
S-worker reads as much memory as a layer's weights: as in a step, nothing of the message is in its
caches then, and the R-worker has been waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from fastdecode.core.clock import Clock
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.measurement import Point, Timing
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    Close,
    Failed,
    FromRWorker,
    Hello,
    Open,
    Refused,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.transport import Connection

T = TypeVar("T")
RConnection: TypeAlias = Connection[ToRWorker, FromRWorker]

NUM_LAYERS = 6  # of a step; the first isn't counted: the step's beginning travels before it
WARM_UP_STEPS = 2
TIMEOUT_S = 300.0  # longest wait for an answer: the first may wait for kernels to be compiled
WEIGHT_BYTES = 16 << 20  # more than a core's caches hold
SETTLE_S = 5e-3  # longer than a small answer takes


class LinkTimes(NamedTuple):
    """As the fields of the same names in ``fastdecode.core.measurement.NetProfile``."""

    transfer: tuple[Point, ...]
    round_trip: Timing
    message: Timing


def measure_link(
    connection: RConnection,
    kv: KVSpec,
    attention: AttentionSpec,
    activation_dtype: DType,
    batches: Sequence[int],
    *,
    repeats: int,
    clock: Clock = time.perf_counter,
    wait: Callable[[float], None] = time.sleep,
) -> LinkTimes:
    """Time round trips to a fresh R-worker.

    Args:
        batches: Sequences of each batch, whose q, k, v are sent and whose o is received.
        repeats: Steps of each batch, after ``WARM_UP_STEPS``.

    Raises:
        WorkerError: If the R-worker refused, failed, or didn't answer in time.
    """
    few = replace(kv, num_layers=NUM_LAYERS)
    hello = Hello(PROTOCOL_VERSION, "measured", few, (attention,) * NUM_LAYERS, activation_dtype)
    connection.send(hello)
    expect(connection.receive(TIMEOUT_S), Welcome)
    transfer = []
    for batch in batches:
        peer = _Peer(connection, batch, attention, activation_dtype, clock)
        peer.open(WARM_UP_STEPS + repeats)
        seconds = [peer.step() for _ in range(WARM_UP_STEPS + repeats)]
        peer.close()
        trips = [trip for step in seconds[WARM_UP_STEPS:] for trip in step]
        transfer.append(Point(peer.bytes_one_way, Timing(tuple(trip / 2 for trip in trips))))
    single = _Peer(connection, 1, attention, activation_dtype, clock)
    single.open(WARM_UP_STEPS + 2 * repeats)
    trips = [trip for _ in range(WARM_UP_STEPS + repeats) for trip in single.step()]
    costs = [cost for _ in range(repeats) for cost in single.step(wait)]
    single.close()
    return LinkTimes(tuple(transfer), Timing(tuple(trips[WARM_UP_STEPS:])), Timing(tuple(costs)))


def bytes_exchanged(transfer: Sequence[Point], repeats: int) -> float:
    """Return the bytes of q, k, v and o that ``measure_link`` exchanged for these results."""
    steps = WARM_UP_STEPS + repeats
    single = 2 * transfer[0].size * (steps + repeats)  # the first batch is one sequence
    return NUM_LAYERS * (single + sum(2 * point.size * steps for point in transfer))


class _Peer:
    """An R-worker, and a batch of sequences on it that step together."""

    def __init__(
        self, connection: RConnection, batch: int, spec: AttentionSpec, dtype: DType, clock: Clock
    ) -> None:
        self._connection, self._clock = connection, clock
        self._ids = np.arange(batch, dtype=np.int64)
        self._num_steps = 0
        self._weights = np.ones(WEIGHT_BYTES // 4, np.float32)
        all_heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
        shapes = [(batch, heads, spec.head_dim) for heads in all_heads]
        self._q, self._k, self._v = (np.ones(shape, dtype.carrier) for shape in shapes)

    @property
    def bytes_one_way(self) -> int:
        """The mean of out (q, k, v) and back (o, as large as q)."""
        return (2 * int(self._q.nbytes) + int(self._k.nbytes) + int(self._v.nbytes)) // 2

    def open(self, num_tokens: int) -> None:
        for sequence in self._ids.tolist():
            self._connection.send(Open(sequence, num_tokens))
            expect(self._connection.receive(TIMEOUT_S), Accepted)

    def close(self) -> None:
        for sequence in self._ids.tolist():
            self._connection.send(Close(sequence))

    def step(self, wait: Callable[[float], None] | None = None) -> list[float]:
        """Run a step. Return seconds of all layers but the first.

        Args:
            wait: None returns round trips without the R-worker's compute. Otherwise what sending
                and receiving take of this thread, which sleeps by this while the answer arrives.
        """
        step, count = self._num_steps, len(self._ids)
        self._num_steps += 1
        one = np.ones(count, np.int32)
        self._connection.send(BeginStep(step, 0, self._ids, one * step, one, one, one * (step + 1)))
        seconds = []
        for layer in range(NUM_LAYERS):
            attend, waited_s = Attend(step, 0, layer, self._q, self._k, self._v), 0.0
            if wait is None:
                self._weights.max()
            started = self._clock()
            self._connection.send(attend)
            if wait is not None:
                sent = self._clock()
                wait(SETTLE_S)
                waited_s = self._clock() - sent
            answer = expect(self._connection.receive(TIMEOUT_S), AttendResult)
            busy_s = self._clock() - started - waited_s
            seconds.append(max(1e-9, busy_s - answer.compute_s if wait is None else busy_s))
        return seconds[1:]


def expect(answer: FromRWorker, *kinds: type[T]) -> T:
    """Return an answer of these kinds.

    Raises:
        WorkerError: If the R-worker refused or failed.
        ProtocolError: If it answered anything else.
    """
    if isinstance(answer, (Failed, Refused)):
        raise WorkerError(f"the R-worker can't be measured: {answer.message}", code=answer.code)
    if not isinstance(answer, kinds):
        due = " or ".join(kind.__name__ for kind in kinds)
        raise ProtocolError(f"the R-worker answered {type(answer).__name__} where {due} was due")
    return answer
