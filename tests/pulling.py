"""R-workers that name blocks and fetch them, one message at a time, in the hands of a test."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from chunk_memory import NUM_BLOCKS, READING, hello_for
from numpy.typing import NDArray
from values import replace

from cpu_kernels import allocate_tokens, reference
from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import ChunkForm, Done, Fetch, Forget, KVSource, Name, words_of
from fastdecode.wire.inproc import InprocConnection, InprocHub, connect
from fastdecode.wire.messages import Accepted, Close, FromRWorker, Open, ToRWorker, Welcome
from fastdecode.wire.transport import PeerLostError
from rworker.attention import AttentionExecutor
from rworker.cache_state import CacheState
from rworker.instructions import HangUp, PlaceChunk
from rworker.state import RWorkerState
from rworker.stream.chunks import ChunkShape, layout_of
from rworker.transfers.background_transfers import BackgroundTransfers
from rworker.transfers.neighbours import NeighbourConnection
from rworker.worker import RWorker

TIMEOUT_S = 60.0
TURN_S = 5e-3


def keys_of(kv: KVSpec, num_tokens: int, seed: int, first_token: int = 0) -> list[bytes]:
    """Keys of a sequence's blocks."""
    ends = [min(x + kv.block_size, num_tokens) for x in range(0, num_tokens, kv.block_size)]
    names = [f"{seed}/{first_token + end}".encode() for end in ends]
    return [blake2b(name, digest_size=16).digest() for name in names]


class Hosts:
    """R-workers by name, which reach each other."""

    def __init__(self) -> None:
        self.by_name: dict[str, Host] = {}
        self.now_s = 0.0

    def add(self, name: str, kv: KVSpec, first_head: int = 0) -> Host:
        self.by_name[name] = Host(self, name, kv, first_head)
        return self.by_name[name]

    def open(self, address: str) -> NeighbourConnection:
        if address not in self.by_name:
            raise ConfigError(f"there is no R-worker {address!r}")
        here, there = connect(InprocHub(), "a reader", self.by_name[address].hub, address)
        self.by_name[address].readers.append(there)
        return here

    def run(self, most_turns: int = 10_000) -> None:
        """Until nobody has anything to do."""
        for _ in range(most_turns):
            self.now_s += TURN_S
            busy = [host.turn() for host in list(self.by_name.values())]
            if not any(busy):
                return
        raise AssertionError("they never come to an end")


