"""A random conversation with an R-worker, beside the answers that it must give."""

from __future__ import annotations

import numpy as np
import torch
from attention_cases import dense
from values import replace

from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.messages import (
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    Close,
    FromRWorker,
    Hello,
    Open,
    ToRWorker,
    Welcome,
)
from rworker.worker import WorkerThread
from sworker.dtypes import torch_dtype

HQ, HKV, D, BLOCK_SIZE = 6, 2, 20, 8
PLAIN = AttentionSpec(HQ, HKV, D, scale=D**-0.5)
LAYERS = (
    PLAIN,
    replace(PLAIN, sliding_window=11),
    replace(
        PLAIN, alibi_slopes=tuple(2.0 ** -(i + 1) for i in range(HQ)), logit_softcap=5.0, scale=0.4
    ),
)
WAIT_S = 120.0


def to_float(bits: np.ndarray, dtype: DType) -> np.ndarray:
    whole: np.ndarray = torch.from_numpy(bits).view(torch_dtype(dtype)).float().numpy()
    return whole


def to_bits(x: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the carrier's numbers of ``x``, rounded to nearest."""
    if dtype is DType.FLOAT32:
        return x
    bits: np.ndarray = torch.from_numpy(x).to(torch_dtype(dtype)).view(torch.uint16).numpy()
    return bits


def rounded(x: np.ndarray, dtype: DType) -> np.ndarray:
    return to_float(to_bits(x, dtype), dtype)


def hello(kv_dtype: DType, activation_dtype: DType = DType.FLOAT32) -> Hello:
    return Hello(
        "hash", KVSpec(len(LAYERS), HKV, D, kv_dtype, BLOCK_SIZE), LAYERS, activation_dtype
    )


class Conversation:
    """Drives one R-worker at random, and knows all the K and V that it should hold."""

    def __init__(
        self, worker: WorkerThread, kv_dtype: DType, activation_dtype: DType, seed: int
    ) -> None:
        self.connection = worker.connection
        self.kv_dtype = kv_dtype
        self.activation_dtype = activation_dtype
        self.rng = np.random.default_rng(seed)
        self.cached: dict[
            int, list[tuple[np.ndarray, np.ndarray]]
        ] = {}  # per sequence and layer: k, v
        self.room: dict[int, int] = {}
        self.next_id = 0
        self.num_compared = 0

    def ask(self, message: ToRWorker) -> FromRWorker:
        self.connection.send(message)
        return self.connection.receive(WAIT_S)

    def length(self, sequence: int) -> int:
        return len(self.cached[sequence][0][0])

    def open(self) -> None:
        room = int(self.rng.integers(1, 90))
        if self.ask(Open(self.next_id, room)) == Accepted(self.next_id):
            empty = np.zeros((0, HKV, D), np.float32)
            self.cached[self.next_id] = [(empty, empty) for _ in LAYERS]
            self.room[self.next_id] = room
        self.next_id += 1

    def fork(self) -> None:
        parents = [s for s in self.cached if self.length(s)]
        if parents:
            parent = int(self.rng.choice(parents))
            shared = int(self.rng.integers(1, self.length(parent) + 1))
            room = shared + int(self.rng.integers(0, 20))
            if self.ask(Open(self.next_id, room, shared, parent_id=parent)) == Accepted(
                self.next_id
            ):
                self.cached[self.next_id] = [
                    (k[:shared], v[:shared]) for k, v in self.cached[parent]
                ]
                self.room[self.next_id] = room
            self.next_id += 1

    def close(self) -> None:
        if self.cached:
            sequence = int(self.rng.choice(list(self.cached)))
            self.connection.send(Close(sequence))
            del self.cached[sequence], self.room[sequence]

    def begin(self, step: int, lane: int, sequences: list[int]) -> BeginStep:
        """Each sequence decodes, stores a prompt's first chunk, attends a later
        chunk's past, or a chunk causally, or attends without growing."""
        rows = []
        for sequence in sequences:
            past, kind = self.length(sequence), self.rng.integers(5)
            new = 1 if kind == 0 else int(self.rng.integers(1, self.room[sequence] - past + 1))
            queries = 0 if kind == 1 else new if kind == 2 else int(self.rng.integers(1, new + 1))
            beyond = 0
            if kind == 4:  # a part of a sequence that has its last tokens elsewhere
                queries, new = int(self.rng.integers(1, 4)), 0
                beyond = queries + int(self.rng.integers(0, 30))
            rows.append((past, new, queries, past if kind == 2 else past + new, beyond))
        past, new, queries, visible, beyond = np.array(rows, np.int32).T.copy()
        ids, want_lse = np.array(sequences, np.int64), bool(self.rng.integers(2))
        return BeginStep(
            step, lane, ids, past, new, queries, visible, want_lse, beyond if beyond.any() else None
        )

    def step(self, step: int) -> None:
        """One step in each of two lanes, their layers interleaved."""
        free = [s for s in self.cached if self.length(s) < self.room[s]]
        self.rng.shuffle(free)
        cut = int(self.rng.integers(0, len(free) + 1))
        lanes = [(lane, part) for lane, part in enumerate((free[:cut], free[cut:])) if part]
        begins = [self.begin(step, lane, part) for lane, part in lanes]
        for begin in begins:
            self.connection.send(begin)
        for layer in range(len(LAYERS)):
            sent = [self.send_layer(begin, layer) for begin in begins]
            for begin, q in zip(begins, sent, strict=True):
                self.check(begin, layer, q, self.connection.receive(WAIT_S))

    def send_layer(self, begin: BeginStep, layer: int) -> np.ndarray:
        T_q, T_kv = int(begin.num_queries.sum()), int(begin.num_new.sum())
        shapes = ((T_q, HQ, D), (T_kv, HKV, D), (T_kv, HKV, D))
        bits = [
            to_bits(self.rng.standard_normal(shape, np.float32), self.activation_dtype)
            for shape in shapes
        ]
        self.connection.send(Attend(begin.step, begin.lane, layer, *bits))
        q, k, v = (to_float(x, self.activation_dtype) for x in bits)
        ends = np.cumsum(begin.num_new)
        for sequence, end, new in zip(
            begin.sequence_ids.tolist(), ends, begin.num_new, strict=True
        ):
            old_k, old_v = self.cached[sequence][layer]
            self.cached[sequence][layer] = (
                np.concatenate([old_k, rounded(k[end - new : end], self.kv_dtype)]),
                np.concatenate([old_v, rounded(v[end - new : end], self.kv_dtype)]),
            )
        return q

    def check(self, begin: BeginStep, layer: int, q: np.ndarray, result: FromRWorker) -> None:
        assert isinstance(result, AttendResult), result
        assert (result.step, result.lane, result.layer) == (begin.step, begin.lane, layer)
        assert result.o.shape == q.shape
        assert result.o.dtype == self.activation_dtype.carrier
        assert (result.lse is not None) == begin.want_lse
        assert result.compute_s >= 0
        o = to_float(result.o, self.activation_dtype)
        # o is rounded once, to the activations' dtype; all else is float32, or
        # split into pairs of bfloat16, which keep 16 bits, where bfloat16 K and
        # V are multiplied as such.
        close = 3e-6 if self.kv_dtype is not DType.BFLOAT16 else 5e-5
        # Then q is rounded again, scaled.
        both = DType.BFLOAT16 is self.kv_dtype is self.activation_dtype
        close_lse = 4e-3 if both else close
        tolerance = {DType.FLOAT32: close, DType.FLOAT16: 1e-3, DType.BFLOAT16: 8e-3}[
            self.activation_dtype
        ]
        first = 0
        for i, sequence in enumerate(begin.sequence_ids.tolist()):
            num_queries, visible = int(begin.num_queries[i]), int(begin.num_visible[i])
            rows = slice(first, first + num_queries)
            first += num_queries
            beyond = 0 if begin.num_beyond is None else int(begin.num_beyond[i])
            position = int(begin.num_past[i] + begin.num_new[i]) + beyond - num_queries
            k, v = self.cached[sequence][layer]
            qkv = (torch.from_numpy(x) for x in (q[rows], k, v))
            want_o, want_lse = (
                x.numpy() for x in dense(*qkv, LAYERS[layer], past=position, keys=slice(visible))
            )
            np.testing.assert_allclose(o[rows], want_o, rtol=tolerance, atol=tolerance)
            if result.lse is not None:
                np.testing.assert_allclose(
                    result.lse[rows], want_lse, rtol=close_lse, atol=close_lse
                )
            self.num_compared += num_queries


def greeted(worker: WorkerThread, message: Hello) -> Welcome:
    worker.connection.send(message)
    welcome = worker.connection.receive(WAIT_S)
    assert isinstance(welcome, Welcome), welcome
    return welcome
