"""The state of one cache: open sequences, and steps under way.

Every message about a cache is checked here, before it reaches the KV store or a kernel. One that
breaks the protocol raises ``ProtocolError`` and changes nothing. An R-worker keeps such books for
each of its caches, and the S-worker for the one on its own device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import CapacityError, ProtocolError
from fastdecode.core.spec import MAX_SEQUENCE_TOKENS, AttentionSpec
from fastdecode.wire.blocks import NO_PARENT, Forget, Name
from fastdecode.wire.messages import (
    MAX_BLOCKS,
    MAX_STEP_TOKENS,
    Accepted,
    Attend,
    BeginStep,
    Close,
    Extend,
    Hello,
    Open,
    Refused,
)
from rworker.blocks.appending import Appended, past_of
from rworker.blocks.kv_store import DEFAULT_MAX_SEQUENCES, KVStore
from rworker.checks import checked_keys

_RULES = (
    "num_past must equal the {cached} tokens cached here",
    "num_new must be at least 1, or 0 where something is attended",
    f"num_beyond must be at least 0, and no sequence is longer than {MAX_SEQUENCE_TOKENS} tokens",
    "num_queries must be within 0 … num_new + num_beyond",
    "num_visible must be num_past or num_past + num_new",
)
"""Rules of a step's counts, in the order in which they are checked."""


@dataclass
class OpenStep:
    """A step that lacks layers."""

    step: int
    sequence_ids: list[int]
    num_new: int  # T_kv
    num_queries: int  # T_q
    next_layer: int = 0


class OpenSteps:
    """Steps of one cache that lack layers, at most one per lane."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.of_lane: dict[int, OpenStep] = {}
        self.settled: dict[int, int] = {}
        """Tokens cached before the open step of a sequence."""

    def check_idle(self, lane: int, step: int) -> None:
        """Raise ProtocolError if the lane that begins this step has one."""
        if lane in self.of_lane:
            raise ProtocolError(
                f"lane {lane} begins step {step}, but its step {self.of_lane[lane].step} is open"
            )

    def check_at_rest(self, sequence: int) -> None:
        """Raise ProtocolError if the sequence is in an open step."""
        if sequence in self.settled:
            raise ProtocolError(f"sequence {sequence} is in an open step")

    def begin(self, lane: int, step: OpenStep, num_past: Seq[int]) -> None:
        """Open a lane's step. ``num_past``: tokens cached before it, of each of its sequences."""
        self.of_lane[lane] = step
        self.settled.update(zip(step.sequence_ids, num_past, strict=True))

    def due(self, lane: int, step_number: int, layer: int) -> OpenStep:
        """Return the lane's open step. Raise ProtocolError if another layer is due, or none."""
        step = self.of_lane.get(lane)
        if step is None:
            raise ProtocolError(f"lane {lane} has no open step")
        if (step_number, layer) != (step.step, step.next_layer):
            raise ProtocolError(
                f"lane {lane} sent step {step_number}, layer {layer} when step {step.step}, "
                f"layer {step.next_layer} was due"
            )
        return step

    def finish_layer(self, lane: int, step: OpenStep) -> bool:
        """Advance to the next layer. Return True if that was the last, and the step is closed."""
        step.next_layer += 1
        if step.next_layer < self._num_layers:
            return False
        del self.of_lane[lane]
        if not self.of_lane:  # nothing else is under way
            self.settled.clear()
        else:
            for sequence in step.sequence_ids:
                self.settled.pop(sequence, None)  # it may be there twice
        return True

    def finish(self, lane: int, step_number: int) -> None:
        """Close a step whose layers ran in one call."""
        step = self.due(lane, step_number, 0)
        step.next_layer = self._num_layers - 1
        self.finish_layer(lane, step)

    def give_up(self) -> None:
        self.settled.clear()
        self.of_lane.clear()

    def check_invariants(self) -> None:
        busy = [i for step in self.of_lane.values() for i in dict.fromkeys(step.sequence_ids)]
        assert sorted(busy) == sorted(self.settled), "open steps and busy sequences differ"


