"""Requests by their lengths and arrival."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ArrivalUnit = Literal["s", "step"]


@dataclass(frozen=True)
class TracedRequest:
    """One request, and what will come of it."""

    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    """At least ``num_output_tokens``. If they are equal, the scheduler knows the length."""
    arrival: float = 0.0


@dataclass(frozen=True)
class RequestTrace:
    """Requests in order of arrival."""

    requests: tuple[TracedRequest, ...]
    unit: ArrivalUnit = "s"
    """Unit of ``arrival``."""

    @property
    def mean_output_tokens(self) -> float:
        return sum(request.num_output_tokens for request in self.requests) / len(self.requests)
