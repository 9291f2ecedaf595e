"""How fast an R-worker fetches what another's offers, and what that costs the
steps that it attends meanwhile.

    python benchmarks/fetching.py --out benchmarks/results/fetching.json

Two R-workers are processes on this host, over ZeroMQ. **fetch**: prompts of
``--tokens`` tokens, one after the other, from the ``Pull`` to its ``Pulled``;
**stream**: the same K and V, streamed to the same R-worker out of this process's
memory. They take turns; ``ratio`` is the fetch's bytes a second over the
stream's, the median over pairs.

**steps**: the R-worker that fetches attends decode steps of ``--sequences``
sequences with ``--context`` tokens each. Rounds without a fetch, with one prompt
after the other being **fetched** at the pace that is usual, as fast as it goes
(**unpaced**), and at a given pace (``--fetch-gbps``), take turns; ``ratio`` is the median
step over that without.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from percentiles import percentile
from provenance import keep, provenance

from cpu_kernels import allocate_pool
from fastdecode.core.dtype import DType
from fastdecode.core.holders import HolderId, KVSource, PartId
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.kv.exporting import ExportSequence, Pull, Pulled
from fastdecode.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    CloseSequence,
    Hello,
    OpenSequence,
    Shutdown,
    Welcome,
)
from fastdecode.wire.zmq.hub import ZmqHub
from rworker.cache_state import CacheState
from rworker.stream.chunk_endpoints import MemoryCache, WorkerCache
from rworker.stream.chunks import layout_of
from rworker.stream.cutting import CacheKind
from rworker.stream.pieces import Box, Piece, Region
from rworker.stream.streams import expect_pieces, stream_out

TIMEOUT_S = 60.0
UNPACED = 1e14
KV = KVSpec(4, 8, 128, DType.BFLOAT16, 64)
SPEC = AttentionSpec(8, 8, 128, 0.088)
HERE, THERE = HolderId(0), HolderId(1)
KV_GB = 1.5
FIRST_DECODING = 1000
FIRST_FETCHED = 1 << 20


@dataclass
class Worker:
    """An R-worker at an address, and this process's connection to it."""

    address: str
    connection: Any
    news: list[Pulled] = field(default_factory=list)

    def hear(self, kind: type[Any]) -> Any:
        """The next answer, of this kind; what it says unasked is kept."""
        while True:
            said = self.connection.receive(TIMEOUT_S)
            if isinstance(said, kind):
                return said
            assert isinstance(said, Pulled), said
            self.news.append(said)

    def take_pulled(self) -> Pulled | None:
        """What came of a pull, if that is known; doesn't wait."""
        said = self.news.pop(0) if self.news else self.connection.poll()
        assert said is None or isinstance(said, Pulled), said
        return said

    def open(self, sequence: int, num_tokens: int) -> None:
        self.connection.send(OpenSequence(sequence, num_tokens))
        self.hear(Accepted)

    def close(self, sequence: int) -> None:
        self.connection.send(CloseSequence(sequence))


@contextlib.contextmanager
def workers() -> Iterator[tuple[Worker, Worker]]:
    """One that offers, and one that fetches."""
    command = [sys.executable, "-m", "fastdecode", "r-worker", "--bind", "tcp://127.0.0.1:*"]
    command += ["--threads", "1", "--kv-memory-gb", str(KV_GB), "--exit-with-parent"]
    hub = ZmqHub()
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        made = []
        for process in both:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            made.append(Worker(address, hub.add(address)))
            made[-1].connection.send(
                Hello(PROTOCOL_VERSION, "fetched", KV, (SPEC,) * KV.num_layers, DType.BFLOAT16)
            )
            made[-1].hear(Welcome)
        yield made[0], made[1]
        for worker in made:
            worker.connection.send(Shutdown())
    finally:
        hub.close()
        for process in both:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def filled(num_sequences: int, num_tokens: int) -> MemoryCache:
    """A cache in this process's memory, each page of which was written."""
    num_blocks = num_sequences * KV.num_blocks_for(num_tokens)
    hello = Hello(PROTOCOL_VERSION, "fetched", KV, (SPEC,) * KV.num_layers, DType.BFLOAT16)
    books = CacheState(hello, num_blocks)
    pool = allocate_pool(layout_of(KV), KV.num_layers, num_blocks)
    pool[:] = 60  # bfloat16 near 0.008
    for sequence in range(num_sequences):
        books.reserve(OpenSequence(sequence, num_tokens))
        books.store.append(np.array([sequence], np.int64), np.array([num_tokens], np.int32))
    return MemoryCache(books, pool)


