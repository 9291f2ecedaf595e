"""Carries out what the state machine has decided: the KV cache's memory, and
the kernels that append and attend."""

from __future__ import annotations

import itertools
import logging
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

import cpu_kernels
from cpu_kernels import allocate_pool
from fastdecode.core.clock import Clock
from fastdecode.core.errors import CapacityError
from fastdecode.core.holders import HolderId
from fastdecode.core.host.machine import free_memory_bytes
from fastdecode.core.spec import AttentionSpec
from fastdecode.wire.blocks import Inventory
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.messages import Activations, AttendResult
from rworker.instructions import (
    Compute,
    CopyBlocks,
    Drop,
    OpenTier,
    PlaceChunk,
    Prepare,
    ReadChunk,
)
from rworker.step_plan import AwaitedBlocks, StepPlan
from rworker.stream.memory import place_chunk, read_chunk
from rworker.tiers.tier import ArrayMemory
from rworker.tiers.tiers import Tiers

if TYPE_CHECKING:
    from cpu_kernels.team import OpenMPTeam

logger = logging.getLogger(__name__)


class Kernels(Protocol):
    """``cpu_kernels``, or their NumPy twins in ``cpu_kernels.reference``."""

    @property
    def append(self) -> Callable[..., None]: ...

    @property
    def gather(self) -> Callable[..., None]: ...

    @property
    def attend(self) -> Callable[..., None]: ...

    @property
    def copy_blocks(self) -> Callable[..., None]: ...


@dataclass
class _Layer:
    """One layer's cache and what shapes its scores."""

    pool: NDArray[np.uint8]  # [num_blocks, block_bytes]
    spec: AttentionSpec
    appending: dict[str, Any]
    """Keyword arguments of ``append``."""
    attending: dict[str, Any]
    """Keyword arguments of ``attend``."""


@dataclass
class _Cache:
    """One holder's."""

    prepared: Prepare
    pool: NDArray[np.uint8]  # [num_layers, num_blocks, block_bytes]
    layers: list[_Layer]
    # Outputs are lent to the peer until the lane's next Attend, and written again then.
    # By lane: memory, and the o that was lent of it last.
    outputs: dict[int, tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=dict)


