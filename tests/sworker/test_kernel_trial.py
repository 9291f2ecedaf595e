"""Kernels that read KV blocks where they lie are tried before they are relied on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import SPECS
from torch import Tensor

from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from sworker import paged
from sworker.dtypes import quantize
from sworker.kernel_trial import CHUNK_TOKENS
from sworker.kv_splits import Splits
from sworker.paged import PagedKV, gathered_decode
from sworker.prefill import chunk_attention

CPU = torch.device("cpu")
KINDS = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.INT8)


class RightKernels:
    """As ``paged_triton`` does it, in plain torch, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[AttentionSpec, int, torch.dtype, torch.dtype, tuple[int, ...]]] = []

    def paged_store(
        self, k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor, scales: Any
    ) -> None:
        is_stored = slots >= 0
        for i, (x, pool) in enumerate(((k, keys), (v, values))):
            rows = x[is_stored]
            if scales is not None:
                rows, of_rows = quantize(rows, DType.INT8)
                scales[i][slots[is_stored]] = of_rows
            pool[slots[is_stored]] = rows.to(pool.dtype)

    def paged_decode(
        self, q: Tensor, keys: Tensor, values: Tensor, scales: Any, tables: Tensor, lens: Tensor,
        splits: Splits, spec: AttentionSpec, slopes: Tensor | None, block_size: int, *, out: Tensor,
    ) -> None:  # fmt: skip
        self.asked.append((spec, block_size, q.dtype, keys.dtype, tuple(lens.tolist())))
        gathered_decode(
            q, keys, values, tables, lens.numpy(), spec, slopes, block_size, out=out, scales=scales
        )

    def chunk_tokens(self, spec: AttentionSpec, dtype: torch.dtype) -> int:
        return 8

    def paged_chunks(
        self, q: Tensor, keys: Tensor, values: Tensor, scales: Any, slots: Tensor, splits: Splits,
        spec: AttentionSpec, slopes: Tensor | None, *, out: Tensor,
    ) -> None:  # fmt: skip
        """Attend the last rows, one chunk; ``slots`` are those of all of its sequence."""
        seen = [x[slots].float() for x in (keys, values)]
        if scales is not None:
            seen = [x * of[slots][..., None] for x, of in zip(seen, scales, strict=True)]
        out[-CHUNK_TOKENS:] = chunk_attention(q[-CHUNK_TOKENS:].float(), *seen, spec)


def cache_of(
    kernels: Any, spec: AttentionSpec, kv: DType = DType.FLOAT32, block_size: int = 16,
    dtype: torch.dtype | None = None,
) -> PagedKV:  # fmt: skip
    shape = KVSpec(2, spec.num_kv_heads, spec.head_dim, kv, block_size)
    return PagedKV(shape, [spec, spec], 4, CPU, kernels, dtype)


@pytest.fixture(autouse=True)
def warns_again() -> None:
    paged._warn_of_kernels.cache_clear()


@pytest.mark.parametrize(("kv", "name"), list(zip((*KINDS, DType.INT8), SPECS, strict=True)))
def test_right_kernels_are_used(name: str, kv: DType, caplog: pytest.LogCaptureFixture) -> None:
    kernels = RightKernels()
    for block_size in (16, 64, 128):
        cache = cache_of(kernels, SPECS[name], kv, block_size)
        assert cache.kernels is kernels
    assert caplog.text == ""
    assert [(spec, size) for spec, size, *_ in kernels.asked] == [
        (SPECS[name], size)
        for size in (16, 64, 128)  # once, though layers are two
    ]


def test_they_are_tried_with_what_the_engine_will_ask() -> None:
    """Its activations' dtype and its cache's; short contexts, whole blocks, more
    than a block, and many splits; beyond a window."""
    kernels, spec = RightKernels(), SPECS["window"]
    cache_of(kernels, spec, DType.INT8, 64, torch.bfloat16)
    ((_, _, q_dtype, kv_dtype, lens),) = kernels.asked
    assert (q_dtype, kv_dtype) == (torch.bfloat16, torch.int8)
    assert spec.sliding_window is not None
    assert {1, 63, 65, 1000, spec.sliding_window + 7} <= set(lens)


