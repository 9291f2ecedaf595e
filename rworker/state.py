"""What an R-worker decides: a message in, instructions out. No sockets, threads, clocks or kernels.

Everything that a peer says is checked here, before it reaches the KV store or a kernel. A message that breaks the
protocol changes nothing; it is answered with ``Failed``, and the worker stops serving that peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import BlockLayout
from fastdecode.core.errors import CapacityError, ConfigError, FastDecodeError, ProtocolError
from fastdecode.core.spec import MAX_SEQUENCE_TOKENS, AttentionSpec
from fastdecode.wire.messages import (
    MAX_ID,
    MAX_LANES,
    MAX_STEP_TOKENS,
    PROTOCOL_VERSION,
    Accepted,
    Attend,
    BeginStep,
    CloseSequence,
    ExtendSequence,
    Failed,
    ForkSequence,
    Hello,
    Inspect,
    OpenSequence,
    Refused,
    Shutdown,
    ToRWorker,
    Welcome,
)
from rworker.instructions import Compute, CopyBlocks, Instruction, Prepare, Send, StepPlan, Stop, TellAboutHost
from rworker.kv_store import DEFAULT_MAX_SEQUENCES, MAX_BLOCKS, KVStore


@dataclass(frozen=True)
class _Session:
    """What ``Hello`` agreed."""

    hello: Hello
    store: KVStore


@dataclass
class _OpenStep:
    """A step of which some layers are still to come."""

    plan: StepPlan
    sequence_ids: list[int]
    next_layer: int = 0


class RWorkerState:
    """One R-worker, serving one peer.

    Args:
        name: what the worker calls itself towards people.
        kv_bytes: memory for K and V; as many blocks as fit in it are offered.
        num_threads: what to tell the peer; the loop's executor has them.
        max_sequences: most sequences open at once.
        model_hash: serve S-workers that run this model only; None: any.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        name: str,
        *,
        kv_bytes: int,
        num_threads: int = 1,
        max_sequences: int = DEFAULT_MAX_SEQUENCES,
        model_hash: str | None = None,
    ) -> None:
        for option, value in (
            ("kv_bytes", kv_bytes),
            ("num_threads", num_threads),
            ("max_sequences", max_sequences),
        ):
            if value < 1:
                raise ConfigError(f"R-worker {name}: {option}={value} must be at least 1")
        self.name = name
        self._kv_bytes = kv_bytes
        self._num_threads = num_threads
        self._max_sequences = max_sequences
        self._model_hash = model_hash
        self.was_inspected = False
        """Whether the peer only wants to know, and measure, what there is."""
        self._session: _Session | None = None
        self._steps: dict[int, _OpenStep] = {}  # by lane
        self._settled: dict[int, int] = {}  # sequence in an open step → tokens cached before that step

    def handle(self, message: ToRWorker) -> tuple[Instruction, ...]:
        """What to do about a message, in this order. Never raises for what a peer did."""
        try:
            return self._dispatch(message)
        except FastDecodeError as error:
            text = f"{type(message).__name__}: {error.message}"
            return Send(Failed(self.name, error.code, text)), Stop()

    def check_invariants(self) -> None:
        """For tests and debugging."""
        busy = [sequence for step in self._steps.values() for sequence in step.sequence_ids]
        assert sorted(busy) == sorted(self._settled), "open steps and busy sequences differ"
        if self._session is None:
            assert not busy, "a step without a Hello"
            return
        store = self._session.store
        store.check_invariants()
        lengths = store.num_tokens(np.array(list(self._settled), np.int64))
        assert (lengths >= list(self._settled.values())).all() or not busy, "a step took tokens away"

    def _dispatch(self, message: ToRWorker) -> tuple[Instruction, ...]:
        match message:
            case Attend():
                return (self._attend(message),)
            case BeginStep():
                return self._begin_step(message)
            case OpenSequence() | ForkSequence() | ExtendSequence():
                return (Send(self._reserve(message)),)
            case CloseSequence():
                self._close(message)
                return ()
            case Hello():
                return self._hello(message)
            case Inspect():
                if self._session is not None:
                    raise ProtocolError("Inspect came in the middle of a job: it has to come before Hello")
                self.was_inspected = True
                return (TellAboutHost(self._num_threads, self._kv_bytes, self._model_hash or ""),)
            case Shutdown():
                return (Stop(),)
            case _:
                raise _unknown(message)

    def _hello(self, hello: Hello) -> tuple[Instruction, ...]:
        _check_hello(hello)
        if self._model_hash not in (None, hello.model_hash) and not self.was_inspected:
            raise ProtocolError(
                f"the S-worker runs the model {hello.model_hash}, this R-worker is kept for {self._model_hash}",
                code="model_mismatch",
            )
        kv = hello.kv
        try:
            layout = BlockLayout(kv.num_kv_heads, kv.head_dim, kv.dtype.value, kv.block_size)
        except ValueError as error:
            raise ConfigError(f"the KV cache asked for can't be laid out: {error}") from None
        block_bytes = layout.block_bytes * kv.num_layers
        num_blocks = min(self._kv_bytes // block_bytes, MAX_BLOCKS)
        if not num_blocks:
            raise CapacityError(
                f"{self._kv_bytes} bytes of KV memory don't hold one KV block of {block_bytes} bytes "
                f"({kv.num_layers} layers, {kv.block_size} tokens): give it more memory (--kv-memory-gb)"
            )
        # Whoever greets again begins anew: what was held and under way before is forgotten.
        self._steps.clear()
        self._settled.clear()
        self._session = _Session(hello, KVStore(num_blocks, kv.block_size, max_sequences=self._max_sequences))
        return (
            Prepare(layout, num_blocks, hello.attention, hello.activation_dtype),
            Send(Welcome(self.name, num_blocks, kv.block_size, self._num_threads)),
        )

    def _reserve(self, message: OpenSequence | ForkSequence | ExtendSequence) -> Accepted | Refused:
        store = self._greeted().store
        sequence = _integer("sequence_id", message.sequence_id, 0, MAX_ID)
        num_reserved = _integer("num_reserved_tokens", message.num_reserved_tokens, 1, MAX_SEQUENCE_TOKENS)
        try:
            if isinstance(message, OpenSequence):
                store.open(sequence, num_reserved)
            elif isinstance(message, ExtendSequence):
                store.extend(sequence, num_reserved)
            else:
                self._check_settled(message)
                store.fork(message.parent_id, sequence, message.num_shared_tokens, num_reserved)
        except CapacityError as error:
            return Refused(sequence, error.code, error.message)
        return Accepted(sequence)

    def _check_settled(self, message: ForkSequence) -> None:
        """The shared tokens' K and V are there in every layer."""
        _integer("parent_id", message.parent_id, 0, MAX_ID)
        num_shared = _integer("num_shared_tokens", message.num_shared_tokens, 1, MAX_SEQUENCE_TOKENS)
        settled = self._settled.get(message.parent_id)
        if settled is not None and num_shared > settled:
            raise ProtocolError(
                f"sequence {message.sequence_id} would share {num_shared} tokens of sequence {message.parent_id}, "
                f"which has {settled} in every layer until its open step ends"
            )

    def _close(self, message: CloseSequence) -> None:
        store = self._greeted().store
        sequence = _integer("sequence_id", message.sequence_id, 0, MAX_ID)
        if sequence in self._settled:
            raise ProtocolError(f"sequence {sequence} is in an open step: close it after the step's last layer")
        store.close(sequence)

    def _begin_step(self, begin: BeginStep) -> tuple[Instruction, ...]:
        store = self._greeted().store
        _integer("step", begin.step, 0, MAX_ID)
        _integer("lane", begin.lane, 0, MAX_LANES - 1)
        if begin.lane in self._steps:
            raise ProtocolError(
                f"lane {begin.lane} begins step {begin.step}, but its step {self._steps[begin.lane].plan.step} is open"
            )
        sequence_ids = self._check_members(begin)
        num_past = store.num_tokens(begin.sequence_ids)
        _check_counts(begin, num_past)
        growing = begin.num_new > 0
        appended = store.append(begin.sequence_ids[growing], begin.num_new[growing])
        with_queries = begin.num_queries > 0
        num_queries = begin.num_queries[with_queries]
        query_ends = begin.num_past + begin.num_new
        if begin.num_beyond is not None:
            query_ends += begin.num_beyond
        plan = StepPlan(
            step=begin.step,
            lane=begin.lane,
            slots=appended.slots,
            block_tables=store.block_tables(begin.sequence_ids[with_queries]),
            query_starts=np.concatenate(([0], np.cumsum(num_queries))).astype(np.int32),
            query_positions=query_ends[with_queries] - num_queries,
            context_lens=begin.num_visible[with_queries],
            want_lse=begin.want_lse,
        )
        self._steps[begin.lane] = _OpenStep(plan, sequence_ids)
        self._settled.update(zip(sequence_ids, num_past.tolist(), strict=True))
        if appended.copy_sources.size:
            return (CopyBlocks(appended.copy_sources, appended.copy_targets),)
        return ()

    def _check_members(self, begin: BeginStep) -> list[int]:
        """The step's sequences, each there once and free to step."""
        shape = np.shape(begin.sequence_ids)
        if len(shape) != 1 or shape[0] < 1:
            raise ProtocolError(f"sequence_ids must have one dimension and an entry at least, not shape {shape}")
        _check_array("sequence_ids", begin.sequence_ids, np.dtype(np.int64), shape)
        for name in ("num_past", "num_new", "num_queries", "num_visible"):
            _check_array(name, getattr(begin, name), np.dtype(np.int32), shape)
        if begin.num_beyond is not None:
            _check_array("num_beyond", begin.num_beyond, np.dtype(np.int32), shape)
        sequence_ids: list[int] = begin.sequence_ids.tolist()
        members = set(sequence_ids)
        if len(members) < len(sequence_ids):
            twice = next(x for i, x in enumerate(sequence_ids) if x in sequence_ids[:i])
            raise ProtocolError(f"sequence {twice} is in the step twice")
        if not self._settled.keys().isdisjoint(members):
            busy = next(x for x in sequence_ids if x in self._settled)
            raise ProtocolError(f"sequence {busy} is in another lane's open step")
        return sequence_ids

    def _attend(self, attend: Attend) -> Compute:
        hello = self._greeted().hello
        _integer("lane", attend.lane, 0, MAX_LANES - 1)
        step = self._steps.get(attend.lane)
        if step is None:
            raise ProtocolError(f"lane {attend.lane} has no open step")
        plan = step.plan
        if (attend.step, attend.layer) != (plan.step, step.next_layer):
            raise ProtocolError(
                f"lane {attend.lane} sent step {attend.step}, layer {attend.layer} when step {plan.step}, "
                f"layer {step.next_layer} was due"
            )
        spec: AttentionSpec = hello.attention[step.next_layer]
        carrier = hello.activation_dtype.carrier
        kv_shape = (len(plan.slots), spec.num_kv_heads, spec.head_dim)
        _check_array("q", attend.q, carrier, (plan.num_queries, spec.num_q_heads, spec.head_dim))
        _check_array("k", attend.k, carrier, kv_shape)
        _check_array("v", attend.v, carrier, kv_shape)
        layer = step.next_layer
        step.next_layer += 1
        if step.next_layer == hello.kv.num_layers:
            del self._steps[attend.lane]
            for sequence in step.sequence_ids:
                del self._settled[sequence]
        return Compute(plan, layer, attend.q, attend.k, attend.v)

    def _greeted(self) -> _Session:
        if self._session is None:
            raise ProtocolError("the first message must be Hello")
        return self._session


def _check_hello(hello: Hello) -> None:
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the S-worker speaks protocol version {hello.protocol_version}, this R-worker {PROTOCOL_VERSION}: "
            "install the same version of fastdecode on both",
            code="protocol_version",
        )
    kv = hello.kv
    if len(hello.attention) != kv.num_layers:
        raise ProtocolError(f"{len(hello.attention)} attention specs for {kv.num_layers} layers")
    for layer, spec in enumerate(hello.attention):
        if (spec.num_kv_heads, spec.head_dim) != (kv.num_kv_heads, kv.head_dim):
            raise ProtocolError(
                f"layer {layer} attends over {spec.num_kv_heads} KV heads of {spec.head_dim}, but the KV cache has "
                f"{kv.num_kv_heads} of {kv.head_dim}"
            )


