"""A KV cache in blocks on the S-worker's own device, and attention over it:
what ``--kv-placement gpu`` runs.

The cache of a layer is K and V, each [num_blocks · block_size, Hkv, D]; a
token's **slot** is its row. Which slot is whose is decided elsewhere
(``rworker.blocks.kv_store``); here a step's slots and block tables are followed. Every
row of a step is one of three kinds, as in ``fastdecode.engine.step.batch``:

* a **decoded** token attends to all of its sequence, its own K and V included;
* a **later chunk** of a prompt attends to its sequence's past and causally to
  itself, both as the cache holds them;
* a **first chunk** attends causally to itself.

Decoded tokens and later chunks have two ways: a Triton kernel that reads blocks where they
lie (``sworker.kernels.paged_triton``; on CUDA), and plain torch, which copies sequences' K
and V side by side first (``gathered_decode``, ``sworker.prefill``).

A cache of int8 or int4 holds whole numbers, and of each token and head the scale of
K and of V, as an R-worker's does: what it gives back is the same. int4 is read in
plain torch alone.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.dtype import DType
from fastdecode.core.errors import CapacityError, Given
from fastdecode.core.spec import AttentionSpec, KVSpec
from sworker.buffers import to_device
from sworker.dtypes import pack_int4, quantize, torch_dtype, unpack_int4
from sworker.kv_splits import (
    SplitPlan,
    Splits,
    SplitShape,
    chunk_tiles,
    plan_decode,
    plan_splits,
)
from sworker.prefill import (
    add_sinks,
    as_cached,
    can_take_together,
    chunk_attention,
    chunks_together,
    local_causal_attention,
)

logger = logging.getLogger(__name__)

MAX_GATHERED_BYTES = 256 << 20
MAX_CPU_GATHERED_BYTES = 4 << 20
"""Of K, of a group of sequences that are laid side by side; on a CPU they stay in its caches."""

_DECODE_PROGRAMS_PER_SM, _CHUNK_PROGRAMS_PER_SM = 4, 1
"""For which work is divided: about as many as fit into a multiprocessor."""
_DEFAULT_NUM_SMS = 128


class BlockKernels(Protocol):
    """Kernels that read and write blocks where they lie, such as ``paged_triton``."""

    paged_store: Callable[..., None]
    paged_decode: Callable[..., None]
    paged_chunks: Callable[..., None]
    chunk_tokens: Callable[..., int]


@dataclass(frozen=True)
class Prompt:
    """A prompt chunk: its rows in the step, and the slots of all of its
    sequence so far, these rows' own last."""

    rows: slice
    slots: Tensor  # int64 [L]; L = rows for a first chunk


NOWHERE = -1  # in place of a slot, for rows that aren't stored


Window: TypeAlias = int | None
"""Of a layer's attention; what a query sees, and so how it is split, depends on it."""


@dataclass(frozen=True)
class ChunkWork:
    """Later chunks of a step, for kernels: the same in all layers of one window.

    Args:
        slots: int64, of all that the chunks see, chunk after chunk.
    """

    slots: Tensor
    splits: Splits


@dataclass(frozen=True)
class PagedStep:
    """Where a step's rows go and what they see: the same in every layer. The
    decoded rows are the first."""

    slots: Tensor  # int64 [T]
    tables: Tensor  # int32 [N, W] block tables of the decoded rows
    context_lens: Tensor  # int32 [N] tokens that each decoded row sees, its own included
    context_lens_host: NDArray[np.int32]  # [N]
    later: tuple[Prompt, ...]
    first_rows: slice  # of all first chunks, one after another
    first_starts: tuple[int, ...]  # first row of each, relative to ``first_rows``
    decode_splits: dict[Window, Splits] = field(default_factory=dict)
    chunk_work: dict[Window, ChunkWork] = field(default_factory=dict)
    """Made by the first layer that needs them."""

    @property
    def only_decodes(self) -> bool:
        """Whether all rows are decoded tokens."""
        return len(self.context_lens_host) == len(self.slots)


