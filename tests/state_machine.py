"""The R-worker's state machine for tests: small, with its books checked after every message."""

from __future__ import annotations

from typing import Any

import numpy as np
from messages_for_tests import in_one_piece
from values import replace

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.blocks import ChunkForm, StoreChunk
from fastdecode.wire.codec import Codec
from fastdecode.wire.messages import Attend, BeginStep, Failed, Hello, Message
from rworker.instructions import Compute, HangUp, Instruction, Send
from rworker.state import RWorkerState
from rworker.stream.chunks import ChunkShape

CODEC = Codec()
HQ, HKV, D, NUM_LAYERS, BLOCK_SIZE = 4, 2, 16, 3, 4


SPEC = AttentionSpec(num_q_heads=HQ, num_kv_heads=HKV, head_dim=D, scale=0.25)


KV = KVSpec(NUM_LAYERS, HKV, D, DType.FLOAT32, BLOCK_SIZE)


HELLO = Hello("hash", KV, (SPEC,) * NUM_LAYERS, DType.FLOAT32)


KV_BYTES = 200_000


class Worker:
    """A state machine whose books are checked after every message; its peer is 0,
    where none is named."""

    def __init__(self, kv_bytes: int = KV_BYTES, **options: Any) -> None:
        self.state = RWorkerState("r7", kv_bytes=kv_bytes, num_threads=3, **options)

    def tell(self, message: Any) -> tuple[Instruction, ...]:
        return self.say(0, message)

    def say(self, peer: int, message: Any) -> tuple[Any, ...]:
        instructions = self.state.handle(peer, message)
        self.state.check_invariants()
        return instructions

    def lose(self, peer: int, *, may_return: bool = True) -> tuple[Instruction, ...]:
        instructions = self.state.lost(peer, may_return=may_return)
        self.state.check_invariants()
        return instructions

    def step_from(self, peer: int, begin: BeginStep, num_layers: int = NUM_LAYERS) -> None:
        """All of a step, or only its first layers."""
        self.say(peer, begin)
        for layer in range(num_layers):
            (compute,) = self.say(peer, attend(begin, layer, holder=begin.holder))
            assert isinstance(compute, Compute) and compute.to == peer

    def answer(self, message: Any) -> Any:
        (instruction,) = self.tell(message)
        assert isinstance(instruction, Send)
        return instruction.message

    def fails(self, message: Any, *reasons: str, code: str = "protocol_error") -> None:
        """Decoding refuses the message, or the state machine does."""
        if refused := refusal(message):
            assert refused.code == code
            for reason in (type(message).__name__, *reasons):
                assert reason in refused.message
            return
        send, stop = self.tell(message)
        assert isinstance(send, Send)
        assert stop == HangUp(0)
        failed = send.message
        assert isinstance(failed, Failed)
        assert (failed.worker, failed.code) == ("r7", code)
        for reason in (type(message).__name__, *reasons):
            assert reason in failed.message

    def run_step(self, begin: BeginStep) -> list[Compute]:
        self.tell(begin)
        computes = []
        for layer in range(NUM_LAYERS):
            (compute,) = self.tell(attend(begin, layer))
            assert isinstance(compute, Compute)
            computes.append(compute)
        return computes


def refusal(message: Any) -> ProtocolError | None:
    """Return why a message would not reach an R-worker over a network."""
    try:
        if isinstance(message, Message):
            CODEC.decode(in_one_piece(message))
    except ProtocolError as error:
        return error
    return None


def step_of(
    *rows: tuple[int, int, int],
    step: int = 0,
    lane: int = 0,
    queries: list[int] | None = None,
    **more: Any,
) -> BeginStep:
    """Rows of (sequence, num_past, num_new); all new tokens are queries and are
    visible unless told."""
    ids, past, new = (np.array(column) for column in zip(*rows, strict=True))
    fields = {
        "step": step,
        "lane": lane,
        "sequence_ids": ids.astype(np.int64),
        "num_past": past.astype(np.int32),
        "num_new": new.astype(np.int32),
        "num_queries": np.array(new if queries is None else queries, np.int32),
        "num_visible": (past + new).astype(np.int32),
    }
    return BeginStep(**{**fields, **more})


def chunk(*pieces: tuple[int, int, int], **changes: Any) -> StoreChunk:
    """Return a replica's tokens. Pieces are of (sequence, first token, how many)."""
    ids, first, count = (np.array(column) for column in zip(*pieces, strict=True))
    columns = ids.astype(np.int64), first.astype(np.int32), count.astype(np.int32)
    shape = ChunkShape.whole(KV, ChunkForm.TOKENS, int(count.sum()))
    made = StoreChunk(ChunkForm.TOKENS, *columns, np.zeros(shape.num_bytes, np.uint8))
    return replace(made, **changes)


def attend(begin: BeginStep, due: int, **changes: Any) -> Attend:
    T_q, T_kv = int(begin.num_queries.sum()), int(begin.num_new.sum())
    arrays = {"q": (T_q, HQ, D), "k": (T_kv, HKV, D), "v": (T_kv, HKV, D)}
    fields = {name: np.zeros(shape, np.float32) for name, shape in arrays.items()}
    return Attend(**{"step": begin.step, "lane": begin.lane, "layer": due, **fields, **changes})
