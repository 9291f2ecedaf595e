"""What R-workers answer for a layer, and what prompt stages write.

================  =========  ==========================================================
message           direction  meaning, and the answer
================  =========  ==========================================================
``StorePrompt``   P → R      one layer's K and V of prompts' next tokens, from a stage
                             that runs prompts only → ``AttendResult`` without queries
================  =========  ==========================================================

Prompt stages (P) have layers of their own, cut otherwise than those of the stages
whose the R-workers are: several of them may have layers that one R-worker keeps,
and reach it over connections of their own. So nothing is begun: the first that
comes of a sequence's next tokens makes room for them, and the sequence is
**arriving** (``fastdecode.wire.kv.chunks``) until they have come in every layer.
They come once in each, in any order of layers, and the tokens behind them only
then. The sequence is open, with room for them, and nobody steps it meanwhile.

The S-worker may drop a cache while a prompt stage has a step on it, whose rows mean
nothing then. What comes for it is answered, and nothing is stored. A prompt that goes on
behind cached tokens has its stage read them (``FetchChunk``); of a cache that was dropped
it gets an answer without data.

A peer may say this that names the session of a cache whose S-worker has said
that prompts come from elsewhere (``Hello.feeders``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import Shard
from fastdecode.wire.traits import I32, I64, Activations, Asking, F32Rows, Int, Message, Role


class AttendResult(Message, frozen=True, tag=68, eq=False):
    step: Int
    lane: Int
    layer: Int
    o: Activations
    lse: F32Rows | None
    """None unless the step wants it."""
    compute_s: float
    """Seconds spent appending and attending, waiting excluded."""

    lends = True

    def check_arrays(self, shape: tuple[int, ...], dtype: np.dtype[Any], *, want_lse: bool) -> None:
        """Raises ProtocolError: o [T, Hq, D] or lse isn't what was asked for."""
        if (found := (self.o.dtype, self.o.shape)) != (dtype, shape):
            raise ProtocolError(f"answered o of {found[0]} {found[1]}, not {dtype} {shape}")
        due = shape[:2] if want_lse else None
        if (lse := getattr(self.lse, "shape", None)) != due:
            raise ProtocolError(f"answered lse of shape {lse}, where {due or 'none'} was asked")


class StorePrompt(Asking, frozen=True, tag=60, eq=False):
    """It names the cache by itself: none is the sender's own."""

    session: Int
    step: Int
    lane: Int
    layer: Int
    """Among the layers that the R-worker keeps; of a cache group, as ``Shard.layers`` counts."""
    sequence_ids: I64
    num_past: I32
    """Tokens that came before, in every layer."""
    num_new: I32
    """At least 1 each."""
    k: Activations
    v: Activations
    holder: Int
    """Whose cache it is; the sender has none of its own."""

    answers = (AttendResult,)
    said_by = frozenset({Role.FEEDER})
    repeated = ("step", "lane", "layer")

    def part(self, shard: Shard) -> StorePrompt:
        first = 0 if shard.layers is None else shard.layers.start
        if (heads := shard.heads) is None:
            return replace(self, layer=self.layer - first)
        # Copies, since a part of the heads doesn't lie in one piece.
        k, v = (np.ascontiguousarray(x[:, heads.kv]) for x in (self.k, self.v))
        return replace(self, layer=self.layer - first, k=k, v=v)

    def join(self, answers: Sequence[Any]) -> AttendResult:
        results: Sequence[AttendResult] = answers
        slowest_s = max(result.compute_s for result in results)
        return replace(results[0], layer=self.layer, compute_s=slowest_s)
