"""Service-level objectives, and the share of requests that meets them.

Attainment has two meanings in the literature: the share of requests that meet both limits
(``both``, the paper's), or the quantiles of TTFT and of TPOT, each strictly below its own limit
(``each``, the published simulator's; quantiles are interpolated).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cost_model.numbers import at_most
from fastdecode.core.errors import ConfigError, Given

Attainment = Literal["both", "each"]
PRESETS = {
    "chatbot": "ttft=250ms,tpot=100ms",
    "chatbot-66b": "ttft=2.5s,tpot=150ms",
    "chatbot-175b": "ttft=4s,tpot=200ms",
    "code-completion": "ttft=125ms,tpot=200ms",
    "summarisation": "ttft=15s,tpot=150ms",
}
"""DistServe's (OSDI 2024, section 6; its artefact's evaluation/2-benchmark-serving/plot.ipynb):
chatbot for OPT-13B, code completion and summarisation for OPT-66B."""
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True)
class RequestTimes:
    arrived_s: float
    ttft_s: float
    tpot_s: float | None
    """None if its output is one token, which keeps any limit."""


@dataclass(frozen=True)
class Slo:
    ttft_s: float
    tpot_s: float
    attainment: float = 0.9

    def __post_init__(self) -> None:
        for name, value in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            if not value > 0:
                raise ConfigError(Given("slo"), f" {name} must be a time above 0, got {value!r} s")
        if not 0 < self.attainment <= 1:
            raise ConfigError(
                Given("attainment", self.attainment), " is not a part above 0 and at most 1"
            )

    @classmethod
    def parse(
        cls, text: str, attainment: float = 0.9, option: str = "slo", *, needs_both: bool = True
    ) -> Slo:
        """Read ``ttft=400ms,tpot=40ms``, or one of ``PRESETS``. Times have units. ``option`` is the
        parameter that errors name."""
        found: dict[str, float] = {}
        for part in PRESETS.get(text, text).split(","):
            name, _, value = part.strip().partition("=")
            match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(ms|us|s)", value.strip())
            if name not in ("ttft", "tpot") or name in found or match is None:
                raise ConfigError(
                    Given(option, text),
                    f": {part.strip()!r} is not like ttft=400ms or tpot=40ms; units are s, ms and "
                    f"us. Or name one of {', '.join(PRESETS)}",
                )
            found[name] = float(match[1]) * _SECONDS[match[2]]
        if len(found) < 2 and needs_both:
            raise ConfigError(Given(option, text), ": give both, like ttft=400ms,tpot=40ms")
        return cls(found.get("ttft", math.inf), found.get("tpot", math.inf), attainment)

    def is_met_by(self, request: RequestTimes) -> bool:
        is_quick = request.tpot_s is None or request.tpot_s <= self.tpot_s
        return is_quick and request.ttft_s <= self.ttft_s

    def share(self, requests: Sequence[RequestTimes]) -> float:
        """Return the share of requests that keep both limits. 1 if there are none."""
        return sum(map(self.is_met_by, requests)) / len(requests) if requests else 1.0

    def is_attained(self, requests: Sequence[RequestTimes], how: Attainment = "both") -> bool:
        if how == "both":
            return at_most(self.attainment * len(requests), sum(map(self.is_met_by, requests)))
        ttft_s, tpot_s = self.quantiles(requests)
        return ttft_s < self.ttft_s and tpot_s < self.tpot_s

    def quantiles(self, requests: Sequence[RequestTimes]) -> tuple[float, float]:
        """Return TTFT and TPOT at the attainment, each by itself. 0 where there are none."""
        ttfts = [each.ttft_s for each in requests]
        tpots = [each.tpot_s for each in requests if each.tpot_s is not None]
        ttft_s, tpot_s = (
            float(np.quantile(values, self.attainment)) if values else 0.0
            for values in (ttfts, tpots)
        )
        return ttft_s, tpot_s
