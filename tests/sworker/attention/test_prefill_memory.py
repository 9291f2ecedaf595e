"""What a chunk's own attention makes beside its result: tiles of bounded size,
and no copies that a device would be waited for."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from chunk_inputs import FEATURES, specs, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sworker.kernels.tiled as tiled
from examples import examples
from fastdecode.core.spec import AttentionSpec
from sworker.kernels.tiled import tile_shape
from sworker.prefill import local_causal_attention


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