def test_mixed_layers_are_all_tried() -> None:
    kernels, (one, other) = RightKernels(), (SPECS["plain"], SPECS["window"])
    PagedKV(KVSpec(3, 2, 12, DType.FLOAT32, 16), [one, other, one], 4, CPU, kernels)
    assert [spec for spec, *_ in kernels.asked] == [one, other]


class OutOfResourcesError(Exception):
    """As Triton's: no RuntimeError."""


def raises(*args: Any, **options: Any) -> None:
    raise OutOfResourcesError("out of resource: shared memory, Required: 151620\nmore")


def off_by_a_tenth(kernels: RightKernels) -> None:
    decode = kernels.paged_decode

    def decoded(*args: Any, out: Tensor) -> None:
        decode(*args, out=out)
        out *= 1.1

    kernels.paged_decode = decoded  # type: ignore[method-assign]


def sees_a_token_too_few(kernels: RightKernels) -> None:
    decode = kernels.paged_decode

    def decoded(q: Any, k: Any, v: Any, s: Any, t: Any, lens: Tensor, *args: Any, out: Any) -> None:
        decode(q, k, v, s, t, (lens - 1).clamp_(1), *args, out=out)

    kernels.paged_decode = decoded  # type: ignore[method-assign]


def stores_what_goes_nowhere(kernels: RightKernels) -> None:
    store = kernels.paged_store

    def stored(k: Tensor, v: Tensor, slots: Tensor, *args: Any) -> None:
        store(k, v, slots, *args)
        store(k[-1:], v[-1:], slots[:1], *args)

    kernels.paged_store = stored  # type: ignore[method-assign]


WRONG = (off_by_a_tenth, sees_a_token_too_few, stores_what_goes_nowhere)


@pytest.mark.parametrize("kv", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_kernels_are_not_used(
    mistake: Callable[[RightKernels], None], kv: DType, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = RightKernels()
    mistake(kernels)
    assert cache_of(kernels, SPECS["mha"], kv).kernels is None
    (record,) = caplog.records
    assert "off by" in record.message and record.levelname == "WARNING"


@pytest.mark.parametrize("name", ["paged_store", "paged_decode"])
def test_kernels_that_raise_cost_one_warning_and_no_engine(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache without them attends the gathered way. Before, its first step raised."""
    kernels = RightKernels()
    setattr(kernels, name, raises)
    caches = [cache_of(kernels, SPECS["plain"]) for _ in range(3)]
    assert all(cache.kernels is None for cache in caches)
    (record,) = caplog.records
    assert record.message.endswith("out of resource: shared memory, Required: 151620")
    cache, k = caches[0], torch.randn(5, 2, 12)
    cache.store(0, k, k, torch.arange(5))
    assert torch.equal(cache.pool[0, 0, :5], k)


def test_the_pool_itself_is_left_alone() -> None:
    """Nothing of the trial is in the cache."""
    for spec, kv in itertools.product((SPECS["plain"], SPECS["all"]), KINDS):
        kernels = RightKernels()
        cache = cache_of(kernels, spec, kv)
        keys_seen = {cache.pool.data_ptr()}
        store = kernels.paged_store
        kernels.paged_store = lambda k, v, slots, keys, *args, store=store, seen=keys_seen: (  # type: ignore[method-assign,misc]
            seen.add(keys.data_ptr()), store(k, v, slots, keys, *args))[1]  # fmt: skip
        cache._tried(kernels, torch.float32)
        assert len(keys_seen) == 2


def test_a_mistake_in_later_chunks_alone_is_found(caplog: pytest.LogCaptureFixture) -> None:
    class Shifted(RightKernels):
        def paged_chunks(self, q: Tensor, *rest: Any, out: Tensor) -> None:
            super().paged_chunks(q, *rest, out=out)
            out.copy_(out.roll(1, 0))

    class Raising(RightKernels):
        def paged_chunks(self, *rest: Any, out: Tensor) -> None:
            raise RuntimeError("out of resource: shared memory")

    for kernels in (Shifted(), Raising()):
        paged._warn_of_kernels.cache_clear()
        assert cache_of(kernels, SPECS["plain"]).kernels is None
    assert "out of resource: shared memory" in caplog.text and "off by" in caplog.text
