"""Step times of running instances, fitted to what they did between two looks at their totals."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

import numpy as np

from cost_model.fit import non_negative
from fastdecode.schedule.times import Prompts, StepTime

_MAX_ROWS = 2000
_MIN_ROWS = 20
_MIN_S = 1e-3
"""Seconds of steps between two looks. Less is noise."""


@dataclass(frozen=True)
class InstanceTotals:
    """Totals of one instance since its start."""

    steps: float = 0.0
    tokens: float = 0.0
    """Sampled tokens, one for each sequence of a step."""
    load: float = 0.0
    """Cached tokens of all running sequences, summed over steps."""
    prompt_tokens: float = 0.0
    seconds: float = 0.0
    """Time of all steps."""
    fetched_tokens: float = 0.0
    fetching_s: float = 0.0
    """Time in which tokens were being fetched."""

    def since(self, before: InstanceTotals) -> InstanceTotals:
        names = [field.name for field in fields(self)]
        return InstanceTotals(*(getattr(self, name) - getattr(before, name) for name in names))


@dataclass(frozen=True)
class LinearTimes(StepTime):
    """Straight lines of an instance as a whole. The link's time is part of its steps."""

    step_s: float
    """Time of any step."""
    token_s: float
    """Added for each sequence that samples a token."""
    cached_s: float
    """Added for each attended token."""
    prompt_s: float
    """Added for each token of a prompt."""
    fetched_s: float = 0.0
    """Time to fetch K and V of a token from another instance. 0 if none were fetched."""

    def s_part_s(self, num_decoding: int, prompts: Prompts = ()) -> float:
        # Prompts alone sample a token each.
        num_sampled, run = num_decoding or len(prompts), sum(new for _, new in prompts)
        return self.step_s + self.token_s * num_sampled + self.prompt_s * run

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        return self.cached_s * load_tokens

    def transfer_s(self, num_tokens: float) -> float:
        return self.fetched_s * num_tokens


class StepLog:
    """The latest differences between totals of instances."""

    def __init__(self) -> None:
        self._last: dict[str, InstanceTotals] = {}
        self._rows: deque[InstanceTotals] = deque(maxlen=_MAX_ROWS)

    def look(self, name: str, totals: InstanceTotals) -> None:
        """Add an instance's current totals. They fall if another process took its place."""
        before = self._last.get(name)
        self._last[name] = totals
        if before is None or totals.steps < before.steps:
            return
        row = totals.since(before)
        if row.steps > 0 and row.seconds >= _MIN_S:
            self._rows.append(row)

    def measured(self) -> LinearTimes | None:
        """Fit step times. None if too little has run, or no prompts, or no decoding."""
        rows = list(self._rows)
        has_both = sum(row.tokens for row in rows) and sum(row.prompt_tokens for row in rows)
        if len(rows) < _MIN_ROWS or not has_both:
            return None
        table = np.array([[row.steps, row.tokens, row.load, row.prompt_tokens] for row in rows])
        seconds = np.array([row.seconds for row in rows])
        found = non_negative(table / seconds[:, None], np.ones(len(rows)))
        # What took long by chance counted too little there: again, by what it should have taken.
        weights = 1 / np.sqrt(np.maximum(table @ np.array(found), _MIN_S))
        found = non_negative(table * weights[:, None], seconds * weights)
        fetched = sum(row.fetched_tokens for row in rows)
        fetching_s = sum(row.fetching_s for row in rows)
        step_s, token_s, cached_s, prompt_s = found
        fetched_s = fetching_s / fetched if fetched > 0 else 0.0
        return LinearTimes(step_s, token_s, cached_s, prompt_s, fetched_s)