class StoredKV(Protocol):
    """Where K and V are: a ``PagedKV``, or the same in the host's memory."""

    kv: KVSpec
    dtype: torch.dtype

    @property
    def pool(self) -> Tensor: ...

    @property
    def scales(self) -> Tensor | None: ...

    def store(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """See ``PagedKV``."""

    def copy_blocks(self, source_ids: NDArray[np.int64], target_ids: NDArray[np.int64]) -> None:
        """See ``PagedKV``."""


def store_rows(to: StoredKV, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """``PagedKV.store``, in plain torch."""
    for half, x in enumerate((k, v)):
        if to.scales is not None:
            x, scales = quantize(x, to.kv.dtype)
            to.scales[layer, half].index_copy_(0, slots, scales)
            if to.kv.dtype is DType.INT4:
                x = pack_int4(x)
        to.pool[layer, half].index_copy_(0, slots, x.to(to.pool.dtype))


def copy_rows(of: StoredKV, source_ids: NDArray[np.int64], target_ids: NDArray[np.int64]) -> None:
    """``PagedKV.copy_blocks``, in plain torch."""
    source, target = (
        to_device(torch.from_numpy(ids), of.pool.device) for ids in (source_ids, target_ids)
    )
    for of_slots in (of.pool, of.scales):
        if of_slots is not None:
            # [layers, 2, num_blocks, block_size, Hkv, …]
            blocks = of_slots.unflatten(2, (-1, of.kv.block_size))
            blocks[:, :, target] = blocks[:, :, source]


class PagedKV:
    """K and V of all layers on a device.

    Args:
        kv: heads, dims, dtype and block size.
        num_blocks: block ids are 0 … num_blocks - 1, the same in every layer.
        kernels: that read and write blocks where they lie, in place of those
            that there are for the device. They are tried first.
        dtype: of activations; None: the cache's, or float32 with int8.
        is_tried: Skip the trial: ``kernels`` are known to be right, or none are wanted.

    Raises:
        CapacityError: the device hasn't the memory.
    """

    def __init__(
        self,
        kv: KVSpec,
        attention: Sequence[AttentionSpec],
        num_blocks: int,
        device: torch.device,
        kernels: BlockKernels | None = None,
        dtype: torch.dtype | None = None,
        *,
        is_tried: bool = False,
    ) -> None:
        self.kv = kv
        self.attention = tuple(attention)
        self._device = device
        if dtype is None:
            dtype = torch_dtype(kv.dtype) if kv.dtype.is_float else torch.float32
        self.dtype = dtype
        """Of activations."""
        # The trial's memory is given back before the cache takes all that is left.
        self.kernels = kernels if is_tried else self._tried(kernels or _kernels_of(device), dtype)
        """None: there are none, or they failed their trial: K and V of decoded
        tokens are gathered side by side."""
        rows = (kv.num_layers, 2, num_blocks * kv.block_size, kv.num_kv_heads)
        row_length = -(-kv.head_dim // 2) if kv.dtype is DType.INT4 else kv.head_dim
        try:
            # Not zeroed: a CPU's memory is taken as blocks are used. What was
            # never written is never weighed in.
            self.pool = torch.empty((*rows, row_length), dtype=_element(kv.dtype), device=device)
            self.scales = (
                None if kv.dtype.is_float else torch.empty(rows, dtype=torch.float32, device=device)
            )
            """Of int8 and int4: [num_layers, 2, num_blocks · block_size, Hkv]."""
        except RuntimeError:
            size_gib = num_blocks * kv.block_bytes / (1 << 30)
            raise CapacityError(
                f"a KV cache of {num_blocks} blocks takes {size_gib:.2f} GiB, which {device} "
                "hasn't free: give ",
                Given("kv_memory_gb"),
                ", lower ",
                Given("gpu_memory_fraction"),
                ", or keep it on R-workers: ",
                Given("kv_placement", "r"),
            ) from None
        self.sinks: Sequence[Tensor] | None = None
        """Of each layer, float32 [Hq]: every o has had them. Set before the
        first step, or not at all."""
        self._num_sms = _DEFAULT_NUM_SMS
        if self.pool.device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._slopes = {
            spec: torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=device)
            for spec in self.attention
            if spec.alibi_slopes is not None
        }

    def _tried(self, kernels: BlockKernels | None, dtype: torch.dtype) -> BlockKernels | None:
        """Kernels that work here as plain torch does."""
        if kernels is None or not self.attention or self.kv.dtype is DType.INT4:
            return None
        from sworker.kernel_trial import refusal  # imports this class

        why = refusal(kernels, self.kv, self.attention, self._device, dtype)
        if why is not None:
            _warn_of_kernels(str(self._device), why)
        return kernels if why is None else None

    @property
    def num_slots(self) -> int:
        """Tokens for which there is room."""
        return self.pool.shape[2]

    def copy_blocks(self, source_ids: NDArray[np.int64], target_ids: NDArray[np.int64]) -> None:
        """Copy blocks [C] in every layer."""
        copy_rows(self, source_ids, target_ids)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: PagedStep,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Append k and v [T, Hkv, D], attend q [T, Hq, D] → o [T, Hq, D], which is
        ``out`` if that is given."""
        spec = self.attention[layer]
        self.store(layer, k, v, step.slots)
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        num_decoded = len(step.context_lens_host)
        if num_decoded:
            self._decode(layer, q[:num_decoded], step, o[:num_decoded])
        if step.later:
            self.attend_later(layer, q, step.later, o, step.chunk_work)
        rows = step.first_rows
        if rows.start < rows.stop:
            # K and V as the cache holds them, so that where a prompt is cut leaves no trace.
            k_seen, v_seen = (as_cached(x[rows], self.kv.dtype).to(q.dtype) for x in (k, v))
            o[rows], lse = local_causal_attention(
                q[rows], k_seen, v_seen, step.first_starts, spec, want_lse=self.sinks is not None
            )
            self._add_sinks(layer, o[rows], lse)
        return o

    def _room_for_lse(self, q: Tensor) -> Tensor | None:
        """float32 [n, Hq] for q [n, Hq, D], where there are sinks."""
        if self.sinks is None:
            return None
        return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

    def _add_sinks(self, layer: int, o: Tensor, lse: Tensor | None) -> None:
        if self.sinks is not None and lse is not None:
            add_sinks(o, lse, self.sinks[layer])

    def attend_decoded(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slots: Tensor,
        tables: Tensor,
        context_lens: Tensor,
        splits: Mapping[Window, Splits],
        *,
        out: Tensor,
    ) -> None:
        """``attend`` where every row is a decoded token and there are
        ``kernels``. May be captured: nothing depends on what the tensors hold.

        Args:
            q, k, v, out: [N, heads, D].
            slots: int64 [N]; ``NOWHERE`` for rows that aren't stored.
            tables: int32 [N, W].
            context_lens: int32 [N].
            splits: of ``decode_plan``, for every layer's window.
        """
        assert self.kernels is not None
        self.store(layer, k, v, slots)
        window = self.attention[layer].sliding_window
        self._decode_blocks(layer, q, tables, context_lens, splits[window], out)

    @property
    def windows(self) -> frozenset[Window]:
        """Of all layers."""
        return frozenset(spec.sliding_window for spec in self.attention)

    def decode_shape(self, num_rows: int) -> SplitShape:
        """How large the list of pieces of so many decoded tokens may get."""
        return SplitShape(num_rows, self._num_shares(_DECODE_PROGRAMS_PER_SM))

    def decode_plan(
        self, context_lens: NDArray[np.int32], window: Window, num_rows: int | None = None
    ) -> SplitPlan:
        """How the work of a step's decoded tokens is divided in layers of a window; see
        ``kv_splits.plan_decode``."""
        num_shares = self._num_shares(_DECODE_PROGRAMS_PER_SM)
        return plan_decode(context_lens, window, num_shares, num_rows)

    def _num_shares(self, programs_per_sm: int) -> int:
        """Return how many pieces of work of one KV head keep all multiprocessors busy."""
        return -(-programs_per_sm * self._num_sms // self.kv.num_kv_heads)

    def _scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return None if self.scales is None else (self.scales[layer, 0], self.scales[layer, 1])

    def store(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write k and v [T, Hkv, D] to slots [T], rounded to what the cache holds."""
        keys, values = self.pool[layer]
        if self.kernels is not None:
            self.kernels.paged_store(k, v, slots, keys, values, self._scales(layer))
            return
        store_rows(self, layer, k, v, slots)

    def _seen(self, layer: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of slots [L], each [L, Hkv, D] in ``dtype``."""
        k, v = (whole_numbers(part[slots], self.kv.head_dim) for part in self.pool[layer])
        if self.scales is None:
            return k.to(dtype), v.to(dtype)
        k_scales, v_scales = (of_slots[slots][..., None] for of_slots in self.scales[layer])
        return (k * k_scales).to(dtype), (v * v_scales).to(dtype)

    def attend_later(
        self,
        layer: int,
        q: Tensor,
        chunks: Sequence[Prompt],
        o: Tensor,
        work: dict[Window, ChunkWork],
    ) -> None:
        """Attend later chunks, whose rows follow each other in q [T, Hq, D], to
        all that their slots hold → their rows of o [T, Hq, D].

        Args:
            work: of these chunks, kept by the caller from layer to layer; empty at first.
        """
        if self.kernels is None:
            self._attend_gathered(layer, q, chunks, o)
            return
        spec, (keys, values) = self.attention[layer], self.pool[layer]
        if spec.sliding_window not in work:
            work[spec.sliding_window] = self._chunk_work(chunks, spec, q.dtype)
        own = work[spec.sliding_window]
        lse = self._room_for_lse(q)
        self.kernels.paged_chunks(
            q, keys, values, self._scales(layer), own.slots, own.splits, spec,
            self._slopes.get(spec), out=o, **({} if lse is None else {"lse": lse}),
        )  # fmt: skip
        if lse is not None:
            rows = slice(chunks[0].rows.start, chunks[-1].rows.stop)
            self._add_sinks(layer, o[rows], lse[rows])

    def _chunk_work(
        self, chunks: Sequence[Prompt], spec: AttentionSpec, dtype: torch.dtype
    ) -> ChunkWork:
        assert self.kernels is not None
        bounds = np.array([(x.rows.start, x.rows.stop, len(x.slots)) for x in chunks], np.int64)
        rows, ends, num_keys = bounds.T
        tokens = self.kernels.chunk_tokens(spec, dtype)
        tiles = chunk_tiles(rows, ends - rows, num_keys, tokens)
        shape = SplitShape(len(tiles.rows), self._num_shares(_CHUNK_PROGRAMS_PER_SM), tokens)
        plan = plan_splits(tiles, spec.sliding_window, shape)
        slots = chunks[0].slots if len(chunks) == 1 else torch.cat([x.slots for x in chunks])
        return ChunkWork(slots, Splits.upload(plan, self.pool.device))

    def _attend_gathered(self, layer: int, q: Tensor, chunks: Sequence[Prompt], o: Tensor) -> None:
        """``attend_later`` in plain torch: K and V are copied side by side."""
        spec, num_keys = self.attention[layer], [len(chunk.slots) for chunk in chunks]
        row_bytes = self.kv.num_kv_heads * self.kv.head_dim * q.element_size()
        fits = sum(num_keys) * row_bytes <= MAX_GATHERED_BYTES
        if fits and self.sinks is None and can_take_together(q, num_keys, spec):
            rows = slice(chunks[0].rows.start, chunks[-1].rows.stop)
            slots = torch.cat([chunk.slots for chunk in chunks])
            num_new = [chunk.rows.stop - chunk.rows.start for chunk in chunks]
            k, v = self._seen(layer, slots, q.dtype)
            o[rows] = chunks_together(q[rows], k, v, num_new, num_keys, spec)
            return
        for chunk in chunks:
            k, v = self._seen(layer, chunk.slots, q.dtype)
            lse = self._room_for_lse(q[chunk.rows])
            o[chunk.rows] = chunk_attention(q[chunk.rows], k, v, spec, lse)
            self._add_sinks(layer, o[chunk.rows], lse)

    def _decode(self, layer: int, q: Tensor, step: PagedStep, o: Tensor) -> None:
        if self.kernels is not None:
            window, splits = self.attention[layer].sliding_window, step.decode_splits
            if window not in splits:
                plan = self.decode_plan(step.context_lens_host, window)
                splits[window] = Splits.upload(plan, q.device)
            self._decode_blocks(layer, q, step.tables, step.context_lens, splits[window], o)
            return
        spec, (keys, values) = self.attention[layer], self.pool[layer]
        lse = self._room_for_lse(q)
        gathered_decode(
            q, keys, values, step.tables, step.context_lens_host, spec, self._slopes.get(spec),
            self.kv.block_size, out=o, scales=self._scales(layer), lse=lse,
        )  # fmt: skip
        self._add_sinks(layer, o, lse)

    def _decode_blocks(
        self,
        layer: int,
        q: Tensor,
        tables: Tensor,
        context_lens: Tensor,
        splits: Splits,
        o: Tensor,
    ) -> None:
        assert self.kernels is not None
        spec, (keys, values) = self.attention[layer], self.pool[layer]
        lse = self._room_for_lse(q)
        self.kernels.paged_decode(
            q, keys, values, self._scales(layer), tables, context_lens, splits, spec,
            self._slopes.get(spec), self.kv.block_size, out=o,
            **({} if lse is None else {"lse": lse}),
        )  # fmt: skip
        self._add_sinks(layer, o, lse)


@cache
def _warn_of_kernels(device: str, why: str) -> None:
    """Once a process, however many caches there are."""
    logger.warning(
        "the kernels that attend KV blocks where they lie can't be used on %s: K and V are "
        "gathered first, which is slower: %s",
        device,
        why,
    )


def _kernels_of(device: torch.device) -> BlockKernels | None:
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from sworker.kernels import paged_triton

    kernels: BlockKernels = paged_triton
    return kernels


def _element(dtype: DType) -> torch.dtype:
    """Of a pool."""
    if dtype.is_float:
        return torch_dtype(dtype)
    return torch.uint8 if dtype is DType.INT4 else torch.int8


def whole_numbers(stored: Tensor, head_dim: int) -> Tensor:
    """K or V of a pool, [..., D]: of int4 unpacked, else as it is."""
    return unpack_int4(stored, head_dim) if stored.dtype is torch.uint8 else stored


def gathered_decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    context_lens: NDArray[np.int32],
    spec: AttentionSpec,
    slopes: Tensor | None,
    block_size: int,
    *,
    out: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
    lse: Tensor | None = None,
) -> None:
    """One query a sequence over its cached tokens, in plain torch.

    Sequences are taken in groups of like length; a group's K and V are copied
    side by side, [n, c, Hkv, D].

    Args:
        q: [N, Hq, D].
        keys, values: [slots, Hkv, D]; of int4 as ``pack_int4`` has them.
        tables: int32 [N, W].
        context_lens: [N], >= 1; the query is the last of these tokens.
        slopes: ALiBi's, float32 [Hq].
        out: [N, Hq, D], dense, written.
        scales: of int8 and int4, float32 [slots, Hkv] each.
        lse: the natural log-sum-exp of the scores, float32 [N, Hq], written;
            None: it isn't wanted.
    """
    Hkv, G, D = spec.num_kv_heads, spec.group_size, spec.head_dim
    room = MAX_CPU_GATHERED_BYTES if q.device.type == "cpu" else MAX_GATHERED_BYTES
    most = room // (Hkv * D * keys.element_size())
    lens = torch.from_numpy(context_lens).to(q.device)  # [N]
    for members, first, last in _groups(context_lens, spec.sliding_window, most):
        rows = torch.from_numpy(members).to(q.device)  # [n]
        places = torch.arange(first, last, device=q.device)  # [c]
        ends = lens[rows][:, None]  # [n, 1]
        hidden = places >= ends  # [n, c]
        if spec.sliding_window is not None:
            hidden |= places < ends - spec.sliding_window
        # Past a table's end stands some block's id, whose slots may hold
        # anything, NaN included: what isn't seen is read from the query's own
        # slot.
        seen = torch.where(hidden, ends - 1, places)  # [n, c]
        slots = _slots_of(tables[rows], seen, block_size)
        # [n, Hkv, c, D]
        k, v = (whole_numbers(x[slots], D).transpose(1, 2) for x in (keys, values))
        if scales is not None:
            k_scales, v_scales = (x[slots].transpose(1, 2)[..., None] for x in scales)
            k, v = k * k_scales, v * v_scales
        queries = q[rows].view(-1, Hkv, G, D)
        own_lse = None if lse is None else lse.new_empty(queries.shape[:-1])
        o = _attend_group(queries, k, v, hidden, places - (ends - 1), spec, slopes, own_lse)
        if lse is not None and own_lse is not None:
            lse[rows] = own_lse.flatten(1)
        out[rows] = o.reshape(-1, Hkv * G, D).to(out.dtype)


def _slots_of(tables: Tensor, places: Tensor, block_size: int) -> Tensor:
    """Where tokens are. tables int32 [n, W], places [n, c] → int64 [n, c]."""
    blocks = tables.gather(1, (places // block_size).long()).long()
    return blocks * block_size + places % block_size


def _attend_group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor,
    ahead: Tensor,
    spec: AttentionSpec,
    slopes: Tensor | None,
    lse: Tensor | None,
) -> Tensor:
    """q [n, Hkv, G, D], k and v [n, Hkv, c, D], hidden and ahead (key - query) [n, c] → [n, Hkv,
    G, D], and lse [n, Hkv, G] where it is wanted.

    A KV head's group of query heads takes the place of the queries: GQA without copies, and a mask
    for all of them."""
    if slopes is None and spec.logit_softcap is None and lse is None:
        visible = ~hidden[:, None, None]  # [n, 1, 1, c]
        return F.scaled_dot_product_attention(
            q, k.to(q.dtype), v.to(q.dtype), attn_mask=visible, scale=spec.scale
        )
    scores = torch.matmul(q.float() * spec.scale, k.float().mT)  # [n, Hkv, G, c]
    if spec.logit_softcap is not None:
        scores.div_(spec.logit_softcap).tanh_().mul_(spec.logit_softcap)
    if slopes is not None:
        scores.addcmul_(
            slopes.view(spec.num_kv_heads, spec.group_size, 1), ahead[:, None, None].float()
        )
    scores.masked_fill_(hidden[:, None, None], -math.inf)
    if lse is not None:
        torch.logsumexp(scores, dim=-1, out=lse)
    return torch.matmul(scores.softmax(dim=-1), v.float())


def _groups(
    context_lens: NDArray[np.int32], window: int | None, most_tokens: int
) -> Iterator[tuple[NDArray[np.int64], int, int]]:
    """Rows of like length, and the first and past-the-last token that any of them sees: at most
    ``most_tokens`` of a group, padding included, or one row."""
    order = np.argsort(-context_lens, kind="stable")
    begin = 0
    while begin < len(order):
        last = int(context_lens[order[begin]])
        end = begin + 1
        while end < len(order):
            shortest = int(context_lens[order[end]])
            first = 0 if window is None else max(0, shortest - window)
            if (end + 1 - begin) * (last - first) > most_tokens:
                break
            end += 1
        shortest = int(context_lens[order[end - 1]])
        yield order[begin:end], 0 if window is None else max(0, shortest - window), last
        begin = end
