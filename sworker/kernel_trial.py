"""A trial of the kernels that read and write KV blocks where they lie: with an
engine's own heads, dtypes, block size, window, soft-cap and ALiBi, against plain
torch. It runs at every start, so it is also the first correctness check on a new
card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.spec import AttentionSpec, KVSpec
from sworker.dtypes import quantize, torch_dtype
from sworker.kv_splits import Splits, SplitShape, chunk_tiles, plan_decode, plan_splits

MAX_ERRORS: Final = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""By the activations' dtype: largest deviation that rounding explains, relative
to the largest value."""
_INT8_ERROR = 1e-2
"""With a cache of int8, at the least: a value at the middle between two whole
numbers may be rounded to either, a step of 1/127."""
_LONG = 1000
"""Tokens of the longest context: enough for several splits."""
_CHUNK = 20
"""Tokens of a later prompt chunk."""
_NUM_SHARES = 4
"""Of the work: the longest context is cut into several pieces, and merged."""
_NOWHERE = -1


class BlockKernels(Protocol):
    """What reads and writes blocks where they lie: ``paged_triton``."""

    paged_store: Callable[..., None]
    paged_decode: Callable[..., None]
    paged_chunks: Callable[..., None]
    chunk_tokens: Callable[..., int]


Decode = Callable[..., None]
"""``sworker.paged.gathered_decode``."""


