"""Attention sinks by the log-sum-exp, beside their definition."""

from __future__ import annotations

import pytest
import torch
from attention_cases import CPU, MOST_OFF, Case, dense

from fastdecode.core.spec import AttentionSpec
from sworker.prefill import merge_attention
from sworker.sinks import add_sinks

SINKS = torch.linspace(-30.0, 30.0, 8)


def test_parts_are_merged_first() -> None:
    """Of o in two parts, and their log-sum-exps: in float64 what the definition says."""
    generator = torch.Generator().manual_seed(0)
    spec = AttentionSpec(8, 2, 12, 0.3)
    q, k, v = (
        torch.randn(num, heads, 12, generator=generator, dtype=torch.float64)
        for num, heads in ((1, 8), (9, 2), (9, 2))
    )
    parts = [dense(q, k, v, spec, past=8, keys=keys) for keys in (slice(0, 4), slice(4, 9))]
    (o_a, lse_a), (o_b, lse_b) = parts
    share = torch.sigmoid(lse_a - lse_b)[..., None]
    o, lse = o_a * share + o_b * (1 - share), torch.logaddexp(lse_a, lse_b)
    expected = dense(q, k, v, spec, past=8, sinks=SINKS)[0]
    found = o * torch.sigmoid(lse - SINKS.double())[..., None]
    torch.testing.assert_close(found, expected, atol=1e-15, rtol=1e-14)
    single, single_lse = merge_attention(o_a.float(), lse_a.float(), o_b.float(), lse_b.float())
    add_sinks(single, single_lse, SINKS)
    torch.testing.assert_close(single.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "window", "softcap", "alibi"])
def test_a_cache_on_the_device(kind: str) -> None:
    """Decoded tokens, and later chunks, one of which sees nothing but itself."""
    case = Case(torch.float32, False, 16, 4, 16, kind)
    lens = (1, 63, 64, 65, 300)
    decoded = case.sequences([n - 1 for n in lens], [1] * len(lens), CPU, None, SINKS)
    assert decoded.error(decoded.step("decoded")) < MOST_OFF[torch.float32]
    later = case.sequences((64, 0, 63, 300), (9, 3, 20, 2), CPU, None, SINKS)
    assert later.error(later.step("later")) < MOST_OFF[torch.float32]


def test_first_chunks() -> None:
    case = Case(torch.float32, False, 16, 4, 16, "window")
    first = case.sequences((0, 0), (130, 7), CPU, None, SINKS)
    assert first.error(first.step("first")) < MOST_OFF[torch.float32]
