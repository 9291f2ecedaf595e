"""KV on the S-worker's own device (``--kv-placement gpu``): another maker of
``attend``, behind the same engine.

Scheduler, fleet and pipeline see one R-worker more or less: a hub with one
peer, which isn't anywhere else. It keeps the same books as an R-worker
(``rworker.cache_state``) and answers at once, in the sender's own thread; K, V and
attention are ``sworker.paged``'s. What it can't do is run beside the S-part, so
one lane is enough.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import CapacityError, ProtocolError
from fastdecode.core.exhaustive import assert_never
from fastdecode.core.holders import Holder, HolderId
from fastdecode.engine.fleet.pool import HolderPool
from fastdecode.engine.step.layout import StepBatch
from fastdecode.wire.kv.chunks import ExpectTokens, FetchChunk, StoreChunk
from fastdecode.wire.kv.exporting import ExportSequence, Pull
from fastdecode.wire.kv.kept import (
    EndSequence,
    ForgetBlocks,
    KeepBlocks,
    ResumeSequence,
    keys_of,
    words_of,
)
from fastdecode.wire.kv.replicating import Replicate
from fastdecode.wire.kv.taking_over import DropCache, TakeOver, TruncateSequence
from fastdecode.wire.kv.tiers import (
    DropBlocks,
    FetchBlocks,
    Moved,
    Stocked,
    StoreBlocks,
    UseTier,
)
from fastdecode.wire.messages import (
    Attend,
    AttendResult,
    BeginStep,
    CloseSequence,
    ExtendSequence,
    Failed,
    ForkSequence,
    FromRWorker,
    Hello,
    OpenSequence,
    StorePrompt,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.traits import ForHolder
from fastdecode.wire.transport import closed_error, timeout_error
from rworker.blocks.appending import Appended
from rworker.blocks.kv_store import KVStore
from rworker.cache_state import CacheState, blocks_within
from sworker.buffers import to_device
from sworker.device import Gpu
from sworker.dtypes import torch_dtype
from sworker.host_tier import HostTier
from sworker.model.skeleton import run_layers
from sworker.paged import BlockKernels, PagedKV, PagedStep, Prompt
from sworker.whole import WholeSteps
from sworker.worker import Pass, SWorker

_MEND = "raise kv_memory_gb or gpu_memory_fraction, or keep KV on R-workers (kv_placement='r')"


class LocalConnection:
    """Both sides of a connection: what is sent is done at once; see
    ``fastdecode.wire.transport.Connection``."""

    def __init__(
        self,
        device: torch.device,
        kv_bytes: int,
        gpu: Gpu | None = None,
        kernels: BlockKernels | None = None,
        host_bytes: int = 0,
    ) -> None:
        self.peer = f"the KV cache on {device}"
        self._device, self._gpu, self._kernels = device, gpu, kernels
        self._kv_bytes, self._host_bytes = kv_bytes, host_bytes
        self._tier: HostTier | None = None
        self._answers: deque[FromRWorker] = deque()
        self._holder = 0
        self._books: CacheState | None = None
        self._cache: PagedKV | None = None

    heard_s = None
    """It can't hang alone."""

    def send(self, message: ToRWorker) -> None:
        """See ``Connection``."""
        if not isinstance(message, ForHolder):
            raise AssertionError(f"{type(message).__name__} is for R-workers")
        match message:
            case Hello():
                self._answers.append(self._greet(message))
            case OpenSequence() | ForkSequence() | ExtendSequence() | ResumeSequence():
                self._answers.append(self.books.reserve(message))
            case CloseSequence() | EndSequence():
                self.books.close(message)
            case KeepBlocks():
                self.books.keep(message)
            case ForgetBlocks():
                self.books.forget(message)
            case UseTier():
                self._open_tier()
            case StoreBlocks() | FetchBlocks():
                self._move(message)
            case DropBlocks():
                for key in keys_of(message.keys):
                    self.tier.drop(key)
            case (
                BeginStep()
                | Attend()
                | ExpectTokens()
                | StoreChunk()
                | FetchChunk()
                | StorePrompt()
                | TruncateSequence()
                | TakeOver()
                | DropCache()
                | Replicate()
                | ExportSequence()
                | Pull()
            ):
                raise AssertionError(f"{type(message).__name__} is for R-workers")
            case _:
                assert_never(message)

    def receive(self, timeout_s: float | None = None) -> FromRWorker:
        answer = self.poll()
        if answer is None:
            raise timeout_error(self.peer, timeout_s or 0.0)
        return answer

    def poll(self) -> FromRWorker | None:
        if self._answers:
            return self._answers.popleft()
        if self._books is None:
            raise closed_error(self.peer, by_peer=False)
        return None

    def close(self) -> None:
        self._books = self._cache = self._tier = None

    @property
    def tier(self) -> HostTier:
        assert self._tier is not None, "there is no lower tier, or it isn't open"
        return self._tier

    def _open_tier(self) -> None:
        self._tier = HostTier(self.cache, self._host_bytes, self._gpu)
        none = np.empty(0, np.int32)
        self._answers.append(
            Stocked(self._holder, self.tier.num_slots, words_of([]), none, is_last=True)
        )

    def _move(self, message: StoreBlocks | FetchBlocks) -> None:
        """Blocks go down or up; who comes later sees them there."""
        move = self.books.moving.begin(message)
        started = time.perf_counter()
        act = self.tier.fetch if move.is_fetch else self.tier.store
        failed = act(move.keys, move.blocks)
        self.books.moving.end(move.number, failed)
        bad = words_of([move.keys[place] for place in sorted(failed)])
        num_bytes = (len(move.keys) - len(failed)) * self.tier.block_bytes
        seconds = time.perf_counter() - started
        self._answers.append(Moved(self._holder, move.number, bad, num_bytes, seconds))

    @property
    def books(self) -> CacheState:
        assert self._books is not None, "not greeted, or closed"
        return self._books

    @property
    def cache(self) -> PagedKV:
        assert self._cache is not None, "not greeted, or closed"
        return self._cache

    def begin_step(self, begin: BeginStep) -> PagedStep:
        """Make room for a step's tokens, and say where they go. Rows stand in
        the order of ``begin``'s sequences: decoded ones, later chunks, first
        chunks."""
        appended = self.books.begin_step(begin)
        self._prepare(begin, appended)
        total = begin.num_past + begin.num_new
        is_decoded = begin.num_new == 1
        is_first = ~is_decoded & (begin.num_past == 0)
        num_decoded, num_first = int(is_decoded.sum()), int(is_first.sum())
        ends = np.cumsum(begin.num_new, dtype=np.int64)
        later = tuple(
            Prompt(
                slice(int(ends[i] - begin.num_new[i]), int(ends[i])),
                self._to_device(_slots(self.books.store, begin.sequence_ids[i], total[i])),
            )
            for i in range(num_decoded, len(ends) - num_first)
        )
        first_row = int(ends[-1] - begin.num_new[is_first].sum())
        starts = ends[is_first] - begin.num_new[is_first] - first_row
        context_lens = np.ascontiguousarray(total[:num_decoded], np.int32)
        return PagedStep(
            slots=self._to_device(appended.slots),
            tables=self._to_device(self.books.store.block_tables(begin.sequence_ids[:num_decoded])),
            context_lens=self._to_device(context_lens),
            context_lens_host=context_lens,
            later=later,
            first_rows=slice(first_row, int(ends[-1])),
            first_starts=tuple(starts.tolist()),
        )

    def _prepare(self, begin: BeginStep, appended: Appended) -> None:
        """The step finds what it sees, and its own copies of what others share."""
        if appended.copy_sources.size:
            self.cache.copy_blocks(appended.copy_sources, appended.copy_targets)

    def _to_device(self, array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return to_device(torch.from_numpy(array), self._device, self._gpu)

    def _greet(self, hello: Hello) -> Welcome | Failed:
        try:
            num_blocks = self._take_memory(hello)
        except CapacityError as error:
            return Failed(self.peer, error.code, f"{error.message}; or {_MEND}")
        self._books, self._tier, self._holder = CacheState(hello, num_blocks), None, hello.holder
        mine = (self.peer, num_blocks, hello.kv.block_size, torch.get_num_threads())
        return Welcome(*mine, has_tier=self._host_bytes > 0)

    def _take_memory(self, hello: Hello) -> int:
        """How many KV blocks there are now.

        Raises:
            CapacityError: there is no memory for any.
        """
        num_blocks = blocks_within(self._kv_bytes, hello.kv.block_bytes, hello)
        self._cache = PagedKV(
            hello.kv, hello.attention, num_blocks, self._device, self._kernels,
            torch_dtype(hello.activation_dtype),
        )  # fmt: skip
        return num_blocks


def _slots(store: KVStore, sequence_id: int, num_tokens: int) -> NDArray[np.int64]:
    """Of a sequence's first tokens, [num_tokens]."""
    first, count = np.zeros(1, np.int32), np.array([num_tokens], np.int32)
    return store.slots(np.array([sequence_id], np.int64), first, count)


class LocalAttention:
    """Makes a lane's ``attend`` of every step; see ``fastdecode.engine.step.remote.Attention``.

    Args:
        s_worker: whose decode steps are captured now, as a whole, if it
            captures graphs.
    """

    def __init__(
        self, connection: LocalConnection, fleet: HolderPool, device: Holder, s_worker: SWorker
    ) -> None:
        self.fleet = fleet
        self.holders = (device,)
        self._connection = connection
        self._whole = whole_steps(s_worker, connection)
        if self._whole is not None:
            self._whole.prepare()

    def begin(self, batch: StepBatch) -> LocalStep:
        return LocalStep(self._connection, batch, self._whole)


def whole_steps(s_worker: SWorker, connection: LocalConnection) -> WholeSteps | None:
    """What runs decode steps in fixed memory; None: there are no kernels for it, or
    steps run without graphs. The cache gets the model's sinks."""
    graphs, cache = s_worker.graphs, connection.cache
    cache.sinks = s_worker.model.sinks
    if graphs is None or cache.kernels is None:
        return None
    return WholeSteps(graphs, cache, s_worker.spec.max_model_len)


class LocalStep:
    """One lane's step on the device: all of it at once, or attended as soon as
    it is scattered; see ``fastdecode.engine.step.remote.LaneAttention``."""

    def __init__(
        self, connection: LocalConnection, batch: StepBatch, whole: WholeSteps | None = None
    ) -> None:
        (span,) = batch.spans
        self.batch = batch
        self._begin, self._holder = span.begin, span.holder
        self._books = connection.books
        self._paged = connection.begin_step(span.begin)
        self._cache = connection.cache
        self._whole = whole
        self._o = torch.empty(0)
        self._is_timed = self._cache.pool.device.type == "cpu"
        self.computed_s = {span.holder: 0.0}
        """Zero on a GPU, where nobody waits for the end of a layer to take its time."""
        self.sent_s: Seq[float] = ()
        self.lost: Collection[HolderId] = ()

    def run_through(self, s_worker: SWorker) -> Pass | None:
        """See ``LaneAttention``."""
        batch, begin = self.batch, self._begin
        rows = self._rows()
        self._books.steps.finish(begin.lane, begin.step)
        if self._whole is not None and self._whole.takes(self._paged):
            return s_worker.run_through(
                partial(self._whole.run, begin.lane, rows, self._paged, batch.feed, batch.hidden)
            )
        return s_worker.run_through(partial(self._run_layers, s_worker, rows))

    def _rows(self) -> Tensor:
        """Token ids and positions, int64 [2, T]."""
        return torch.from_numpy(np.stack((self.batch.token_ids, self.batch.positions)))

    def _run_layers(self, s_worker: SWorker, rows: Tensor) -> Tensor:
        token_ids, positions = s_worker.upload(rows)
        if self.batch.feed is not None:
            self.batch.feed.put_into(token_ids, s_worker.upload)
        model, hidden = s_worker.model, self.batch.hidden
        x = model.embed(token_ids, positions) if hidden is None else s_worker.upload(hidden)
        return run_layers(model, x, positions, self._attend)

    def scatter(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> None:
        self._books.steps.finish_layer(self._begin.lane, self._begin.step, layer)
        self._o = self._attend(layer, q, k, v, place)

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> Tensor:
        started = time.perf_counter()
        o = self._cache.attend(layer, q, k, v, self._paged, place)
        if self._is_timed:
            self.computed_s[self._holder] += time.perf_counter() - started
        return o

    @property
    def r_compute_s(self) -> dict[HolderId, float]:
        return self.computed_s

    @property
    def in_s_part_s(self) -> float:
        return self.computed_s[self._holder]

    def dispatch(self) -> bool:
        return True

    def wait_for_copy(self) -> None:
        pass

    def deliver(self, holder: HolderId, result: AttendResult) -> None:
        raise ProtocolError(
            f"the KV cache on the S-worker's device got an answer for layer {result.layer}"
        )

    def lose(self, holder: HolderId) -> None:
        raise AssertionError("the S-worker's device isn't lost alone")

    @property
    def ready(self) -> bool:
        return True

    num_awaited = 0

    @property
    def settled(self) -> bool:
        return True

    def take(self) -> Tensor:
        return self._o
