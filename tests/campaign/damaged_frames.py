"""Messages that were damaged, or forged: what reads them refuses them or takes
them for others that a peer may send, and other peers notice nothing.

Each draws its damage from a seed. Three targets, from the inside out: the codec; an R-worker's
state machine with its real kernels, which serves an honest peer beside; and an R-worker's port.
"""

from __future__ import annotations

import contextlib
import random
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import zmq
from chunk_memory import Memory
from messages_for_tests import from_r_worker, in_frames, in_one_piece, same, to_r_worker
from state_machine import HELLO, HKV, HQ, KV, KV_BYTES, NUM_LAYERS, D, step_of
from values import replace

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import TakeOver, Truncate
from fastdecode.wire.codec import Codec
from fastdecode.wire.messages import (
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    Close,
    Extend,
    Message,
    Open,
    Shutdown,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.zmq.hub import ZmqHub, ZmqListener
from rworker.attention import AttentionExecutor
from rworker.instructions import HangUp
from rworker.serving_terms import ServingTerms
from rworker.state import RWorkerState
from rworker.stream.mirror import Mirror
from rworker.worker import RWorker, serve

SMALL = replace(HELLO, max_blocks=16)
SESSION = 77
WAIT_S = 300.0
_CODEC = Codec()
_EDGES = (0, 1, -1, 2, 255, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1, -(1 << 63))


def damaged(chance: random.Random, message: Message) -> bytes:
    """Return a message with some of its bytes changed, cut off or added to."""
    data = bytearray(in_one_piece(message).tobytes())
    head_bytes = len(_CODEC.encode(message).head)
    kind = chance.randrange(8)
    if kind == 0:
        return bytes(data[: chance.randrange(len(data))])
    if kind == 1:
        return bytes(data) + chance.randbytes(chance.randrange(1, 300))
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(head_bytes)
        if kind % 2 == 0:
            data[at] ^= 1 << chance.randrange(8)
        else:
            edge = max(-(1 << 63), min(chance.choice(_EDGES), (1 << 63) - 1))
            word = struct.pack(chance.choice("<>") + "q", edge)
            width = min(chance.choice((1, 2, 4, 8)), head_bytes - at)
            data[at : at + width] = word[:width]
    if kind == 7 and len(data) > head_bytes:  # elements of arrays
        for _ in range(chance.randrange(1, 9)):
            data[chance.randrange(head_bytes, len(data))] = chance.randrange(256)
    return bytes(data)


def read(data: bytes) -> Message | None:
    """Return the message. None if it is refused."""
    try:
        return _CODEC.decode(np.frombuffer(bytearray(data), np.uint8))
    except ProtocolError:
        return None


def to_codec(number: int, chance: random.Random) -> Counter[str]:
    """What it takes for a message says the same when it is sent on."""
    counts: Counter[str] = Counter()
    messages = [*to_r_worker(), *from_r_worker()]
    small = [message for message in messages if len(in_one_piece(message)) < 40_000]
    for _ in range(number):
        found = read(damaged(chance, chance.choice(small)))
        counts["refused" if found is None else "taken for a message"] += 1
        if found is not None:
            again = read(in_one_piece(found).tobytes())
            is_same = again is not None and same(in_one_piece(again), in_one_piece(found))
            counts["changed"] += not is_same
    return counts


class _End:
    """A peer's end: what it was answered."""

    peer = "a peer"

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def send(self, message: Any) -> None:
        self.answers.append(message)

    def close(self) -> None:
        pass


def conversation(chance: random.Random, holder: int) -> list[ToRWorker]:
    """What an S-worker says for a prompt, a fork of it and some tokens."""

    def arrays(begin: BeginStep, layer: int) -> Attend:
        rng = np.random.default_rng(layer)
        num_q, num_kv = int(begin.num_queries.sum()), int(begin.num_new.sum())
        q, k, v = (
            rng.standard_normal((num, heads, D)).astype(np.float32)
            for num, heads in ((num_q, HQ), (num_kv, HKV), (num_kv, HKV))
        )
        return Attend(begin.step, begin.lane, layer, q, k, v)

    length = chance.randrange(2, 12)
    said: list[ToRWorker] = [replace(SMALL, holder=holder, session=SESSION), Open(1, 40)]
    steps = [step_of((1, 0, length)), step_of((1, length, 1), (2, length, 1), step=1)]
    steps += [step_of((2, length + 1, 1), step=2)]
    for place, begin in enumerate(steps):
        said += [begin, *(arrays(begin, layer) for layer in range(NUM_LAYERS))]
        said += [Open(2, 20, length, parent_id=1)] if place == 0 else [Extend(2, 30)]
    ids, most = np.array([1, 2]), np.array([length, 3], np.int32)
    said += [Truncate(2, 3), TakeOver(SESSION, ids, most, holder)]
    return [*said, Close(1), Close(2)]


def mirrored(chance: random.Random, holder: int) -> list[ToRWorker]:
    """What a neighbour says of a cache that it has kept here."""
    cache = Memory(KV, 16)
    cache.books.hello = replace(SMALL, session=SESSION)
    mirror = Mirror(HolderId(holder), cache.books, cache)
    said: list[ToRWorker] = [mirror.hello]
    parts = {sequence: chance.randrange(1, 20) for sequence in (1, 2)}
    changes: list[Any] = [Open(sequence, 20) for sequence in parts]
    for change in [*changes, Extend(2, 24), Truncate(1, 1), Close(2)]:
        if isinstance(change, Truncate):
            cache.books.store.truncate(change.sequence_id, change.num_tokens)
        elif isinstance(change, Close):
            cache.books.close(change)
        else:
            cache.books.reserve(change)
        mirror.follow(change)
        if isinstance(change, Open):
            count = np.array([parts[change.sequence_id]], np.int32)
            cache.books.store.append(np.array([change.sequence_id]), count)
        while (message := mirror.next()) is not None:
            said.append(message)
    return said


def any_conversation(chance: random.Random, holder: int) -> list[ToRWorker]:
    return chance.choice((conversation, mirrored))(chance, holder)


class Served:
    """An R-worker that serves an honest peer, which asks the same again and again."""

    HONEST = 0

    def __init__(self) -> None:
        self.executor = AttentionExecutor(num_threads=1)
        self.state = RWorkerState("r", kv_bytes=KV_BYTES, serving=ServingTerms(keeps_serving=True))
        self.peers = {self.HONEST: _End()}
        said = conversation(random.Random(0), 0)
        self._said = said[2:-4]
        self.tell(self.HONEST, said[0])
        self.expected = self.honest_answers()

    def at_work(self) -> RWorker:
        peers: Any = SimpleNamespace(connections=self.peers)
        return RWorker(peers, self.state, self.executor)

    def tell(self, peer: int, message: ToRWorker) -> None:
        """What a peer says. What isn't answered with Failed, but raised, is a defect."""
        self.at_work().obey(self.state.handle(peer, message))
        self.state.check_invariants()

    def honest_answers(self) -> list[AttendResult]:
        """Return the answers to a prompt, a fork and some tokens."""
        end = self.peers[self.HONEST]
        end.answers.clear()
        for message in (Open(1, 40), *self._said, Close(1), Close(2)):
            self.tell(self.HONEST, message)
        return [answer for answer in end.answers if isinstance(answer, AttendResult)]

    def is_unchanged(self) -> bool:
        found = self.honest_answers()
        return len(found) == len(self.expected) and all(
            same(replace(one, compute_s=0.0), replace(other, compute_s=0.0))
            for one, other in zip(found, self.expected, strict=True)
        )


def to_state(number: int, chance: random.Random) -> Counter[str]:
    """Peers that come and go, and damage what they say."""
    counts: Counter[str] = Counter()
    served = Served()
    peer = sent = 0
    while sent < number:
        peer += 1
        served.peers[peer] = end = _End()
        for message in any_conversation(chance, holder=chance.choice((1, 2))):
            found: Any = message
            if chance.random() < 0.3:
                sent += 1
                found = read(damaged(chance, message))
                counts["refused" if found is None else "handled"] += 1
            if isinstance(found, ToRWorker) and not isinstance(found, Shutdown):
                served.tell(peer, found)
            if end.answers and type(end.answers[-1]).__name__ == "Failed":
                break
        served.at_work().obey((HangUp(peer),))
        del served.peers[peer]
        if peer % 20 == 0:
            counts["changed"] += not served.is_unchanged()
    return counts


@contextlib.contextmanager
def listening() -> Iterator[str]:
    """An R-worker at an address, in a thread."""
    listener = ZmqListener("tcp://127.0.0.1:*", "r", silence_s=30.0)
    state = RWorkerState("r", kv_bytes=KV_BYTES, num_threads=1)
    thread = threading.Thread(target=serve, args=(listener, state, AttentionExecutor()))
    thread.start()
    try:
        yield listener.address
    finally:
        thread.join(WAIT_S)
        listener.close()
        assert not thread.is_alive(), "it didn't end"


def to_port(number: int, chance: random.Random) -> Counter[str]:
    """Strangers that send damaged conversations, while an honest S-worker is served."""
    counts: Counter[str] = Counter()
    context: Any = zmq.Context()
    with listening() as address, contextlib.closing(ZmqHub()) as hub:
        connection = hub.add(address)
        connection.send(replace(SMALL, holder=0))
        assert isinstance(connection.receive(WAIT_S), Welcome)
        sent = 0
        while sent < number:
            with context.socket(zmq.DEALER) as stranger:
                stranger.linger = 1000
                stranger.connect(address)
                for message in any_conversation(chance, holder=1)[: chance.randrange(1, 30)] * 4:
                    is_damaged = chance.random() < 0.8
                    whole = in_one_piece(message).tobytes()
                    head, *frames = in_frames(message)
                    if is_damaged:
                        whole = damaged(chance, message)
                        head = whole[: len(head)]
                        frames = frames[: chance.randrange(len(frames) + 3)]
                    stranger.send_multipart(chance.choice(([whole], [head, *frames])))
                    sent += is_damaged
            connection.send(Open(sent, 8))
            answer = connection.receive(WAIT_S)
            is_honest = answer == Accepted(sent)
            counts["honest answers" if is_honest else "changed"] += 1
            connection.send(Close(sent))
        connection.send(Shutdown())
    context.term()
    counts["sent"] = sent
    return counts
