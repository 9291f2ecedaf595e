"""Attention sinks by the log-sum-exp, beside their definition."""

from __future__ import annotations

import pytest
import torch
from attention_cases import CPU, MOST_OFF, Case

SINKS = torch.linspace(-30.0, 30.0, 8)


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