@dataclass(frozen=True)
class Trial:
    """Kernels, and what an engine will ask of them."""

    kernels: BlockKernels
    kv: KVSpec
    device: torch.device
    dtype: torch.dtype
    decode: Decode

    def refusal(self, attention: Sequence[AttentionSpec]) -> str | None:
        """Why the kernels can't be used; None: they can."""
        bound = MAX_ERRORS[self.dtype]
        if not self.kv.dtype.is_float:
            bound = max(bound, _INT8_ERROR)
        for spec in dict.fromkeys(attention):
            try:
                error = self._error(spec)
            except Exception as raised:  # a compiler, a driver and Triton raise what they like
                lines = str(raised).strip().splitlines()
                return lines[0] if lines else type(raised).__name__
            if not error <= bound:
                return (
                    f"their results are off by {error:.2g} of the largest value, where rounding "
                    f"explains {bound:.2g}"
                )
        return None

    @torch.inference_mode()
    def _error(self, spec: AttentionSpec) -> float:
        """Largest deviation from plain torch, relative to the largest value."""
        rng = np.random.default_rng(0)
        lens = self._context_lens(spec)
        tables, slots = self._places(lens, rng)
        total = len(slots)
        q = self._draw(rng, len(lens), spec.num_q_heads)
        k, v = (self._draw(rng, total, spec.num_kv_heads) for _ in range(2))
        stored = self._stored(k, v, torch.from_numpy(slots).to(self.device))
        found = torch.empty_like(q)
        on_device = [torch.from_numpy(x).to(self.device) for x in (tables, lens)]
        plan = plan_decode(lens, spec.sliding_window, _NUM_SHARES)
        self.kernels.paged_decode(
            q, *stored, *on_device, Splits.upload(plan, self.device), spec, self._slopes(spec),
            self.kv.block_size, out=found,
        )  # fmt: skip
        seen = self._seen((k, v), slots, int(tables.max()) + 1)
        expected = self._attended(spec, q, seen, tables, lens)
        errors = [
            _deviation(found, expected),
            self._chunk_error(spec, stored, seen, tables, lens),
        ]
        return float(np.max(errors))  # NaN where one is

    def _chunk_error(
        self,
        spec: AttentionSpec,
        stored: tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None],
        seen: tuple[Tensor, Tensor],
        tables: NDArray[np.int32],
        lens: NDArray[np.int32],
    ) -> float:
        """The same of a later chunk: the last tokens of the longest sequence, each
        of which is attended as a decoded token would be."""
        longest = int(lens.argmax())
        num_keys, table = int(lens[longest]), tables[longest]
        places = np.arange(num_keys)
        slots = table[places // self.kv.block_size].astype(np.int64) * self.kv.block_size
        slots += places % self.kv.block_size
        q = self._draw(np.random.default_rng(1), _CHUNK, spec.num_q_heads)
        tokens = self.kernels.chunk_tokens(spec, self.dtype)
        one = np.array([0]), np.array([_CHUNK]), np.array([num_keys])
        tiles = chunk_tiles(*one, tokens)
        plan = plan_splits(
            tiles, spec.sliding_window, SplitShape(len(tiles.rows), _NUM_SHARES, tokens)
        )
        found = torch.empty_like(q)
        self.kernels.paged_chunks(
            q, *stored, torch.from_numpy(slots).to(self.device),
            Splits.upload(plan, self.device), spec, self._slopes(spec), out=found,
        )  # fmt: skip
        each = np.arange(num_keys - _CHUNK + 1, num_keys + 1, dtype=np.int32)
        expected = self._attended(spec, q, seen, np.repeat(table[None], _CHUNK, axis=0), each)
        return _deviation(found, expected)

    def _context_lens(self, spec: AttentionSpec) -> NDArray[np.int32]:
        size = self.kv.block_size
        lens = [1, size - 1, size + 1, 3 * size + 5, _LONG]
        if spec.sliding_window is not None:
            lens.append(min(spec.sliding_window, _LONG) + 7)
        return np.array(lens, np.int32)

    def _places(
        self, lens: NDArray[np.int32], rng: np.random.Generator
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Block tables [N, W], blocks in random order, and the slots of all
        tokens, one sequence after another."""
        size = self.kv.block_size
        widths = -(-lens // size)
        blocks = rng.permutation(int(widths.sum())).astype(np.int32)
        tables = np.zeros((len(lens), int(widths.max())), np.int32)
        slots, first = [], 0
        for row, (num_tokens, width) in enumerate(zip(lens, widths, strict=True)):
            tables[row, :width] = blocks[first : first + width]
            first += width
            places = np.arange(num_tokens)
            slots.append(tables[row, places // size].astype(np.int64) * size + places % size)
        return tables, np.concatenate(slots)

    def _stored(
        self, k: Tensor, v: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Keys, values and scales [slots, Hkv, ...] after the kernels stored k
        and v, and one row that goes nowhere. A last block is nobody's."""
        size, num = self.kv.block_size, -(-int(slots.max()) // self.kv.block_size) + 1
        shape = (2, num * size, *k.shape[1:])
        if self.kv.dtype.is_float:
            pool = torch.full(shape, torch.nan, dtype=torch_dtype(self.kv.dtype), device=k.device)
            scales = None
        else:
            pool = torch.zeros(shape, dtype=torch.int8, device=k.device)
            nan = torch.full(shape[:-1], torch.nan, dtype=torch.float32, device=k.device)
            scales = (nan[0], nan[1])
        nowhere = torch.full((1,), _NOWHERE, dtype=torch.int64, device=k.device)
        k, v = (torch.cat((x, torch.full_like(x[:1], torch.nan))) for x in (k, v))
        self.kernels.paged_store(k, v, torch.cat((slots, nowhere)), pool[0], pool[1], scales)
        return pool[0], pool[1], scales

    def _seen(
        self, new: tuple[Tensor, Tensor], slots: NDArray[np.int64], num_blocks: int
    ) -> tuple[Tensor, Tensor]:
        """float32 K and V [slots, Hkv, D] as the cache holds them, rounded."""
        index = torch.from_numpy(slots).to(self.device)
        pools = []
        for x in new:
            if self.kv.dtype.is_float:
                rounded = x.to(torch_dtype(self.kv.dtype)).float()
            else:
                whole, scales = quantize(x, self.kv.dtype)
                rounded = whole * scales[..., None]
            pool = torch.zeros((num_blocks * self.kv.block_size, *x.shape[1:]), device=x.device)
            pools.append(pool.index_copy_(0, index, rounded))
        return pools[0], pools[1]

    def _attended(
        self,
        spec: AttentionSpec,
        q: Tensor,
        seen: tuple[Tensor, Tensor],
        tables: NDArray[np.int32],
        lens: NDArray[np.int32],
    ) -> Tensor:
        """float32 [N, Hq, D] by plain torch."""
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        self.decode(
            q.float(), *seen, torch.from_numpy(tables).to(self.device), lens, spec,
            self._slopes(spec), self.kv.block_size, out=out,
        )  # fmt: skip
        return out

    def _draw(self, rng: np.random.Generator, num_rows: int, num_heads: int) -> Tensor:
        drawn = rng.standard_normal((num_rows, num_heads, self.kv.head_dim), np.float32)
        return torch.from_numpy(drawn).to(self.device, self.dtype)

    def _slopes(self, spec: AttentionSpec) -> Tensor | None:
        if spec.alibi_slopes is None:
            return None
        return torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=self.device)


def _deviation(found: Tensor, expected: Tensor) -> float:
    """The largest, relative to the largest value; NaN stays NaN."""
    return float(((found.float() - expected).abs().max() / expected.abs().max()).item())
