"""A chunk's own attention against a dense float64 reference; merging it with the attention
to a past; and what it makes beside its result: tiles of bounded size, and no copies that a
device would be waited for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from attention_cases import SLOPES, dense
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sworker.kernels.tiled as tiled
import sworker.prefill as prefill
from examples import examples
from fastdecode.core.spec import AttentionSpec
from sworker.kernels.tiled import tile_shape
from sworker.prefill import local_causal_attention, merge_attention


def tensors(
    spec: AttentionSpec, num_tokens: int, seed: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
    return [torch.randn(num_tokens, h, spec.head_dim, generator=generator).to(dtype) for h in heads]


def starts_of(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    num_kv_heads, group = draw(st.sampled_from([(1, 1), (1, 4), (3, 2), (2, 7), (4, 1)]))
    num_q_heads, head_dim = num_kv_heads * group, draw(st.sampled_from([1, 7, 16, 40]))
    return AttentionSpec(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=draw(st.sampled_from([head_dim**-0.5, 0.3])),
        sliding_window=draw(st.none() | st.integers(1, 50)),
        alibi_slopes=tuple(2.0**-h for h in range(num_q_heads)) if draw(st.booleans()) else None,
        logit_softcap=draw(st.sampled_from([None, None, 2.0])),
    )


_PLAIN = AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=16, scale=0.25)
FEATURES = {
    "plain": _PLAIN,
    "window": replace(_PLAIN, sliding_window=9),
    "window of one": replace(_PLAIN, sliding_window=1),
    "wide window": replace(_PLAIN, sliding_window=10_000),
    "alibi": replace(_PLAIN, alibi_slopes=SLOPES),
    "softcap": replace(_PLAIN, logit_softcap=1.5),
    "all": replace(_PLAIN, sliding_window=33, alibi_slopes=SLOPES, logit_softcap=4.0),
}


@settings(max_examples=examples(240), deadline=None)
@given(
    specs(),
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
    st.booleans(),
    st.integers(0, 1 << 30),
)
def test_ragged_sequences_of_any_kind(
    spec: AttentionSpec, lengths: list[int], want_lse: bool, seed: int
) -> None:
    q, k, v = tensors(spec, sum(lengths), seed)
    with mock.patch.multiple(
        tiled, MAX_CPU_TILE_BYTES=spec.num_q_heads * 4 * 300, MAX_CPU_TILE_QUERIES=13
    ):
        o, lse = local_causal_attention(q, k, v, starts_of(lengths), spec, want_lse=want_lse)
    assert o.shape == q.shape
    assert (lse is not None) == want_lse
    for start, length in zip(starts_of(lengths), lengths, strict=True):
        rows = slice(start, start + length)
        expected, expected_lse = dense(q[rows], k[rows], v[rows], spec)
        torch.testing.assert_close(o[rows].double(), expected, atol=3e-6, rtol=1e-5)
        if lse is not None:
            torch.testing.assert_close(lse[rows].double(), expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FEATURES)
def test_long_sequences_with_tiles_of_the_real_size(name: str) -> None:
    spec = FEATURES[name]
    q, k, v = tensors(spec, 700, seed=1)
    o, lse = local_causal_attention(q, k, v, [0], spec, want_lse=True)
    expected, expected_lse = dense(q, k, v, spec)
    assert lse is not None
    torch.testing.assert_close(o.double(), expected, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("want_lse", [False, True])
def test_neighbours_change_no_bit(name: str, want_lse: bool) -> None:
    spec, lengths = FEATURES[name], [3, 128, 1, 40, 200]
    q, k, v = tensors(spec, sum(lengths), seed=2)
    starts = [*starts_of(lengths), sum(lengths)]
    together = local_causal_attention(q, k, v, starts, spec, want_lse=want_lse)
    for start, length in zip(starts_of(lengths), lengths, strict=True):
        rows = slice(start, start + length)
        alone = local_causal_attention(q[rows], k[rows], v[rows], [0], spec, want_lse=want_lse)
        for one, among in zip(alone, together, strict=True):
            assert one is among is None or torch.equal(one, among[rows])


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1.5e-3)])
def test_16_bit_inputs_lose_no_more_than_the_outputs_rounding(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    spec = FEATURES[name]
    q, k, v = tensors(spec, 300, seed=3, dtype=dtype)
    o, lse = local_causal_attention(q, k, v, [0], spec, want_lse=True)
    expected, expected_lse = dense(q, k, v, spec)
    assert o.dtype == dtype
    assert lse is not None and lse.dtype == torch.float32
    assert torch.equal(o, expected.to(dtype)) or (o.double() - expected).abs().max() < tolerance
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("want_lse", [False, True])
@pytest.mark.parametrize("layout", ["by head", "padded"])
def test_all_sequences_in_one_call_where_there_is_a_kernel(
    layout: str, want_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself runs on CUDA only: here a stand-in follows its signature."""
    spec = FEATURES["plain"]
    q, k, v = tensors(spec, 90, seed=12)
    starts = [0, 7, 7, 50, 90]
    expected = local_causal_attention(q, k, v, starts, spec, want_lse=want_lse)
    calls = []

    def ragged(
        q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, most_q: int,
        most_k: int, dropout: float, causal: bool, debug: bool, *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        calls.append(q_starts.tolist())
        assert q_starts.dtype == k_starts.dtype == torch.int32 and (most_q, most_k) == (43, 43)
        assert (dropout, causal, debug, scale) == (0.0, True, False, spec.scale)
        rows = [slice(a, b) for a, b in itertools.pairwise(q_starts.tolist())]
        o, lse = zip(*(dense(q[r], k[r], v[r], spec) for r in rows), strict=True)
        log_sums = torch.cat(lse).float().T if layout == "by head" else torch.zeros(3, 6, 43)
        return torch.cat(o).float(), log_sums, torch.zeros(2), torch.zeros(0), torch.zeros(0)

    monkeypatch.setattr(prefill, "_has_ragged_kernel", lambda _: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", ragged)
    found = local_causal_attention(q, k, v, starts, spec, want_lse=want_lse)
    assert calls == [[0, 7, 50, 90]]
    torch.testing.assert_close(found, expected, atol=3e-6, rtol=1e-5)
    if layout == "by head":
        one = tensors(spec, 43, seed=12)
        with mock.patch("torch.nn.functional.scaled_dot_product_attention") as planned:
            alone, _ = local_causal_attention(*one, [0], spec, want_lse=want_lse)
        torch.testing.assert_close(alone, dense(*one, spec)[0].float(), atol=3e-6, rtol=1e-5)
        assert calls.pop() == [0, 43] and not planned.called
    for other in ("window", "alibi", "softcap"):  # not its business
        local_causal_attention(q, k, v, starts, FEATURES[other], want_lse=False)
    assert len(calls) == 1


def test_later_chunks_in_one_call_where_there_is_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, num_new, num_keys = FEATURES["plain"], [3, 20, 1], [30, 20, 8]
    queries, (_, keys, values) = tensors(spec, 24, seed=13)[0], tensors(spec, 58, seed=14)
    assert not prefill.can_take_together(queries, num_keys, spec)  # not on a CPU
    alone = [
        prefill.chunk_attention(q, k, v, spec)
        for q, k, v in zip(*(x.split(n) for x, n in (
            (queries, num_new), (keys, num_keys), (values, num_keys))), strict=True)
    ]  # fmt: skip

    def ragged(
        q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, *_: object,
        scale: float,
    ) -> Any:  # fmt: skip
        ends = (itertools.pairwise(starts.tolist()) for starts in (q_starts, k_starts))
        parts = [
            dense(q[a:b], k[c:d], v[c:d], spec, past=(d - c) - (b - a))[0]
            for (a, b), (c, d) in zip(*ends, strict=True)
        ]
        return torch.cat(parts).float(), torch.zeros(6, 24)

    monkeypatch.setattr(prefill, "_has_ragged_kernel", lambda _: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", ragged)
    assert prefill.can_take_together(queries, num_keys, spec)
    assert not prefill.can_take_together(queries, num_keys, FEATURES["window"])
    found = prefill.chunks_together(queries, keys, values, num_new, num_keys, spec)
    torch.testing.assert_close(found, torch.cat(alone), atol=3e-6, rtol=1e-5)
    with mock.patch.object(prefill, "_fused") as planned:
        one = prefill.chunk_attention(queries[:3], keys[:30], values[:30], spec)
    torch.testing.assert_close(one, found[:3])
    assert not planned.called


@settings(max_examples=examples(120), deadline=None)
@given(specs(), st.lists(st.integers(1, 40), min_size=2, max_size=4), st.integers(0, 1 << 30))
def test_chunks_merged_with_their_past_are_the_whole(
    spec: AttentionSpec, chunks: list[int], seed: int
) -> None:
    total = sum(chunks)
    q, k, v = tensors(spec, total, seed)
    whole, whole_lse = dense(q, k, v, spec)
    for start, length in zip(starts_of(chunks), chunks, strict=True):
        rows = slice(start, start + length)
        own, own_lse = local_causal_attention(q[rows], k[rows], v[rows], [0], spec, want_lse=True)
        assert own_lse is not None
        seen = slice(0, start + length)
        past, past_lse = dense(q[rows], k[seen], v[seen], spec, past=start, keys=slice(0, start))
        o, lse = merge_attention(own, own_lse, past.float(), past_lse.float())
        torch.testing.assert_close(o.double(), whole[rows], atol=5e-6, rtol=1e-5)
        torch.testing.assert_close(lse.double(), whole_lse[rows], atol=1e-5, rtol=1e-5)


def test_merging_with_nothing_is_exact() -> None:
    o_a, o_b = torch.randn(2, 4, 2, 8, generator=torch.Generator().manual_seed(7))
    lse_a, lse_b = torch.randn(2, 4, 2, generator=torch.Generator().manual_seed(8))
    lse_a[0] = lse_b[1] = lse_a[2] = lse_b[2] = -math.inf
    o_a[0] = o_b[1] = o_a[2] = o_b[2] = math.nan
    o, lse = merge_attention(o_a, lse_a, o_b, lse_b)
    assert torch.equal(o[0], o_b[0]) and torch.equal(lse[0], lse_b[0])
    assert torch.equal(o[1], o_a[1]) and torch.equal(lse[1], lse_a[1])
    assert not o[2].any() and (lse[2] == -math.inf).all()
    assert o.isfinite().all()


def test_merging_is_symmetric_and_survives_extreme_scores() -> None:
    o_a, o_b = torch.full((4, 1, 2), 1.0), torch.full((4, 1, 2), 3.0)
    lse_a = torch.tensor([[500.0], [-500.0], [1e30], [0.0]])
    lse_b = torch.tensor([[0.0], [-500.0], [-1e30], [math.log(3)]])
    o, lse = merge_attention(o_a, lse_a, o_b, lse_b)
    torch.testing.assert_close(o[:, 0, 0], torch.tensor([1.0, 2.0, 1.0, 2.5]))
    torch.testing.assert_close(
        lse[:, 0], torch.tensor([500.0, -500.0 + math.log(2), 1e30, math.log(4)])
    )
    swapped, swapped_lse = merge_attention(o_b, lse_b, o_a, lse_a)
    assert torch.equal(o, swapped) and torch.equal(lse, swapped_lse)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for name, want_lse in itertools.product(FEATURES, (False, True)):
        spec = FEATURES[name]
        q, k, v = tensors(spec, 500, seed=10, dtype=dtype)
        o, lse = local_causal_attention(
            q.cuda(), k.cuda(), v.cuda(), [0, 123], spec, want_lse=want_lse
        )
        for rows in (slice(0, 123), slice(123, 500)):
            expected, expected_lse = dense(q[rows], k[rows], v[rows], spec)
            torch.testing.assert_close(
                o[rows].double().cpu(), expected, atol=tolerance, rtol=tolerance
            )
            if lse is not None:
                torch.testing.assert_close(
                    lse[rows].double().cpu(), expected_lse, atol=1e-4, rtol=1e-4
                )


@given(st.integers(1, 1024), st.integers(1, 1 << 24), st.booleans())
def test_a_tile_fits_whatever_the_length(num_q_heads: int, num_tokens: int, on_cpu: bool) -> None:
    num_queries, num_keys = tile_shape(num_q_heads, num_tokens, on_cpu=on_cpu)
    assert 1 <= num_queries <= num_keys <= num_tokens
    assert 4 * num_q_heads * num_queries * num_keys <= 64 << 20


def test_no_scores_beyond_a_tile_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    bmm = torch.bmm

    def spy(a: Tensor, b: Tensor) -> Tensor:
        scores = bmm(a, b)
        sizes.append(scores.numel() * 4)
        return scores

    monkeypatch.setattr(torch, "bmm", spy)
    monkeypatch.setattr(tiled, "MAX_CPU_TILE_BYTES", 1 << 16)
    spec = AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, scale=0.3, logit_softcap=3.0)
    q, k, v = tensors(spec, 600, seed=8)
    local_causal_attention(q, k, v, [0], spec, want_lse=True)
    assert max(sizes) <= 1 << 16
    # Above the diagonal, and before the window, nothing is computed beyond the tiles on the edge.
    causal = sum(sizes)
    assert causal < 4 * 4 * 600 * 600 * 0.65
    sizes.clear()
    windowed = AttentionSpec(
        num_q_heads=4, num_kv_heads=2, head_dim=8, scale=0.3, sliding_window=50
    )
    local_causal_attention(q, k, v, [0], windowed, want_lse=True)
    assert sum(sizes) < 0.4 * causal


@settings(max_examples=examples(80), deadline=None)
@given(
    specs(), st.integers(1, 100), st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
)
def test_the_fused_way_never_falls_back_on_all_scores(
    spec: AttentionSpec, num_tokens: int, dtype: torch.dtype
) -> None:
    chosen = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        chosen.append(torch._fused_sdp_choice(q, k, v, **options))  # type: ignore[arg-type]
        return attention(q, k, v, **options)  # type: ignore[arg-type]

    plain = AttentionSpec(spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.scale)
    with mock.patch("torch.nn.functional.scaled_dot_product_attention", spy):
        q, k, v = tensors(plain, num_tokens, 9, dtype)
        local_causal_attention(q, k, v, [0], plain, want_lse=False)
    assert chosen == [torch.nn.attention.SDPBackend.FLASH_ATTENTION.value]


def test_tiles_copy_nothing_that_a_device_would_be_waited_for() -> None:
    """ALiBi's slopes are read from pinned memory."""
    spec, device = FEATURES["alibi"], torch.device("cpu")
    q, k, v = tensors(spec, 20, seed=15)
    with mock.patch.object(tiled, "to_device", side_effect=tiled.to_device) as copied:
        tiled.tiled(q, k, v, spec, torch.empty_like(q), None)
    (slopes, where), _ = copied.call_args
    assert slopes.tolist() == pytest.approx(spec.alibi_slopes) and where == device