class AttentionExecutor:
    """Owns the KV caches of one R-worker, and computes on them in the calling
    thread and the kernels' own threads.

    Args:
        num_threads: threads that a kernel may use.
        team: those threads; None: the kernels' own.
        clock: seconds, for ``AttendResult.compute_s``.
        kernels: ``cpu_kernels`` by default.
        free_bytes: memory that this process may still take.
        tiers: where kept blocks go beside the caches; None: nowhere.
    """

    def __init__(
        self,
        *,
        num_threads: int = 1,
        team: OpenMPTeam | None = None,
        clock: Clock = time.perf_counter,
        kernels: Kernels = cpu_kernels,
        free_bytes: Callable[[], int] = free_memory_bytes,
        tiers: Tiers | None = None,
    ) -> None:
        self._free_bytes = free_bytes
        self.tiers = tiers or Tiers()
        self._threads: dict[str, Any] = {"num_threads": num_threads}
        if team is not None:
            self._threads["team"] = team
        self._chunk_options: dict[str, Any] = {"kernels": kernels, **self._threads}
        self._clock = clock
        self._kernels = kernels
        self._caches: dict[HolderId, _Cache] = {}
        self._buffers = BufferPool()

    def prepare(self, prepare: Prepare) -> None:
        """Make a KV cache (its memory is committed as it is written), and
        compile the kernels that it needs.

        Raises:
            CapacityError: there isn't that much free memory, or the address
                space for it can't be had.
        """
        self._forget(prepare.holder)
        started = self._clock()
        self.compile(prepare)
        warm = self._clock()
        layout, num_layers = prepare.layout, len(prepare.attention)
        total_bytes = num_layers * prepare.num_blocks * layout.block_bytes
        free_bytes = self._free_bytes()
        # The system would promise more, and kill the process that fills it.
        if total_bytes > free_bytes and not prepare.is_on_disk:
            raise CapacityError(
                f"the KV cache would take {total_bytes} bytes, but {free_bytes} are free here: "
                "give the R-worker less KV memory (--kv-memory-gb)"
            )
        try:
            pool = self._allocate(prepare)
        except (MemoryError, OSError, OverflowError) as error:
            raise CapacityError(
                f"{total_bytes} bytes for the KV cache can't be had from this host ({error}): "
                "give the R-worker less KV memory"
            ) from error
        layers = [self._make_layer(prepare, *x) for x in zip(pool, prepare.attention, strict=True)]
        self._caches[prepare.holder] = _Cache(prepare, pool, layers)
        logger.info(
            "KV cache of %d blocks of %d tokens (%d layers, %s, %.1f GB); kernels ready after "
            "%.1f s",
            prepare.num_blocks,
            layout.block_size,
            num_layers,
            layout.dtype,
            pool.nbytes / 1e9,
            warm - started,
        )

    def _allocate(self, prepare: Prepare) -> NDArray[np.uint8]:
        shape = prepare.layout, len(prepare.attention), prepare.num_blocks
        if not prepare.is_on_disk:
            return allocate_pool(*shape)
        with tempfile.TemporaryFile(dir=self.tiers.directory) as file:
            return allocate_pool(*shape, file.fileno())

    def copy_blocks(self, copy: CopyBlocks) -> None:
        self._kernels.copy_blocks(self._caches[copy.holder].pool, copy.source_ids, copy.target_ids)

    def place(self, place: PlaceChunk) -> None:
        """Write a chunk into blocks."""
        pool = self._caches[place.holder].pool
        place_chunk(place.shape, pool, place.places, place.data, **self._chunk_options)

    def read(self, read: ReadChunk) -> NDArray[np.uint8]:
        """Return a chunk's data. It holds for as long as something refers to it."""
        pool, take = self._caches[read.holder].pool, self._buffers.take
        return read_chunk(read.shape, pool, read.places, take, **self._chunk_options)

    def drop(self, drop: Drop) -> None:
        """Free a holder's cache; one that never came to be is none."""
        self._forget(drop.holder)

    def _forget(self, holder: HolderId) -> None:
        self.tiers.close(holder)  # or threads of it would write into what is freed
        self._caches.pop(holder, None)

    def open_tier(self, wanted: OpenTier) -> Iterable[Inventory]:
        """Open a holder's lower tier, if there is to be one; what it has."""
        return self.tiers.open(wanted, ArrayMemory(self._caches[wanted.holder].pool))

    def compute(self, compute: Compute) -> AttendResult:
        """Append k and v, attend q. The result's arrays hold until the lane's
        next ``compute`` that has queries."""
        plan, cache = compute.plan, self._caches[compute.holder]
        if plan.coming is not None:
            self._await(compute.holder, plan.coming, compute.layer)
        started = self._clock()
        o, lse = self._run(
            cache, plan, cache.layers[compute.layer], compute.q, compute.k, compute.v
        )
        seconds = self._clock() - started
        return AttendResult(plan.step, plan.lane, compute.layer, o, lse, seconds)

    def _await(self, holder: HolderId, coming: AwaitedBlocks, layer: int) -> None:
        """Of blocks that are being fetched a layer is there, or has failed:
        zeros are in its place then."""
        self.tiers.wait_for_layer(holder, coming.jobs, layer)
        if coming.copy_sources.size:
            pool = self._caches[holder].pool[layer : layer + 1]
            self._kernels.copy_blocks(pool, coming.copy_sources, coming.copy_targets)

    def _run(
        self,
        cache: _Cache,
        plan: StepPlan,
        layer: _Layer,
        q: Activations,
        k: Activations,
        v: Activations,
    ) -> tuple[Activations, NDArray[np.float32] | None]:
        """o [T_q, Hq, D], and lse float32 [T_q, Hq] if the step wants it."""
        layout, num_last = cache.prepared.layout, plan.num_last
        if num_last < len(plan.slots):
            self._kernels.append(
                layout, layer.pool, k[num_last:], v[num_last:], plan.slots[num_last:],
                **layer.appending,
            )  # fmt: skip
        spec = layer.spec
        o = _output(cache, plan, q.dtype, (len(q), spec.num_q_heads, spec.head_dim))
        lse = np.empty(o.shape[:2], np.float32) if plan.want_lse else None
        for group in plan.groups:
            rows = group.rows
            self._kernels.attend(
                layout,
                layer.pool,
                q[rows],
                group.block_tables,
                group.query_starts,
                group.query_positions,
                group.context_lens,
                out=o[rows],
                lse=None if lse is None else lse[rows],
                last=(k[:num_last], v[:num_last]) if group.brings_last else None,
                **layer.attending,
            )
        return o, lse

    def compile(self, prepare: Prepare) -> None:
        """Append and attend once for every kind of layer and step, on a cache
        of one layer, so that no step compiles.

        Kernels differ by what several queries of one sequence allow, and are
        kept on disk once compiled.
        """
        layout = prepare.layout
        carrier = prepare.activation_dtype.carrier
        pool = allocate_pool(layout, 1, 2)
        cases = itertools.product(dict.fromkeys(prepare.attention), (1, 2), (False, True))
        for spec, num_tokens, want_lse in cases:
            layer = self._make_layer(prepare, pool[0], spec)
            cache = _Cache(prepare, pool, [layer])
            kv = np.zeros((num_tokens, layout.num_kv_heads, layout.head_dim), carrier)
            q = np.zeros((num_tokens, spec.num_q_heads, layout.head_dim), carrier)
            self._run(cache, _first_step(num_tokens, want_lse), layer, q, kv, kv)
        self._kernels.copy_blocks(pool, np.array([0], np.int64), np.array([1], np.int64))

    def _make_layer(self, prepare: Prepare, pool: NDArray[np.uint8], spec: AttentionSpec) -> _Layer:
        slopes = None if spec.alibi_slopes is None else np.array(spec.alibi_slopes, np.float32)
        appending = {"source": prepare.activation_dtype.value, **self._threads}
        scores = {
            "scale": spec.scale,
            "sliding_window": spec.sliding_window,
            "alibi_slopes": slopes,
            "logit_softcap": spec.logit_softcap,
        }
        return _Layer(pool, spec, appending, appending | scores)


def _output(
    cache: _Cache, plan: StepPlan, dtype: np.dtype[Any], shape: tuple[int, int, int]
) -> NDArray[Any]:
    """Room for a lane's o: the same memory in every layer, so that no page is faulted in anew;
    and the same array, while steps are alike."""
    room, o = cache.outputs.get(plan.lane) or (np.empty(0, dtype), None)
    if o is not None and o.shape == shape:
        return o
    size = shape[0] * shape[1] * shape[2]
    if room.size < size:
        room = np.empty(size, dtype)
    o = room[:size].reshape(shape)
    cache.outputs[plan.lane] = room, o
    return o


def _first_step(num_tokens: int, want_lse: bool) -> StepPlan:
    """The step of one sequence's first tokens, all of which are attended."""
    return StepPlan(
        step=0,
        lane=0,
        slots=np.arange(num_tokens, dtype=np.int64),
        block_tables=np.array([[0, 1]], np.int32),  # a block may be as small as a token
        query_starts=np.array([0, num_tokens], np.int32),
        query_positions=np.zeros(1, np.int32),
        context_lens=np.full(1, num_tokens, np.int32),
        want_lse=want_lse,
        num_single=int(num_tokens == 1),
        num_last=int(num_tokens == 1),
    )
