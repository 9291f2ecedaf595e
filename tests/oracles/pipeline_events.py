"""Pipelines stage by stage: every visit of a microbatch to a stage is an event, in strict
order of time. The product makes one event of a pass through all stages."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True)
class Span:
    """A stage at work."""

    began: Fraction
    ended: Fraction
    stage: int
    microbatch: int
    token: int
    """0: its prompt; n: its n-th token."""


@dataclass
class Events:
    """Stages that serve first come, first served.

    Args:
        tokens: of each microbatch.
        prompt, token: what a stage takes for either.
    """

    tokens: list[int]
    num_stages: int
    prompt: Fraction
    token: Fraction
    spans: list[Span] = field(default_factory=list)
    finished: dict[int, Fraction] = field(default_factory=dict)

    def run(self, starts: Iterator[tuple[Fraction, int]], first_pass: int) -> None:
        """As many are under way as there are stages."""
        order, free = itertools.count(), [Fraction(0)] * self.num_stages
        waiting: list[tuple[Fraction, int, int, int, int]] = []

        def admit(now: Fraction) -> None:
            for came, index in itertools.islice(starts, 1):
                heapq.heappush(waiting, (max(now, came), next(order), 0, index, first_pass))

        for _ in range(self.num_stages):
            admit(Fraction(0))
        while waiting:
            came, _, stage, index, token = heapq.heappop(waiting)
            began = max(came, free[stage])
            left = free[stage] = began + (self.token if token else self.prompt)
            self.spans.append(Span(began, left, stage, index, token))
            stage += 1
            if stage == self.num_stages:
                stage, token = 0, token + 1
            if token <= self.tokens[index]:
                heapq.heappush(waiting, (left, next(order), stage, index, token))
            else:
                self.finished[index] = left
                admit(left)