class Host:
    """An R-worker, and the S-worker that speaks to it."""

    def __init__(self, hosts: Hosts, name: str, kv: KVSpec, first_head: int) -> None:
        self.name, self.kv, self.first_head = name, kv, first_head
        self.hub: InprocHub[FromRWorker, ToRWorker] = InprocHub()
        self.readers: list[InprocConnection[FromRWorker, ToRWorker]] = []
        own: InprocHub[ToRWorker, FromRWorker] = InprocHub()
        self.s_worker, _ = connect(own, name, self.hub, "the S-worker")
        self.state = RWorkerState(name, kv_bytes=64 << 20)
        self.executor = AttentionExecutor(kernels=reference)
        self.behind = BackgroundTransfers(self.executor, hosts, self._tell, lambda: hosts.now_s)
        welcome = self.ask(replace(hello_for(kv), max_blocks=NUM_BLOCKS))
        assert isinstance(welcome, Welcome)

    def _tell(self, peer: int, news: Any) -> None:
        self.hub.connections[peer].send(news)

    @property
    def books(self) -> CacheState:
        cache = self.state._caches.at(0)
        assert cache is not None
        return cache.books

    @property
    def num_free(self) -> int:
        return self.books.store.pool.num_available

    def turn(self) -> bool:
        """Deal with one message, or with what is behind; whether there was something."""
        try:
            peer, message = self.hub.receive_any(0)
        except PeerLostError as error:
            self._obey((HangUp(error.index),))
            return True
        except WorkerError:
            if self.behind.wait_s is None:
                return False
            self.behind.work()
            return True
        self._obey(self.state.handle(peer, message))
        return True

    def _obey(self, instructions: Any) -> None:
        worker = RWorker(self.hub, self.state, self.executor, self.behind)
        assert worker.obey(instructions)
        self.state.check_invariants()

    def tell(self, message: ToRWorker) -> None:
        """Of the S-worker; it is dealt with at once."""
        self.s_worker.send(message)
        while not self.hub._arrivals.empty() or self.hub._pending:
            self.turn()

    def ask(self, message: ToRWorker) -> Any:
        self.tell(message)
        answer = self.s_worker.poll()
        assert answer is not None
        return answer

    def news(self) -> list[Done]:
        """What the S-worker was told unasked."""
        told: list[Done] = []
        while (answer := self.s_worker.poll()) is not None:
            assert isinstance(answer, Done), answer
            told.append(answer)
        return told

    def open(self, sequence: int, num_tokens: int) -> None:
        assert self.ask(Open(sequence, num_tokens)) == Accepted(sequence)

    def close(self, sequence: int) -> None:
        self.tell(Close(sequence))

    def fill(self, sequence: int, num_tokens: int, seed: int, first_token: int = 0) -> None:
        """A sequence whose tokens are known by ``seed``; or some of its tokens and heads."""
        self.open(sequence, num_tokens)
        ids, counts = np.array([sequence], np.int64), np.array([num_tokens], np.int32)
        slots = self.books.store.append(ids, counts).slots
        shape = ChunkShape.whole(self.kv, ChunkForm.TOKENS, num_tokens)
        data = np.zeros(shape.num_bytes, np.uint8)
        for layer in shape.layers:
            for rows in shape.tokens(data, layer):
                if rows is not None:
                    rows[...] = self._known(seed, layer, first_token, rows)
        self.executor.place(PlaceChunk(HolderId(0), shape, slots, data))

    def _known(self, seed: int, layer: int, first_token: int, rows: NDArray[Any]) -> Any:
        """Rows [T, heads, width] that every host would make of these tokens and
        heads of a sequence."""
        tokens = np.arange(first_token, first_token + rows.shape[0])[:, None, None]
        heads = np.arange(self.first_head, self.first_head + rows.shape[1])[None, :, None]
        width = np.arange(rows.shape[2])[None, None, :]
        mixed = seed * 101 + layer * 31 + tokens * 7 + heads * 3 + width
        return (mixed % 113).astype(rows.dtype)

    def holds(self, sequence: int, num_tokens: int, seed: int, first_token: int = 0) -> bool:
        """Whether that is what it has of a sequence, to the bit."""
        ids, counts = np.array([sequence], np.int64), np.array([num_tokens], np.int32)
        slots = self.books.store.slots(ids, np.zeros(1, np.int32), counts)
        layout = layout_of(self.kv)
        for layer, pool in enumerate(self.executor._caches[HolderId(0)].pool):
            tokens = allocate_tokens(layout, num_tokens)
            reference.gather(layout, pool, slots, *tokens)
            for rows in tokens:
                if rows is not None:
                    known = self._known(seed, layer, first_token, rows)
                    if rows.tobytes() != np.ascontiguousarray(known).tobytes():
                        return False
        return True

    def offer(self, sequence: int, num_tokens: int, seed: int, first_token: int = 0) -> None:
        """Name all blocks of a sequence, which is closed."""
        keys = keys_of(self.kv, num_tokens, seed, first_token)
        num_full = num_tokens // self.kv.block_size
        if num_full:
            self.tell(Name(sequence, 0, words_of(keys[:num_full])))
        self.tell(Close(sequence, tail=keys[-1].hex() if len(keys) > num_full else ""))

    def fetch(
        self, job: int, num_tokens: int, *sources: KVSource, seed: int, **options: Any
    ) -> None:
        """Fetch the blocks of a sequence that is known by ``seed``."""
        keys, tail = words_of(keys_of(self.kv, num_tokens, seed)), num_tokens % self.kv.block_size
        here = {"timeout_s": TIMEOUT_S, "first_head": self.first_head, **options}
        self.tell(Fetch(job, keys, sources, tail, **here))

    def has(self, num_tokens: int, seed: int, first_token: int = 0) -> bool:
        """Return True if the blocks of a sequence hold its K and V, to the bit."""
        keys = words_of(keys_of(self.kv, num_tokens, seed, first_token))
        sequence = 1 << 40
        assert self.ask(Open(sequence, num_tokens, num_tokens, keys)) == Accepted(sequence)
        is_right = self.holds(sequence, num_tokens, seed, first_token)
        self.tell(Close(sequence))
        return is_right

    def forget(self, num_tokens: int, seed: int) -> None:
        keys = keys_of(self.kv, num_tokens, seed)
        if keys := [key for key in keys if key in self.books.store.cached]:
            self.tell(Forget(words_of(keys)))

    def source(self, num_tokens: int, first_token: int = 0, **options: Any) -> KVSource:
        heads, layers = (self.first_head, self.kv.num_kv_heads), (0, self.kv.num_layers)
        return KVSource(self.name, READING, first_token, num_tokens, *heads, *layers, **options)

    def die(self) -> None:
        for reader in self.readers:
            reader.close()