def _check_counts(begin: BeginStep, cached: NDArray[np.int64]) -> None:
    """``cached``: the worker's own token counts, [N]."""
    past, new, queries, visible = begin.num_past, begin.num_new, begin.num_queries, begin.num_visible
    beyond = np.zeros_like(cached) if begin.num_beyond is None else begin.num_beyond.astype(np.int64)
    for wrong, rule in (
        (past != cached, "num_past must equal the {cached} tokens cached here"),
        ((new < 0) | ((new == 0) & (queries == 0)), "num_new must be at least 1, or 0 where something is attended"),
        # Where nothing is beyond, the reservation is the limit.
        ((beyond < 0) | ((beyond > 0) & (cached + new + beyond > MAX_SEQUENCE_TOKENS)), _BEYOND),
        ((queries < 0) | (queries > new + beyond), "num_queries must be within 0 … num_new + num_beyond"),
        ((visible != past) & (visible != cached + new), "num_visible must be num_past or num_past + num_new"),
    ):
        if wrong.any():
            i = int(wrong.argmax())
            raise ProtocolError(
                f"sequence {begin.sequence_ids[i]} (num_past={past[i]}, num_new={new[i]}, num_beyond={beyond[i]}, "
                f"num_queries={queries[i]}, num_visible={visible[i]}): {rule.format(cached=cached[i])}"
            )
    for what, counts in (("appends", new), ("attends", queries)):
        num_tokens = int(counts.sum(dtype=np.int64))
        if num_tokens > MAX_STEP_TOKENS:
            raise ProtocolError(f"the step {what} {num_tokens} tokens; {MAX_STEP_TOKENS} is the most")


_BEYOND = f"num_beyond must be at least 0, and no sequence is longer than {MAX_SEQUENCE_TOKENS} tokens"


def _check_array(name: str, array: NDArray[np.generic], dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise ProtocolError(f"{name} must be an array of {dtype}, not {getattr(array, 'dtype', type(array).__name__)}")
    if array.shape != shape:
        raise ProtocolError(f"{name} has shape {list(array.shape)}, but {list(shape)} was announced")
    if not array.flags.c_contiguous:
        raise ProtocolError(f"{name} must be C-contiguous")


def _integer(name: str, value: int, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"{name}={value!r} is not a whole number within {low}..{high}")
    return value


def _unknown(message: NoReturn) -> ProtocolError:
    """Every message is handled, says the type checker; at run time, an object that is none."""
    return ProtocolError(f"{type(message).__name__} is not a message to an R-worker")
