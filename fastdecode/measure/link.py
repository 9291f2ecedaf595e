"""Measurement of links: to one R-worker and back, in the messages of decode steps, and between
R-workers.

A round trip is from handing over an ``Attend`` to having its ``AttendResult``, less the seconds
that the R-worker reports it computed: codec, transport, wire and both loops. Before each one the
S-worker reads as much memory as a layer's weights: as in a step, nothing of the message is in its
caches then, and the R-worker has been waiting.

Between two R-workers the time of a copy is measured, over the links of ``--replicas``: an R-worker
stores a sequence, and its neighbour reserves blocks for it. Then a token is appended, which the
neighbour reports once it has everything before it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from msgspec import structs

from fastdecode.core.clock import Clock
from fastdecode.core.dtype import DType
from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.measurement import Point, Timing
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.blocks import NO_STEP, DropCache, Dropped, Replicate, Replicated
from fastdecode.wire.messages import (
    MAX_ID,
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
from rworker.stream.mirror import LINK_BYTES

T = TypeVar("T")
RConnection: TypeAlias = Connection[ToRWorker, FromRWorker]

NUM_LAYERS = 6  # of a step; the first isn't counted: the step's beginning travels before it
WARM_UP_STEPS = 2
TIMEOUT_S = 300.0  # longest wait for an answer: the first may wait for kernels to be compiled
WEIGHT_BYTES = 16 << 20  # more than a core's caches hold
SETTLE_S = 5e-3  # longer than a small answer takes
REACH_S: Final = 10.0  # longest time to reach a neighbour that then reserves its blocks
KV: Final = KVSpec(4, 8, 128, DType.BFLOAT16, 64)
MIN_BLOCKS, MAX_BLOCKS = 4, 32  # of the copied sequence, 1 MiB each


class LinkTimes(NamedTuple):
    """Fields of the same names in ``fastdecode.core.measurement.NetProfile``."""

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
    """Time round trips to a fresh R-worker: ``repeats`` steps of each batch, whose q, k, v are sent
    and whose o is received, after ``WARM_UP_STEPS``.

    Raises:
        WorkerError: If the R-worker refused, failed, or didn't answer in time.
    """
    few = replace(kv, num_layers=NUM_LAYERS)
    connection.send(Hello("measured", few, (attention,) * NUM_LAYERS, activation_dtype))
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
        self._ids, self._num_steps = np.arange(batch, dtype=np.int64), 0
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
        """Run a step. Return seconds of all layers but the first: of round trips without the
        R-worker's compute. With ``wait``, by which this thread sleeps until the answer arrives, of
        its own sending and receiving."""
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


@dataclass(frozen=True)
class NeighbourFacts:
    """The link from one R-worker to the next, or the error if it could not be measured."""

    peer: str
    neighbour: str
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds else 0.0


def examine_neighbours(ring: Sequence[tuple[RConnection, str, int]]) -> Iterator[NeighbourFacts]:
    """Measure the links of a ring of R-workers. Fewer than two have none. Their caches are lost.
    ``ring`` has each R-worker's address for the others, and its memory for K and V."""
    # Each has its own sequence and its neighbour's, and a block for one more of each.
    room = min((kv_bytes for *_, kv_bytes in ring), default=0) // 2 // KV.block_bytes - 1
    session, num_blocks = 1 + secrets.randbelow(MAX_ID), min(MAX_BLOCKS, room)
    members = [_Member(each[0], i, session, num_blocks) for i, each in enumerate(ring)]
    for i, member in enumerate(members if len(ring) > 1 else ()):
        neighbour, address, _ = ring[(i + 1) % len(ring)]
        names = ring[i][0].peer, neighbour.peer
        if num_blocks < MIN_BLOCKS:
            least = 2 * (MIN_BLOCKS + 1) * KV.block_bytes / 1e6
            text = f"links between R-workers need {least:.0f} MB of KV memory each to be measured"
            yield NeighbourFacts(*names, error=text)
            continue
        try:
            for each in (member, members[(i + 1) % len(ring)]):
                each.fill()
            yield NeighbourFacts(*names, num_blocks * KV.block_bytes, member.copy_to(address))
        except FastDecodeError as error:
            yield NeighbourFacts(*names, error=error.message)


class _Member:
    """An R-worker of the ring. Its sequences are numbered as the steps that store them."""

    def __init__(self, connection: RConnection, holder: int, session: int, num_blocks: int) -> None:
        self._connection, self._num_blocks = connection, num_blocks
        self._holder, self._session = holder, session
        self._is_full = False

    def fill(self) -> None:
        """Open a cache with a sequence and a block for one more, unless it is open already."""
        if self._is_full:
            return
        # An earlier measurement may hold all memory, and the name of a neighbour's cache.
        self._open(holder=0, max_blocks=1)
        self._ask(DropCache(self._session, 0, self._holder), Dropped)
        self._open(holder=self._holder, max_blocks=self._num_blocks + 1)
        self._append(0, self._num_blocks * KV.block_size)
        for _ in range(KV.num_layers):
            self._receive(AttendResult)
        self._is_full = True

    def copy_to(self, address: str) -> float:
        """Replicate to ``address``. Return the seconds of the copy alone, after the reservation."""
        self._connection.send(Replicate(address, LINK_BYTES, 1, REACH_S))
        self._await(NO_STEP)
        started = time.perf_counter()
        self._append(1, 1)
        self._await(1)
        return time.perf_counter() - started

    def _open(self, holder: int, max_blocks: int) -> None:
        specs = (AttentionSpec(KV.num_kv_heads, KV.num_kv_heads, KV.head_dim, 0.1),) * KV.num_layers
        own = Hello("streamed", KV, specs, KV.dtype, holder=holder)
        self._ask(structs.replace(own, session=self._session, max_blocks=max_blocks), Welcome)

    def _append(self, sequence: int, num_tokens: int) -> None:
        """Open a sequence, and store its tokens in a step, without queries."""
        self._ask(Open(sequence, num_tokens), Accepted)
        none, new = np.zeros(1, np.int32), np.full(1, num_tokens, np.int32)
        ids = np.array([sequence], np.int64)
        self._connection.send(BeginStep(sequence, 0, ids, none, new, none, new))
        rows = np.ones((num_tokens, KV.num_kv_heads, KV.head_dim), np.uint16)
        for layer in range(KV.num_layers):
            self._connection.send(Attend(sequence, 0, layer, rows[:0], rows, rows))

    def _await(self, step: int) -> None:
        """Wait until the neighbour reports this step."""
        while True:
            report = self._receive(Replicated, AttendResult)
            if isinstance(report, Replicated) and report.step == step:
                return

    def _ask(self, message: ToRWorker, answer: type[FromRWorker]) -> None:
        self._connection.send(message)
        self._receive(answer)

    def _receive(self, *kinds: type[FromRWorker]) -> FromRWorker:
        answer = self._connection.receive(TIMEOUT_S)
        if isinstance(answer, Replicated) and answer.reason:
            raise WorkerError(answer.reason)
        return expect(answer, *kinds)