def pour(
    source: MemoryCache,
    worker: Worker,
    sequences: range,
    num_tokens: int,
    room: int = 0,
) -> float:
    """Stream sequences to an R-worker, which reserves ``room`` tokens for each, or
    as many as come; gives the bytes a second."""
    box = Box(range(KV.num_layers), range(KV.num_kv_heads), range(num_tokens))
    pieces = []
    for number, sequence in enumerate(sequences):
        worker.open(sequence, max(room, num_tokens))
        there = Region(THERE, PartId(sequence), box)
        pieces.append(Piece(Region(HERE, PartId(number), box), there, box))
    sink = WorkerCache(worker.connection, CacheKind("fetched", KV))
    expect_pieces(pieces, {THERE: sink})
    started = time.perf_counter()
    num_bytes = stream_out(pieces, {HERE: source}, {THERE: sink})
    return num_bytes / (time.perf_counter() - started)


@dataclass
class Fetches:
    """Prompts that are fetched one after the other."""

    source: Worker
    target: Worker
    tickets: list[str]
    num_tokens: int
    bytes_per_s: float = 0.0
    _number: int = FIRST_FETCHED
    num_bytes: int = 0
    seconds: float = 0.0

    def begin(self) -> None:
        ticket = self.tickets[self._number % len(self.tickets)]
        source = KVSource(self.source.address, 0, ticket, 0, self.num_tokens, 0, KV.num_kv_heads)
        self.target.open(self._number, self.num_tokens)
        self.target.connection.send(
            Pull(self._number, 0, self.num_tokens, (source,), TIMEOUT_S, self.bytes_per_s)
        )

    def end(self, pulled: Pulled) -> None:
        assert not pulled.reason and pulled.sequence_id == self._number, pulled
        self.num_bytes += pulled.num_bytes
        self.seconds += pulled.seconds
        self.target.close(self._number)
        self._number += 1


def offer(source: Worker, count: int) -> list[str]:
    tickets = [secrets.token_hex(16) for _ in range(count)]
    for sequence, ticket in enumerate(tickets):
        source.connection.send(ExportSequence(sequence, ticket))
    return tickets


def fetch_against_stream(
    fetches: Fetches, memory: MemoryCache, num_tokens: int, rounds: int
) -> dict[str, Any]:
    target, ours, streams, rates = fetches.target, [], [], []
    for number in range(rounds + 1):
        streamed = pour(memory, target, range(1, 2), num_tokens)
        target.close(1)
        started, before = time.perf_counter(), fetches.num_bytes
        fetches.begin()
        fetches.end(target.hear(Pulled) if not target.news else target.news.pop(0))
        rate = (fetches.num_bytes - before) / (time.perf_counter() - started)
        if number:  # the first one maps memory
            ours.append(rate)
            streams.append(streamed)
            rates.append(rate / streamed)
    return {
        "prompt_bytes": num_tokens * KV.token_bytes,
        "fetch_bytes_per_s": statistics.median(ours),
        "stream_bytes_per_s": statistics.median(streams),
        "ratio": statistics.median(rates),
        "ratios": rates,
    }