class CacheState:
    """One cache's KV store, and the steps under way in it.

    Args:
        hello: what was agreed. It is checked.
        num_blocks: KV blocks of the cache.
        max_sequences: most sequences open at once.
    """

    def __init__(
        self, hello: Hello, num_blocks: int, *, max_sequences: int = DEFAULT_MAX_SEQUENCES
    ) -> None:
        self.hello = hello
        self.store = KVStore(num_blocks, hello.kv.block_size, max_sequences=max_sequences)
        self._carrier = hello.activation_dtype.carrier
        self.steps = OpenSteps(hello.kv.num_layers)

    def reserve(self, message: Open | Extend) -> Accepted | Refused:
        """Open a sequence, or enlarge its room."""
        store = self.store
        sequence, num_reserved = message.sequence_id, message.num_reserved_tokens
        if isinstance(message, Open):
            _check_origin(message)
        try:
            if isinstance(message, Extend):
                store.extend(sequence, num_reserved)
            elif message.keys is not None:
                blocks = store.cached.of_keys(checked_keys(message.keys))
                gap = range(message.gap_start, message.gap_stop)
                store.resume(sequence, blocks, message.num_tokens, num_reserved, gap)
            elif message.parent_id != NO_PARENT:
                self._check_settled(message)
                store.fork(message.parent_id, sequence, message.num_tokens, num_reserved)
            else:
                store.open(sequence, num_reserved)
        except CapacityError as error:
            return Refused(sequence, error.code, error.message)
        return Accepted(sequence)

    def store_tokens(
        self,
        sequence_ids: NDArray[np.int64],
        first_tokens: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
    ) -> Appended:
        """Make room for the next tokens of a replica's sequences."""
        present = self.store.num_tokens(sequence_ids)
        for i in np.flatnonzero(first_tokens != present)[:1].tolist():
            raise ProtocolError(
                f"tokens from {first_tokens[i]} on of sequence {sequence_ids[i]} have come where "
                f"those from {present[i]} on are due"
            )
        return self.store.append(sequence_ids, num_tokens)

    def close(self, message: Close) -> None:
        """Free a sequence's blocks, or all but its last one, which is cached."""
        sequence = message.sequence_id
        if sequence in self.steps.settled:
            raise ProtocolError(
                f"sequence {sequence} is in an open step: close it after the step's last layer"
            )
        if message.tail:
            if self.num_settled(sequence) < self.store.num_tokens_of(sequence):
                raise ProtocolError(f"sequence {sequence} is not complete in every layer")
            self.store.close(sequence, tail_key=bytes.fromhex(message.tail))
        else:
            self.store.close(sequence)

    def num_settled(self, sequence: int) -> int:
        """Count the tokens of a sequence that every layer has."""
        return self.steps.settled.get(sequence, self.store.num_tokens_of(sequence))

    def settled(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the tokens of each sequence that every layer has, [N]."""
        lengths = self.store.num_tokens(sequences)
        if self.steps.settled:
            for index, sequence in enumerate(sequences.tolist()):
                lengths[index] = self.steps.settled.get(sequence, lengths[index])
        return lengths

    def keep(self, message: Name) -> None:
        """Cache blocks of an open sequence that every layer has."""
        sequence, first = message.sequence_id, message.first_block
        keys = checked_keys(message.keys)
        row = self.store.tables.row(sequence)
        num_settled = self.num_settled(sequence)
        if first + len(keys) > num_settled // self.store.block_size:
            raise ProtocolError(
                f"blocks {first} to {first + len(keys) - 1} of sequence {sequence} are to be kept, "
                f"which has {num_settled} tokens in every layer"
            )
        blocks = self.store.tables.of_row(row)[first : first + len(keys)].copy()
        self.store.cached.keep(keys, blocks)

    def forget(self, message: Forget) -> None:
        self.store.cached.forget(checked_keys(message.keys))

    def begin_step(self, begin: BeginStep) -> Appended:
        """Open a lane's step and make room for its tokens. Its copies precede all writes."""
        self.steps.check_idle(begin.lane, begin.step)
        sequence_ids = self._check_members(begin)
        settled = self.store.num_tokens(begin.sequence_ids)
        check_counts(begin, self._past_beside_gaps(begin) if self.store.tables.gaps else settled)
        num_queries = int(begin.num_queries.sum())
        growing = begin.num_new > 0
        appended = self.store.append(
            begin.sequence_ids[growing], begin.num_new[growing], begin.num_past[growing]
        )
        step = OpenStep(begin.step, sequence_ids, len(appended.slots), num_queries)
        self.steps.begin(begin.lane, step, settled.tolist())
        return appended

    def attend(self, attend: Attend) -> bool:
        """Take the layer that is due, with arrays of the announced sizes. Return True if it was the
        last one, and the step is closed."""
        step = self.steps.due(attend.lane, attend.step, attend.layer)
        spec: AttentionSpec = self.hello.attention[step.next_layer]
        kv_shape = (step.num_new, spec.num_kv_heads, spec.head_dim)
        q_shape = (step.num_queries, spec.num_q_heads, spec.head_dim)
        check_arrays(
            self._carrier,
            ("q", attend.q, q_shape), ("k", attend.k, kv_shape), ("v", attend.v, kv_shape),
        )  # fmt: skip
        return self.steps.finish_layer(attend.lane, step)

    def check_invariants(self) -> None:
        self.steps.check_invariants()
        settled = self.steps.settled
        self.store.check_invariants()
        lengths = self.store.num_tokens(np.array(list(settled), np.int64))
        assert (lengths >= list(settled.values())).all() or not settled, "a step took tokens away"

    def _check_settled(self, message: Open) -> None:
        """Raise ProtocolError unless every layer has the shared tokens."""
        settled = self.steps.settled.get(message.parent_id, message.num_tokens)
        if message.num_tokens > settled:
            raise ProtocolError(
                f"sequence {message.sequence_id} would share {message.num_tokens} tokens of "
                f"sequence {message.parent_id}, which has {settled} in every layer until its step "
                "ends"
            )

    def _past_beside_gaps(self, begin: BeginStep) -> NDArray[np.int64]:
        """Count the tokens that precede each row's, [N]. A row that appends none sees none behind a
        gap."""
        tables = self.store.tables
        num_past = np.where(begin.num_new > 0, begin.num_past, -1)
        return past_of(tables, tables.rows(begin.sequence_ids), num_past)

    def _check_members(self, begin: BeginStep) -> list[int]:
        """Return the step's sequences, each of them once, or twice if it has a gap."""
        if not len(begin.sequence_ids):
            raise ProtocolError("sequence_ids has no entry")
        sequence_ids: list[int] = begin.sequence_ids.tolist()
        members = set(sequence_ids)
        if len(members) < len(sequence_ids):
            self._check_twice(sequence_ids)
        if not self.steps.settled.keys().isdisjoint(members):
            busy = next(x for x in sequence_ids if x in self.steps.settled)
            raise ProtocolError(f"sequence {busy} is in another lane's open step")
        return sequence_ids

    def _check_twice(self, sequence_ids: list[int]) -> None:
        """Raise ProtocolError unless all that are there twice have a gap."""
        tables, counts = self.store.tables, Counter(sequence_ids)
        for sequence, count in counts.items():
            if count > 1 and (count > 2 or tables.row(sequence) not in tables.gaps):
                raise ProtocolError(f"sequence {sequence} is in the step twice")


def _check_origin(message: Open) -> None:
    """Raise ProtocolError unless what a sequence starts with comes from one place."""
    num_origins = (message.keys is not None) + (message.parent_id != NO_PARENT)
    if num_origins != (message.num_tokens > 0):
        raise ProtocolError(
            f"sequence {message.sequence_id} would start with {message.num_tokens} tokens from "
            f"{num_origins} places: a parent, or cached blocks have them"
        )


def check_counts(begin: BeginStep, cached: NDArray[np.int64]) -> None:
    """Check a step's counts. ``cached``: the worker's own token counts, [N]."""
    past, new = begin.num_past, begin.num_new
    queries, visible = begin.num_queries, begin.num_visible
    beyond = np.zeros_like(cached)
    if begin.num_beyond is not None:
        beyond = begin.num_beyond.astype(np.int64)
    broken = (
        past != cached,
        (new < 0) | ((new == 0) & (queries == 0)),
        # Where nothing is beyond, the reservation is the limit.
        (beyond < 0) | ((beyond > 0) & (cached + new + beyond > MAX_SEQUENCE_TOKENS)),
        (queries < 0) | (queries > new + beyond),
        (visible != past) & (visible != cached + new),
    )
    for wrong, rule in zip(broken, _RULES, strict=True):
        if wrong.any():
            i = int(wrong.argmax())
            raise ProtocolError(
                f"sequence {begin.sequence_ids[i]} (num_past={past[i]}, num_new={new[i]}, "
                f"num_beyond={beyond[i]}, num_queries={queries[i]}, num_visible={visible[i]}): "
                f"{rule.format(cached=cached[i])}"
            )
    for what, counts in (("appends", new), ("attends", queries)):
        num_tokens = int(counts.sum(dtype=np.int64))
        if num_tokens > MAX_STEP_TOKENS:
            raise ProtocolError(
                f"the step {what} {num_tokens} tokens; {MAX_STEP_TOKENS} is the most"
            )


def check_arrays(
    dtype: np.dtype[np.generic], *wanted: tuple[str, NDArray[np.generic], tuple[int, ...]]
) -> None:
    """Raise ProtocolError unless arrays, each by its name and shape, are as announced."""
    for name, array, shape in wanted:
        if not isinstance(array, np.ndarray) or array.dtype != dtype:
            found = getattr(array, "dtype", type(array).__name__)
            raise ProtocolError(f"{name} must be an array of {dtype}, not {found}")
        if array.shape != shape:
            raise ProtocolError(
                f"{name} has shape {list(array.shape)}, but {list(shape)} was announced"
            )
        if not array.flags.c_contiguous:
            raise ProtocolError(f"{name} must be C-contiguous")


def blocks_within(num_bytes: int, block_bytes: int, hello: Hello) -> int:
    """Return how many KV blocks to offer.

    Args:
        num_bytes: memory for them.
        block_bytes: bytes of one block id in all layers.

    Raises:
        CapacityError: If the memory does not hold one block.
    """
    kv = hello.kv
    num_blocks = min(num_bytes // block_bytes, hello.max_blocks or MAX_BLOCKS, MAX_BLOCKS)
    if num_blocks < 1:
        raise CapacityError(
            f"{num_bytes} bytes of KV memory don't hold one KV block of {block_bytes} bytes "
            f"({kv.num_layers} layers, {kv.block_size} tokens): give it more memory "
            "(--kv-memory-gb)"
        )
    return num_blocks