@dataclass
class Batch:
    """Sequences that decode."""

    size: int
    num_past: int
    number: int = 0

    def step(self, worker: Worker) -> None:
        size, ids = self.size, np.arange(FIRST_DECODING, FIRST_DECODING + self.size)
        past = np.full(size, self.num_past, np.int32)
        ones = np.ones(size, np.int32)
        worker.connection.send(BeginStep(self.number, 0, ids, past, ones, ones, past + 1))
        row = np.full((size, KV.num_kv_heads, KV.head_dim), 0x3C00, np.uint16)
        for layer in range(KV.num_layers):
            worker.connection.send(Attend(self.number, 0, layer, row, row, row))
            worker.hear(AttendResult)
        self.number += 1
        self.num_past += 1


def steps(
    target: Worker, fetches: Fetches | None, batch: Batch, num_steps: int
) -> tuple[list[float], float]:
    """Seconds of each step, and bytes a second that were fetched beside."""
    if fetches is not None:
        fetches.num_bytes = 0
        fetches.begin()
    began_s, taken = time.perf_counter(), []
    for _ in range(num_steps):
        started = time.perf_counter()
        batch.step(target)
        taken.append(time.perf_counter() - started)
        if fetches is not None and (pulled := target.take_pulled()) is not None:
            fetches.end(pulled)
            fetches.begin()
    if fetches is None:
        return taken, 0.0
    fetches.end(target.news.pop(0) if target.news else target.hear(Pulled))
    return taken, fetches.num_bytes / (time.perf_counter() - began_s)


def steps_beside(
    target: Worker, ways: dict[str, Fetches | None], batch: Batch, options: argparse.Namespace
) -> list[dict[str, Any]]:
    taken: dict[str, list[float]] = {way: [] for way in ways}
    fetched: dict[str, list[float]] = {way: [] for way in ways}
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(-1, options.rounds):
        medians = {}
        for way in list(ways)[:: 1 if number % 2 else -1]:
            seconds, rate = steps(target, ways[way], batch, options.steps)
            if number >= 0:
                taken[way] += seconds
                fetched[way].append(rate)
            medians[way] = statistics.median(seconds)
        for way in ways if number >= 0 else ():
            ratios[way].append(medians[way] / medians["alone"])
    return [
        {
            "way": way,
            "step_p50_s": statistics.median(taken[way]),
            "step_p99_s": percentile(taken[way], 99),
            "ratio": statistics.median(ratios[way]),
            "fetched_bytes_per_s": statistics.median(fetched[way]),
        }
        for way in ways
    ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with workers() as (source, target):
        memory = filled(2, options.tokens)
        pour(memory, source, range(2), options.tokens)
        tickets = offer(source, 2)
        fetches = Fetches(source, target, tickets, options.tokens)
        fetch = fetch_against_stream(fetches, memory, options.tokens, options.rounds)
        print(fetch, file=sys.stderr)
        context = filled(options.sequences, options.context)
        batch = Batch(options.sequences, options.context)
        room = options.context + options.steps * 4 * (options.rounds + 1) + 1
        decoding = range(FIRST_DECODING, FIRST_DECODING + options.sequences)
        pour(context, target, decoding, options.context, room)
        paced = Fetches(
            source, target, tickets, options.tokens, options.fetch_gbps / 8 * 1e9, FIRST_FETCHED * 2
        )
        unpaced = Fetches(source, target, tickets, options.tokens, UNPACED, FIRST_FETCHED * 3)
        ways = {
            "alone": None,
            "fetching": fetches,
            "unpaced": unpaced,
            f"{options.fetch_gbps:g} Gbit/s": paced,
        }
        rows = steps_beside(target, ways, batch, options)
        print(rows, file=sys.stderr)
        return {"fetch": fetch, "steps": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt that is fetched")
    parser.add_argument("--sequences", type=int, default=16, help="that decode")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each")
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fetch-gbps", type=float, default=2.0, help="of paced fetches")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen = {name: value for name, value in vars(options).items() if name != "out"}
    keep({**provenance(), "options": chosen, **measure(options)}, options.out)


if __name__ == "__main__":
    main()
